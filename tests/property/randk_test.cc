// randk: every element has the same chance, steps, buckets and shards draw apart, nothing that is not finite hides.
// Seeds are fixed, so that a test passes always or never; bounds are six standard deviations.
#include "codecs/randk.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "tests/support/codec_calls.h"
#include "tests/support/gen.h"

namespace gradgate::test {
namespace {

constexpr double kDeviations = 6;

// Which of n elements a payload of ones has an entry for.
std::vector<bool> drawn(const char* text, size_t n, const Seed& seed) {
  const std::vector<float> ones(n, 1.0f);
  const std::vector<float> d = decode(text, encode(text, ones, nullptr, nullptr, false, seed), n);
  std::vector<bool> chosen(n);
  for (size_t i = 0; i < n; ++i) chosen[i] = d[i] != 0.0f;
  return chosen;
}
size_t count(const std::vector<bool>& chosen) {
  return static_cast<size_t>(std::count(chosen.begin(), chosen.end(), true));
}

struct Share {
  const char* text;
  size_t n, entries;
};
class EveryShare : public ::testing::TestWithParam<Share> {};
INSTANTIATE_TEST_SUITE_P(Randk, EveryShare,
                         ::testing::Values(Share{"randk:0.01", 1000, 10}, Share{"randk:0.001", 1500, 2},
                                           Share{"randk:0.1", 777, 78}, Share{"randk:0.4", 1000, 400},
                                           Share{"randk:0.7", 500, 350}, Share{"randk:0.999", 300, 300},
                                           Share{"randk:0.99", 300, 297}, Share{"randk:0.5", 1, 1}),
                         [](const auto& p) { return test_name(p.param.text) + "_" + std::to_string(p.param.n); });

TEST_P(EveryShare, IsExactAndEveryElementHasTheSameChance) {
  const auto [text, n, entries] = GetParam();
  constexpr uint32_t kSteps = 4000;
  std::vector<uint32_t> times(n);
  for (uint32_t step = 0; step < kSteps; ++step) {
    const std::vector<bool> chosen = drawn(text, n, {11, 2, step, 0xffffffffu});
    ASSERT_EQ(count(chosen), entries);
    for (size_t i = 0; i < n; ++i) times[i] += chosen[i];
  }
  const double p = static_cast<double>(entries) / static_cast<double>(n), mean = kSteps * p;
  const double deviation = std::sqrt(mean * (1 - p));
  double squares = 0;
  for (size_t i = 0; i < n; ++i) {
    ASSERT_LE(std::fabs(times[i] - mean), kDeviations * deviation) << "element " << i;
    squares += (times[i] - mean) * (times[i] - mean);
  }
  if (entries == n) return;
  // Steps are independent: the counts vary as those of coins do, no less and no more.
  const double spread = squares / (static_cast<double>(n) * deviation * deviation);
  EXPECT_GT(spread, 0.75);
  EXPECT_LT(spread, 1.25);
}

// Two samples share about n·p² elements; the same one would share all.
TEST(Sample, DiffersByStepTensorKeyStreamAndPlace) {
  constexpr size_t kElements = 20000;
  constexpr double kShare = 0.1;
  const Seed base{11, 2, 5, 0xffffffffu, 0};
  const std::vector<bool> first = drawn("randk:0.1", kElements, base);
  EXPECT_EQ(drawn("randk:0.1", kElements, base), first);
  std::vector<Seed> others(6, base);
  others[0].step = 6;
  others[1].tensor = 3;
  others[2].key = 12;
  others[3].key += uint64_t{1} << 40;
  others[4].stream = 0;
  others[5].first = 256;
  for (size_t k = 0; k < others.size(); ++k) {
    const std::vector<bool> other = drawn("randk:0.1", kElements, others[k]);
    size_t both = 0;
    for (size_t i = 0; i < kElements; ++i) both += first[i] && other[i];
    const double mean = kElements * kShare * kShare;
    EXPECT_LE(std::fabs(static_cast<double>(both) - mean), kDeviations * std::sqrt(mean)) << k;
  }
}

// No places that repeat with a period: neighbours in the sample lie at all distances.
TEST(Sample, HasNoPeriod) {
  const std::vector<bool> chosen = drawn("randk:0.01", 100000, {11, 2, 5, 0xffffffffu});
  std::set<size_t> distances;
  size_t last = SIZE_MAX;
  for (size_t i = 0; i < chosen.size(); ++i) {
    if (!chosen[i]) continue;
    if (last != SIZE_MAX) distances.insert(i - last);
    last = i;
  }
  EXPECT_GT(distances.size(), 150u);
  EXPECT_LT(*distances.rbegin(), 200u) << "strata of 100 elements";
}

// The walk of the loops adds up what start() divides; here start() itself, at sizes that no payload in a test has.
TEST(Sample, StrataFitTogetherUpToTheGreatestCount) {
  Random random(3);
  for (const uint64_t n : {uint64_t{1}, uint64_t{2}, uint64_t{1000003}, uint64_t{1} << 31}) {
    for (const uint64_t entries : {uint64_t{1}, n / 100 + 1, n / 3 + 1, n - n / 7, n}) {
      if (entries > n) continue;
      const codecs::Sample sample({{random.below(1u << 31), 7, random.below(~0u), 9}}, n, entries);
      EXPECT_EQ(sample.start(entries), n + sample.start(0));
      for (int draw = 0; draw < 200; ++draw) {
        const uint64_t j = draw == 0 ? 0 : draw == 1 ? entries - 1 : random.next() % entries;
        const uint64_t length = sample.start(j + 1) - sample.start(j), i = sample.index(j);
        ASSERT_GE(length, n / entries);
        ASSERT_LE(length, n / entries + (n % entries != 0));
        ASSERT_LT(i, n);
        ASSERT_EQ(sample.stratum(i), j);
        ASSERT_EQ(sample.stratum(sample.element(sample.start(j))), j);
        ASSERT_EQ(sample.stratum(sample.element(sample.start(j + 1) - 1)), j);
      }
    }
  }
  EXPECT_GT(payload_bytes(spec_of("randk:0.01"), DType::f32, size_t{1} << 31), 0u);
  EXPECT_EQ(payload_bytes(spec_of("randk:0.01"), DType::f32, (size_t{1} << 31) + 1), 0u);
}

// One bad element anywhere: exactly one entry is not finite, and only its element keeps the residual of before.
TEST(NonFinite, ShowsInItsStratumWhereverItIs) {
  constexpr size_t kElements = 3000, kEntries = 30;
  const Seed seed{11, 2, 5, 0xffffffffu};
  const std::vector<float> plain =
      decode("randk:0.01", encode("randk:0.01", std::vector<float>(kElements, 1.0f), nullptr, nullptr, false, seed),
             kElements);
  for (size_t bad = 0; bad < kElements; bad += 13) {
    for (const float value : {INFINITY, NAN}) {
      std::vector<float> g(kElements, 1.0f), e(kElements, 0.25f);
      g[bad] = value;
      EncodeStats stats;
      const Payload payload = encode("randk:0.01", g, &e, &stats, false, seed);
      EXPECT_EQ(stats.non_finite, 1u);
      EXPECT_EQ(payload.get<uint8_t>(7), 2) << "the flag of the header";
      const std::vector<float> d = decode("randk:0.01", payload, kElements);
      size_t spoiled = 0, kept = 0;
      for (size_t i = 0; i < kElements; ++i) {
        const bool sent = plain[i] != 0.0f;
        if (!sent) {
          ASSERT_EQ(d[i], 0.0f);
        }
        spoiled += !std::isfinite(d[i]);
        kept += e[i] == 0.25f;
        if (!std::isfinite(d[i]) || i == bad) {
          EXPECT_EQ(e[i], 0.25f) << i;
        } else {
          ASSERT_EQ(e[i], sent ? 0.0f : 1.25f) << i;
        }
      }
      EXPECT_EQ(spoiled, 1u) << "of " << kEntries << " entries";
      EXPECT_EQ(kept, plain[bad] != 0.0f ? 1u : 2u);
    }
  }
}

// A sum that overflows is not mistaken for one when e has taken x: the step after it is finite again.
TEST(NonFinite, LargeResidualsAreNotSpoiledTwice) {
  std::vector<float> g(600, 2e38f), e(600, 1e38f);
  EncodeStats stats;
  encode("randk:0.01", g, &e, &stats, false, {1, 1, 1, 0xffffffffu});
  EXPECT_EQ(stats.non_finite, 0u);
  g.assign(600, 0.0f);
  g[0] = g[256] = g[512] = 1.0f;
  encode("randk:0.01", g, &e, &stats, false, {1, 1, 2, 0xffffffffu});
  EXPECT_EQ(stats.non_finite, 0u);
}

}  // namespace
}  // namespace gradgate::test
