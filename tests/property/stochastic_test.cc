// Stochastic rounding: the mean of many decodings is the gradient, and the roundings of different ranks, steps,
// tensors, keys and places are independent. Seeds are fixed, so that a test passes always or never; the bounds are
// those of the statistics: five or six standard deviations, the variance of a rounding being at most a quarter of a
// squared step.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/support/codec_calls.h"
#include "tests/support/gen.h"

namespace gradgate::test {
namespace {

// Standard deviations allowed, and what 16 bits of randomness leave: 2^-17 of a step, and roundings of an f32.
constexpr double kElement = 6, kTotal = 5, kBias = 0x1p-16;

// Step of the error of an element: that of its block, which for a rotated block 128 roundings share.
std::vector<double> steps_of(const char* text, const Payload& payload, size_t n) {
  const CodecSpec spec = spec_of(text);
  const size_t block = spec.id == CodecId::int4 ? 128 : 256;
  const bool rotated = spec.id == CodecId::int4 && spec.param1 % 2 == 1;
  std::vector<double> steps(n);
  for (size_t i = 0; i < n; ++i)
    steps[i] = std::fabs(payload.get<float>(32 + i / block * 4)) / (rotated ? std::sqrt(128.0) : 1.0);
  return steps;
}

// Errors of one encoding, in steps.
std::vector<double> errors(const char* text, const std::vector<float>& x, const Seed& seed) {
  const Payload payload = encode(text, x, nullptr, nullptr, false, seed);
  const std::vector<float> d = decode(text, payload, x.size());
  std::vector<double> e = steps_of(text, payload, x.size());
  for (size_t i = 0; i < x.size(); ++i) e[i] = (static_cast<double>(d[i]) - x[i]) / e[i];
  return e;
}

class Stochastic : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Codecs, Stochastic, ::testing::Values("int8:sr", "int4:sr", "int4:hadamard:sr"),
                         [](const auto& p) { return test_name(p.param); });

struct Means {
  double worst = 0, total = 0;  // of the means of elements; of all
};
Means mean_errors(const char* text, size_t n, uint32_t steps) {
  const std::vector<float> x = generate(Gen::gaussian, n, 5);
  std::vector<double> sum(n, 0.0);
  for (uint32_t step = 0; step < steps; ++step) {
    const std::vector<double> e = errors(text, x, {11, 2, step, 1});
    for (size_t i = 0; i < n; ++i) sum[i] += e[i];
  }
  Means means;
  for (const double s : sum) {
    means.worst = std::max(means.worst, std::fabs(s) / steps);
    means.total += s / steps / static_cast<double>(n);
  }
  return means;
}

TEST_P(Stochastic, MeanIsTheGradient) {
  constexpr size_t kElements = 4096;
  constexpr uint32_t kSteps = 512;
  const Means means = mean_errors(GetParam(), kElements, kSteps);
  EXPECT_LE(means.worst, kElement * 0.5 / std::sqrt(double{kSteps}) + kBias);
  EXPECT_LE(std::fabs(means.total), kTotal * 0.5 / std::sqrt(double{kSteps} * kElements) + kBias);
}

// The bound above is one that rounding to nearest does not keep.
TEST(Nearest, MeanIsNotTheGradient) {
  EXPECT_GT(mean_errors("int8", 4096, 512).worst, kElement * 0.5 / std::sqrt(512.0) + kBias);
}

// Up as often as what is lost otherwise says, for known fractions: 127 is the greatest, so a step is 1.
TEST(Stochastic, RoundsUpAsOftenAsTheFractionSays) {
  constexpr size_t kElements = 1 << 16;
  for (const float fraction : {0.0f, 0.125f, 0.5f, 0.9f, 0.999f}) {
    for (const float whole : {0.0f, 5.0f, -64.0f, 125.0f}) {
      std::vector<float> x(kElements, whole + fraction);
      for (size_t i = 0; i < kElements; i += 256) x[i] = 127.0f;
      const std::vector<float> d =
          decode("int8:sr", encode("int8:sr", x, nullptr, nullptr, false, {3, 1, 4, 1}), kElements);
      double up = 0, count = 0;
      for (size_t i = 0; i < kElements; ++i) {
        if (i % 256 == 0) {
          ASSERT_EQ(d[i], 127.0f);
          continue;
        }
        ASSERT_TRUE(d[i] == whole || d[i] == whole + 1) << x[i] << " became " << d[i];
        up += d[i] == whole ? 0 : 1, count += 1;
      }
      const double p = static_cast<double>(whole + fraction) - whole;  // as f32 has it
      EXPECT_NEAR(up / count, p, kTotal * std::sqrt(p * (1 - p) / count) + kBias) << whole << " + " << fraction;
      if (fraction == 0.0f) {
        EXPECT_EQ(up, 0) << "integers are not moved";
      }
    }
  }
}

double correlation(const std::vector<double>& a, const std::vector<double>& b, size_t lag = 0) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i + lag < a.size(); ++i) ab += a[i] * b[i + lag], aa += a[i] * a[i], bb += b[i + lag] * b[i + lag];
  return ab / std::sqrt(aa * bb);
}

// Uncorrelated numbers have a correlation of standard deviation 1/sqrt(n).
TEST_P(Stochastic, StreamsAreIndependent) {
  constexpr size_t kElements = 1 << 16;
  const double bound = kTotal / std::sqrt(double{kElements});
  // An element's own fraction is in its error whatever the seed: gradients with all fractions alike would hide nothing,
  // these differ, and the products have mean 0.
  const std::vector<float> x = generate(Gen::gaussian, kElements, 6);
  const Seed seed{1, 2, 3, 4};
  const std::vector<double> e = errors(GetParam(), x, seed);
  EXPECT_EQ(correlation(e, errors(GetParam(), x, seed)), 1.0);
  for (const Seed& other :
       {Seed{1, 2, 3, 5}, Seed{1, 2, 4, 4}, Seed{1, 3, 3, 4}, Seed{2, 2, 3, 4}, Seed{1 + (uint64_t{1} << 32), 2, 3, 4},
        Seed{1, 2, 3, 4, kElements}, Seed{1, 2, 3, 4, 256}}) {
    if (spec_of(GetParam()).param1 % 2 == 1 && spec_of(GetParam()).id == CodecId::int4 && other.step != seed.step)
      continue;  // another rotation altogether
    EXPECT_LE(std::fabs(correlation(e, errors(GetParam(), x, other))), bound)
        << other.key << " " << other.tensor << " " << other.step << " " << other.stream << " " << other.first;
  }
  for (const size_t lag : {1, 2, 31, 32, 33, 64, 128, 255, 256, 257, 4096})
    EXPECT_LE(std::fabs(correlation(e, e, lag)), bound) << "lag " << lag;
}

// The average over ranks that round the same gradient loses its error as the number of ranks says.
TEST_P(Stochastic, RanksAverageOut) {
  constexpr size_t kElements = 1 << 14;
  constexpr uint32_t kRanks = 16;
  const std::vector<float> x = generate(Gen::gaussian, kElements, 7);
  std::vector<double> mean(kElements, 0.0);
  double one = 0, all = 0;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    const std::vector<double> e = errors(GetParam(), x, {9, 0, 1, rank});
    for (size_t i = 0; i < kElements; ++i) mean[i] += e[i] / kRanks, one += e[i] * e[i] / kRanks;
  }
  for (const double m : mean) all += m * m;
  EXPECT_NEAR(all / one * kRanks, 1.0, 0.1);
}

}  // namespace
}  // namespace gradgate::test
