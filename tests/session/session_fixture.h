// Sessions on thread ranks over a virtual link: every test says what one rank does, and gets what all ranks saw.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gradgate/gradgate.h"
#include "tests/support/rank_harness.h"

namespace gradgate::test {

/// Runs body(rank, communicator) on one thread per rank. With a link the communicators share a virtual clock.
inline void on_ranks(int ranks, const LinkSpec* link, const std::function<void(int, Communicator&)>& body) {
  run_ranks(ranks, [&](Communicator& bare) {
    std::unique_ptr<Communicator> shaped;
    if (link != nullptr && !make_shaped(bare, *link, ClockKind::virtual_time, &shaped).ok()) std::abort();
    body(bare.rank(), link != nullptr ? *shaped : bare);
  });
}

inline CodecSpec codec(const char* text) {
  CodecSpec spec;
  Message why;
  EXPECT_TRUE(parse_codec(text, &spec, &why).ok()) << why.text;
  return spec;
}

/// What a session said, line by line.
struct Lines {
  std::vector<std::string> lines;
  static void log(void* self, const char* line, size_t length) {
    static_cast<Lines*>(self)->lines.emplace_back(line, length);
  }
  static void explain(void* self, const char* line) { static_cast<Lines*>(self)->lines.emplace_back(line); }
  bool any_contains(const std::string& text) const {
    for (const std::string& line : lines)
      if (line.find(text) != std::string::npos) return true;
    return false;
  }
};

inline constexpr LinkSpec kGigabit{50e-6, 125e6};
inline constexpr LinkSpec kNvlink{0.5e-6, 450e9};

/// A session whose options the caller may change first. Codec speed on the virtual clock: 2 GB/s each way.
inline std::unique_ptr<Session> make_session(Communicator& comm, Mode mode, const std::vector<CodecSpec>& codecs,
                                             const std::function<void(SessionOptions&)>& change = {}) {
  SessionOptions options;
  options.mode = mode;
  options.codecs = codecs;
  options.timeout_s = 20;
  options.virtual_rates = {2e9, 2e9};
  if (change) change(options);
  std::unique_ptr<Session> session;
  Message why;
  const Status s = Session::create(comm, options, &session, &why);
  EXPECT_TRUE(s.ok()) << why.text;
  return session;
}

/// One bucket per entry; parameter ids count up from `first_id`, one parameter per bucket unless split.
inline Status set_simple_layout(Session& session, const std::vector<size_t>& counts, DType dtype = DType::f32,
                                uint64_t first_id = 1) {
  std::vector<ParamSlice> slices;
  for (size_t i = 0; i < counts.size(); ++i) slices.push_back({first_id + i, 0, counts[i]});
  std::vector<BucketLayout> layout;
  for (const ParamSlice& slice : slices) layout.push_back({dtype, {&slice, 1}});
  return session.set_layout(layout);
}

/// Small integers, different for every rank, step and element; zero now and then. Sums of hundreds of them are exact in
/// f32.
inline float small_integer(int rank, uint64_t step, size_t i) {
  uint64_t x = static_cast<uint64_t>(rank + 1) * 0x9e3779b97f4a7c15ull + step * 0xbf58476d1ce4e5b9ull +
               i * 0x94d049bb133111ebull;
  x ^= x >> 31;
  x *= 0xd6e8feb86659fd93ull;
  x ^= x >> 29;
  return static_cast<float>(static_cast<int>(x % 17) - 8);
}

}  // namespace gradgate::test
