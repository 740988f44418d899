// Short forms of the codec calls for tests: buffers are made here, statuses are expected to be ok.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "gradgate/codec.h"
#include "tests/support/canary.h"
#include "tests/support/specs.h"

namespace gradgate::test {

/// A payload at an aligned address.
class Payload {
 public:
  explicit Payload(size_t bytes) : memory_(bytes) {}
  std::byte* data() { return memory_.data(); }
  const std::byte* data() const { return memory_.data(); }
  size_t size() const { return memory_.size(); }
  ConstBytes view() const { return {data(), size()}; }
  template <class T>
  T get(size_t at) const {
    T value;
    std::memcpy(&value, data() + at, sizeof value);
    return value;
  }
  template <class T>
  void put(size_t at, T value) {
    std::memcpy(data() + at, &value, sizeof value);
  }
  friend bool operator==(const Payload& a, const Payload& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
  }

 private:
  Guarded memory_;
};

inline Payload encode(const char* spec_text, ConstVec gradient, float* residual = nullptr, EncodeStats* stats = nullptr,
                      bool flush = false, const Seed& seed = {}) {
  const CodecSpec spec = spec_of(spec_text);
  Payload payload(payload_bytes(spec, gradient.dtype, gradient.count));
  std::vector<std::byte> workspace(workspace_bytes(spec, gradient.dtype, gradient.count));
  EncodeArgs args;
  args.gradient = gradient;
  args.residual = residual;
  args.payload = {payload.data(), payload.size()};
  args.workspace = workspace;
  args.flush = flush;
  args.seed = seed;
  const Status status = encode(spec, args, stats);
  EXPECT_TRUE(status.ok()) << spec_text << ": " << status.message();
  return payload;
}
inline Payload encode(const char* spec, const std::vector<float>& gradient, std::vector<float>* residual = nullptr,
                      EncodeStats* stats = nullptr, bool flush = false, const Seed& seed = {}) {
  return encode(spec, {gradient.data(), gradient.size(), DType::f32}, residual == nullptr ? nullptr : residual->data(),
                stats, flush, seed);
}

inline std::vector<float> decode(const char* spec_text, const Payload& payload, size_t count, float scale = 1.0f,
                                 DType gradient = DType::f32) {
  std::vector<float> out(count, -7.0f);
  DecodeArgs args;
  args.payload = payload.view();
  args.gradient = gradient;
  args.out = {out.data(), count, DType::f32};
  args.scale = scale;
  const Status status = decode(spec_of(spec_text), args);
  EXPECT_TRUE(status.ok()) << spec_text << ": " << status.message();
  return out;
}
inline std::vector<float> round_trip(const char* spec, const std::vector<float>& gradient) {
  return decode(spec, encode(spec, gradient), gradient.size());
}

/// Sections of a payload made for `count` elements, by the table of docs/format.md.
inline size_t section1(size_t section0_bytes) { return 32 + (section0_bytes + 15) / 16 * 16; }
/// Bytes of a section of values.
inline size_t section_of_values(DType value, size_t entries) {
  return value == DType::u8 ? section1((entries + 255) / 256 * 4) - 32 + entries : entries * dtype_bytes(value);
}
inline std::vector<uint16_t> topk_indices(const Payload& payload, size_t entries, DType value = DType::f32) {
  std::vector<uint16_t> index(entries);
  for (size_t i = 0; i < entries; ++i)
    index[i] = payload.get<uint16_t>(section1(section_of_values(value, entries)) + 2 * i);
  return index;
}

}  // namespace gradgate::test
