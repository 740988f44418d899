// topk: the exact choice, whatever the values are and wherever the threshold began.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "codecs/reference.h"
#include "kernels/cpu/calls.h"
#include "tests/support/bytes_equal.h"
#include "tests/support/canary.h"
#include "tests/support/gen.h"
#include "tests/support/specs.h"
#include "tests/support/threads.h"
#include "tests/support/topk_cases.h"

namespace gradgate::test {
namespace {

using kernels::cpu::all_loops;
using kernels::cpu::Loops;

/// Encodes with every instruction set and 1 and 3 threads, with and without feedback, from several thresholds, and
/// compares payload and residual with the reference.
void expect_exact(const char* text, const std::vector<float>& x, const std::string& what) {
  SCOPED_TRACE(std::string(text) + " " + what);
  const CodecSpec spec = spec_of(text);
  const size_t n = x.size();
  for (const bool feedback : {false, true}) {
    std::vector<float> g = x, e(feedback ? n : 0);
    if (feedback) {  // the same x, half of it from the residual
      for (size_t i = 0; i < n; ++i) {
        if (std::isfinite(x[i])) g[i] = e[i] = x[i] * 0.5f;
      }
    }
    std::vector<float> e_expected = e;
    EncodeStats expected_stats;
    const std::vector<std::byte> expected = reference::encode(
        spec, {g.data(), n, DType::f32}, feedback ? e_expected.data() : nullptr, false, {}, &expected_stats);
    for (const Loops* loops : all_loops()) {
      for (const unsigned width : {1u, 3u}) {
        for (const uint32_t start : {0u, 1u, 0x3f800000u, 0x7f800000u, 0xffffffffu}) {
          SCOPED_TRACE(std::string(loops->name) + " threads " + std::to_string(width) + " threshold " +
                       std::to_string(start) + (feedback ? " feedback" : ""));
          Guarded payload(expected.size()), workspace(workspace_bytes(spec, DType::f32, n, width), 5);
          std::vector<float> residual = e;
          uint32_t threshold = start;
          EncodeArgs args;
          args.gradient = {g.data(), n, DType::f32};
          args.residual = feedback ? residual.data() : nullptr;
          args.payload = {payload.data(), payload.size()};
          args.workspace = {workspace.data(), workspace.size()};
          args.executor = threads(width);
          args.threshold = &threshold;
          EncodeStats stats;
          ASSERT_TRUE(encode(*loops, spec, args, &stats).ok());
          ASSERT_TRUE(bytes_equal(expected.data(), payload.data(), expected.size(), 4));
          ASSERT_TRUE(bytes_equal(e_expected.data(), residual.data(), residual.size() * 4, 4)) << "residual";
          ASSERT_EQ(stats.non_finite, expected_stats.non_finite);
          ASSERT_TRUE(payload.intact() && workspace.intact());
          ASSERT_NE(threshold, 0xffffffffu);
        }
      }
    }
  }
}

TEST(TopkAdversary, AllEqual) {
  for (const TopkCase& c : topk_all_equal()) expect_exact(c.spec, c.x, c.what);
}

TEST(TopkAdversary, SortedEitherWay) {
  for (const TopkCase& c : topk_sorted()) expect_exact(c.spec, c.x, c.what);
}

TEST(TopkAdversary, OneSpikeAndMostlyZeros) {
  for (const TopkCase& c : topk_spikes()) expect_exact(c.spec, c.x, c.what);
}

TEST(TopkAdversary, DifferencesInTheLastBitOnly) {
  for (const TopkCase& c : topk_last_bits()) expect_exact(c.spec, c.x, c.what);
}

TEST(TopkAdversary, NaNBeforeInfBeforeFinite) {
  for (const TopkCase& c : topk_non_finite()) expect_exact(c.spec, c.x, c.what);
}

// Large only where the sample looks, or only where it does not, and rising where it does not.
TEST(TopkAdversary, TheSampleIsMisled) {
  for (const bool large_in_sample : {true, false}) {
    std::vector<float> x(kLong);
    for (size_t i = 0; i < kLong; ++i) {
      bool seen = false;
      for (const size_t step : {size_t{16}, size_t{256}, size_t{512}, size_t{768}, size_t{4096}})
        seen = seen || i % step < 16;
      x[i] = seen == large_in_sample ? 1.0f + static_cast<float>(i) : 1e-6f;
    }
    expect_exact("topk:0.01", x, large_in_sample ? "too high" : "too low");
    expect_exact("topk:0.002", x, large_in_sample ? "too high" : "too low");
  }
}

TEST(TopkAdversary, ShortVectors) {
  for (size_t n = 1; n <= 40; ++n) expect_exact("topk:0.3", generate(Gen::ties, n, n), "n " + std::to_string(n));
  for (const size_t n : {63, 64, 65, 1023, 1024, 1025, 65535, 65536, 65537}) {
    expect_exact("topk:0.01", generate(Gen::ties, n, n), "n " + std::to_string(n));
    expect_exact("topk:1", generate(Gen::heavy_tail, n, n), "n " + std::to_string(n));
  }
}

// Zero groups keep their residual and send nothing, also when everything is collected again.
TEST(TopkFeedback, ZeroGroupsThroughASecondCollection) {
  const size_t n = 70000;
  std::vector<float> g = generate(Gen::zero_groups, n, 1), e = generate(Gen::gaussian, n, 2);
  for (size_t i = 0; i < n; ++i) {
    if (i / 256 % 2 == 1) g[i] = -0.0f, e[i] = 100.0f;  // large residuals that may not be sent
  }
  for (const char* text : {"topk:0.01", "topk:0.7:bf16"}) {
    for (const bool flush : {false, true}) {
      for (const uint32_t start : {0u, 0x7f000000u}) {
        std::vector<float> expected_e = e, got_e = e;
        const CodecSpec spec = spec_of(text);
        const auto expected = reference::encode(spec, {g.data(), n, DType::f32}, expected_e.data(), flush, {}, nullptr);
        Guarded payload(expected.size());
        std::vector<std::byte> workspace(workspace_bytes(spec, DType::f32, n));
        uint32_t threshold = start;
        EncodeArgs args;
        args.gradient = {g.data(), n, DType::f32};
        args.residual = got_e.data();
        args.payload = {payload.data(), payload.size()};
        args.workspace = workspace;
        args.flush = flush;
        args.threshold = &threshold;
        ASSERT_TRUE(encode(spec, args, nullptr).ok());
        EXPECT_TRUE(bytes_equal(expected.data(), payload.data(), expected.size(), 4)) << text << flush << start;
        EXPECT_TRUE(bytes_equal(expected_e.data(), got_e.data(), n * 4, 4)) << text << flush << start;
      }
    }
  }
}

// The threshold that comes back is the key of the last entry.
TEST(TopkThreshold, IsThatOfThisStep) {
  std::vector<float> x(1000);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  const CodecSpec spec = spec_of("topk:0.01");
  Guarded payload(payload_bytes(spec, DType::f32, x.size()));
  std::vector<std::byte> workspace(workspace_bytes(spec, DType::f32, x.size()));
  uint32_t threshold = 0;
  EncodeArgs args;
  args.gradient = {x.data(), x.size(), DType::f32};
  args.payload = {payload.data(), payload.size()};
  args.workspace = workspace;
  args.threshold = &threshold;
  ASSERT_TRUE(encode(spec, args, nullptr).ok());
  EXPECT_EQ(std::bit_cast<float>(threshold), 990.0f);
}

TEST(TopkPayload, EveryForgedCountAndIndexIsFound) {
  const size_t n = 65536 + 1000;
  const std::vector<float> x = generate(Gen::gaussian, n, 5);
  const CodecSpec spec = spec_of("topk:0.001");
  const std::vector<std::byte> good = reference::encode(spec, {x.data(), n, DType::f32}, nullptr, false, {}, nullptr);
  const size_t k = 67, values_at = 32 + 16, indices_at = values_at + 272;
  ASSERT_EQ(good.size(), indices_at + 144);
  const auto fault = [&](const auto& change) {
    Guarded payload = Guarded::copy_of(good), out(n * 4);
    change(payload.data());
    DecodeArgs args;
    args.payload = {payload.data(), payload.size()};
    args.out = {out.data(), n, DType::f32};
    const Status status = decode(spec, args);
    EXPECT_TRUE(out.untouched());
    return status;
  };
  const Status bad(StatusCode::bad_payload, static_cast<int64_t>(PayloadFault::index));
  uint32_t counts[2];
  std::memcpy(counts, good.data() + 32, 8);
  ASSERT_EQ(counts[0] + counts[1], k);
  const auto with_counts = [&](uint32_t a, uint32_t b) {
    return fault([=](std::byte* p) {
      const uint32_t forged[] = {a, b};
      std::memcpy(p + 32, forged, 8);
    });
  };
  EXPECT_EQ(with_counts(counts[0] + 1, counts[1]), bad) << "too many";
  EXPECT_EQ(with_counts(counts[0], counts[1] - 1), bad) << "too few";
  EXPECT_EQ(with_counts(0xffffffffu, counts[1] + counts[0] + 1), bad) << "a sum that wraps around";
  EXPECT_EQ(with_counts(0, 0), bad);
  EXPECT_EQ(with_counts(0, static_cast<uint32_t>(k)), bad) << "indices that fall where the chunks met";
  const auto with_index = [&](size_t entry, uint16_t index) {
    return fault([=](std::byte* p) { std::memcpy(p + indices_at + 2 * entry, &index, 2); });
  };
  EXPECT_EQ(with_index(k - 1, 1000), bad) << "beyond the last, shorter chunk";
  uint16_t second;
  std::memcpy(&second, good.data() + indices_at + 2, 2);
  EXPECT_EQ(with_index(0, second), bad) << "twice";
  EXPECT_EQ(with_index(0, 65535), bad) << "descending";
}

TEST(Topk, DoesNotTravelByTwoShot) {
  const std::vector<float> g(300, 1.0f);
  const CodecSpec spec = spec_of("topk:0.01");
  std::vector<std::byte> workspace(workspace_bytes(spec, DType::f32, 300));
  Guarded payload(payload_bytes(spec, DType::f32, 300));
  const ConstBytes payloads[] = {{}};
  ReduceArgs args;
  args.payloads = payloads;
  args.gradient = {g.data(), 300, DType::f32};
  args.payload = {payload.data(), payload.size()};
  args.workspace = workspace;
  EXPECT_EQ(reduce_encode(spec, args), StatusCode::unsupported);
  EXPECT_TRUE(payload.untouched());
}

}  // namespace
}  // namespace gradgate::test
