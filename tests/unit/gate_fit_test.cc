// Fits of a line to few points, the probe, and the running estimates.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "gate/estimator.h"
#include "gate/fit.h"

namespace gradgate::gate {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<FitPoint> line_points(double a, double b) {
  std::vector<FitPoint> points;
  for (const double m : {4096.0, 65536.0, 524288.0, 2097152.0}) points.push_back({m, a + b * m});
  return points;
}

TEST(GateFit, RecoversAnExactLine) {
  Fit fit;
  ASSERT_TRUE(fit_line(line_points(3e-5, 2e-9), &fit).ok());
  EXPECT_NEAR(fit.line.fixed_s, 3e-5, 1e-14);
  EXPECT_NEAR(fit.line.per_byte_s, 2e-9, 1e-18);
  EXPECT_LT(fit.max_error, 1e-9);
  EXPECT_EQ(fit.dropped, -1);
}

TEST(GateFit, OneOutlierIsDroppedWhereverItIs) {
  for (int bad = 0; bad < 4; ++bad) {
    for (const double factor : {3.0, 20.0}) {
      auto points = line_points(3e-5, 2e-9);
      points[bad].seconds *= factor;
      Fit fit;
      ASSERT_TRUE(fit_line(points, &fit).ok());
      EXPECT_EQ(fit.dropped, bad);
      EXPECT_NEAR(fit.line.fixed_s, 3e-5, 1e-10);
      EXPECT_NEAR(fit.line.per_byte_s, 2e-9, 1e-14);
    }
  }
}

TEST(GateFit, NeverNegative) {
  Fit fit;
  // A free fit would have a negative constant, respectively a negative slope.
  ASSERT_TRUE(fit_line(std::vector<FitPoint>{{1e5, 1e-5}, {2e5, 3e-5}, {4e5, 7e-5}}, &fit).ok());
  EXPECT_EQ(fit.line.fixed_s, 0);
  EXPECT_GT(fit.line.per_byte_s, 0);
  ASSERT_TRUE(fit_line(std::vector<FitPoint>{{1e3, 3e-5}, {1e5, 2.5e-5}, {2e5, 2e-5}}, &fit).ok());
  EXPECT_EQ(fit.line.per_byte_s, 0);
  EXPECT_NEAR(fit.line.fixed_s, 2.5e-5, 5e-6);
}

// A calibration table with a dip (1 MB slower than 2 MB) must not become a model in which more bytes cost less.
TEST(GateFit, DipStaysMonotone) {
  Fit fit;
  ASSERT_TRUE(fit_line(std::vector<FitPoint>{{1e6, 448.62e-6}, {2e6, 444.79e-6}}, &fit).ok());
  EXPECT_GE(fit.line.per_byte_s, 0);
  EXPECT_GE(fit.line(2e6), fit.line(1e6));
}

TEST(GateFit, RefusesWhatSaysNothing) {
  Fit fit;
  fit.dropped = 77;
  const std::vector<std::vector<FitPoint>> bad = {
      {},
      {{1e6, 1e-3}},
      {{1e6, 1e-3}, {1e6, 2e-3}, {1e6, 3e-3}},
      {{1e6, 1e-3}, {2e6, 0}},
      {{1e6, 1e-3}, {2e6, -1e-3}},
      {{1e6, 1e-3}, {2e6, kNaN}},
      {{1e6, 1e-3}, {kInf, 1e-3}},
  };
  for (const auto& points : bad) EXPECT_EQ(fit_line(points, &fit).code(), StatusCode::invalid_argument);
  // Three orders of magnitude of scatter are no line.
  EXPECT_EQ(fit_line(std::vector<FitPoint>{{1e3, 1}, {1e4, 1e-3}, {1e5, 1}, {1e6, 1e-3}, {1e7, 1}}, &fit).code(),
            StatusCode::bad_state);
  EXPECT_EQ(fit.dropped, 77) << "a refused fit writes nothing";
}

TEST(GateFit, ProbeTakesTheLeastOfTheRanksAndTheMedian) {
  const uint32_t ranks = 3;
  const LinkModel truth = link_model({50e-6, 1.25e8}, ranks);
  const LinearCost lines[] = {truth.all_reduce, truth.all_gather, truth.all_to_all};
  std::vector<double> samples;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    for (size_t point = 0; point < kProbePoints; ++point) {
      for (uint32_t i = 0; i < kProbeRepetitions; ++i) {
        double t = lines[static_cast<int>(kProbe[point].collective)](kProbe[point].bytes);
        if ((i + rank) % ranks != 0) t *= 4;  // two ranks of three came early and waited
        if (i == 1) t *= 50;                  // one repetition was disturbed everywhere
        samples.push_back(t);
      }
    }
  }
  samples[2] = kNaN;  // and one failed
  LinkModel model;
  ASSERT_TRUE(fit_probe(samples, ranks, &model).ok());
  EXPECT_NEAR(model.all_reduce.fixed_s, truth.all_reduce.fixed_s, 1e-9 * truth.all_reduce.fixed_s);
  EXPECT_NEAR(model.all_gather.per_byte_s, truth.all_gather.per_byte_s, 1e-9 * truth.all_gather.per_byte_s);
  EXPECT_TRUE(model.usable());
  EXPECT_EQ(fit_probe(std::span(samples).first(samples.size() - 1), ranks, &model).code(),
            StatusCode::invalid_argument);
  std::fill(samples.begin(), samples.end(), 0.0);
  EXPECT_FALSE(fit_probe(samples, ranks, &model).ok()) << "zero durations are no measurement";
}

TEST(GateFit, ProbeCoversThreeCollectivesAtFourSizes) {
  int counts[kProbeCollectives] = {};
  for (const ProbePoint& p : kProbe) {
    ++counts[static_cast<int>(p.collective)];
    EXPECT_EQ(p.repetitions, kProbeRepetitions);
    EXPECT_GE(p.warmups, 1);
  }
  for (const int n : counts) EXPECT_EQ(n, 4);
}

// The published series: the first collective pays for initialisation. The mean would be 21452.4 us.
TEST(GateEstimator, FirstCallsDoNotCount) {
  for (const uint32_t discard : {1u, 2u}) {
    RunningMedian series(8, discard);
    for (const double us : {214477, 14, 5, 3, 4, 5, 4, 4, 4, 4}) EXPECT_TRUE(series.add(us * 1e-6));
    EXPECT_GE(series.median(), 3e-6);
    EXPECT_LE(series.median(), 5e-6);
    EXPECT_EQ(series.discarded(), discard);
    EXPECT_LT(series.median(), 20e-6) << "a gain of 20 us pays for it";
  }
}

TEST(GateEstimator, UnusableSamplesAreCountedAndLeftOut) {
  RunningMedian series(8, 0);
  EXPECT_TRUE(std::isnan(series.median()));
  for (const double bad : {-0.7115e-3, 0.0, kNaN, kInf, -kInf}) EXPECT_FALSE(series.add(bad));
  EXPECT_FALSE(series.add(1e-6, false)) << "a fast failure is not a fast run";
  EXPECT_EQ(series.rejected(), 6u);
  EXPECT_EQ(series.size(), 0u);
  series.add(2e-3), series.add(1e-3), series.add(9e-3);
  EXPECT_EQ(series.median(), 2e-3);
  EXPECT_EQ(series.rejected(), 6u);
}

TEST(GateEstimator, WindowForgetsAndEvenCountsTakeTheMiddle) {
  RunningMedian series(4, 0);
  for (const double v : {100.0, 100.0, 1.0, 2.0, 3.0, 4.0}) series.add(v);
  EXPECT_EQ(series.median(), 2.5);
  series.restart();
  EXPECT_TRUE(std::isnan(series.median()));
}

TEST(GateEstimator, AlignedWindowKeepsOrderAndHoles) {
  AlignedWindow window;
  double out[3];
  window.push(1, 3), window.push(kNaN, 3);
  window.copy(out);
  EXPECT_EQ(out[0], 1);
  EXPECT_TRUE(std::isnan(out[1]) && std::isnan(out[2]));
  window.push(3, 3), window.push(4, 3);
  window.copy(out);
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_EQ(out[1], 3);
  EXPECT_EQ(out[2], 4);
}

}  // namespace
}  // namespace gradgate::gate
