// Fits of a calibration's sweep: lines, protocol switches, outliers, dips, and sweeps that say nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gate/fit.h"

namespace gradgate::gate {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

/// Sizes 4 KiB … 16 MiB by powers of two.
template <class Time>
std::vector<FitPoint> sweep(Time time) {
  std::vector<FitPoint> points;
  for (double m = 4096; m <= 16777216; m *= 2) points.push_back({m, time(m)});
  return points;
}

TEST(GateCurve, RecoversALineAndItsLink) {
  for (const ProbeCollective collective :
       {ProbeCollective::all_reduce, ProbeCollective::all_gather, ProbeCollective::all_to_all}) {
    const LinearCost truth = ring_line(collective, {50e-6, 1.25e8}, 4);
    Curve curve;
    ASSERT_TRUE(fit_curve(sweep(truth), &curve).ok());
    EXPECT_EQ(curve.count, 1);
    EXPECT_EQ(curve.outliers, 0u);
    EXPECT_LT(curve.max_error, 1e-9);
    EXPECT_NEAR(curve.confidence, 1, 1e-9);
    const Link link = ring_link(collective, curve.overall, 4);
    EXPECT_NEAR(link.alpha_s, 50e-6, 1e-12);
    EXPECT_NEAR(link.beta_Bps, 1.25e8, 1.25e8 * 1e-9);
  }
  // The formulas: all_reduce is 2(N−1)α + 2(N−1)/N·M/β, a pass half of it.
  const LinearCost line = ring_line(ProbeCollective::all_reduce, {5e-6, 1e10}, 4);
  EXPECT_NEAR(line(1e6), 180e-6, 1e-15);
  EXPECT_NEAR(ring_line(ProbeCollective::all_gather, {5e-6, 1e10}, 4)(4e6), 315e-6, 1e-15);
}

// 5 % of noise and outliers of both signs: α and β within 10 %, and so are sizes that took no part in the fit.
TEST(GateCurve, NoiseAndOutliersStayWithinTenPercent) {
  const Link truth{20e-6, 1.25e9};
  const LinearCost line = ring_line(ProbeCollective::all_reduce, truth, 8);
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> noise(-0.05, 0.05);
    const auto all = sweep([&](double m) { return line(m) * (1 + noise(random)); });
    std::vector<FitPoint> points, left_out;
    for (size_t i = 0; i < all.size(); ++i) (i % 4 == 2 ? left_out : points).push_back(all[i]);
    const size_t slow = random() % points.size(), fast = random() % points.size();
    points[slow].seconds *= 6;
    if (fast != slow) points[fast].seconds /= 4;
    Curve curve;
    ASSERT_TRUE(fit_curve(points, &curve).ok()) << seed;
    EXPECT_EQ(curve.count, 1) << seed;
    EXPECT_EQ(curve.outliers, (uint64_t{1} << slow) | (uint64_t{1} << fast)) << seed;
    const Link link = ring_link(ProbeCollective::all_reduce, curve.overall, 8);
    EXPECT_NEAR(link.alpha_s / truth.alpha_s, 1, 0.1) << seed;
    EXPECT_NEAR(link.beta_Bps / truth.beta_Bps, 1, 0.1) << seed;
    for (const FitPoint& p : left_out) EXPECT_NEAR(curve(p.bytes) / line(p.bytes), 1, 0.1) << seed;
  }
}

// Eager below 64 KiB, rendezvous above: another start-up time and another bandwidth.
TEST(GateCurve, FindsWhereTheProtocolSwitches) {
  const auto time = [](double m) { return m < 65536 ? 10e-6 + m / 2e8 : 400e-6 + m / 2e9; };
  Curve curve;
  ASSERT_TRUE(fit_curve(sweep(time), &curve).ok());
  ASSERT_EQ(curve.count, 2);
  EXPECT_GT(curve.pieces[0].up_to_bytes, 32768);
  EXPECT_LT(curve.pieces[0].up_to_bytes, 65536);
  EXPECT_TRUE(std::isinf(curve.pieces[1].up_to_bytes));
  EXPECT_NEAR(curve.pieces[0].line.fixed_s, 10e-6, 1e-9);
  EXPECT_NEAR(curve.pieces[1].line.per_byte_s, 1 / 2e9, 1e-15);
  EXPECT_LT(curve.max_error, 1e-6);
  const auto three = [](double m) { return m < 30000 ? 1e-5 + m / 1e8 : m < 1e6 ? 1e-3 + m / 1e9 : 5e-3 + m / 1e10; };
  ASSERT_TRUE(fit_curve(sweep(three), &curve).ok());
  EXPECT_EQ(curve.count, 3);
  EXPECT_LT(curve.max_error, 1e-6);
}

// Whatever the points, more bytes never cost less, and no prediction is negative or not finite.
TEST(GateCurve, NeverFalls) {
  const auto dip = [](double m) { return m < 1e6 ? 1e-5 + m / 1e9 : 4e-4 + m / 1e10; };  // cheaper above 1 MB
  std::vector<std::vector<FitPoint>> sweeps = {
      sweep(dip),
      {{1e6, 448.62e-6}, {2e6, 444.79e-6}, {4e6, 700e-6}, {8e6, 1300e-6}},
      sweep([](double m) { return std::fmax(1e-6, m / 1e9 - 1e-5); }),  // a free fit would begin below zero
  };
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    std::lognormal_distribution<double> noise(0, 0.1);
    sweeps.push_back(sweep([&](double m) { return (2e-5 + m / 1e9) * noise(random); }));
  }
  size_t fitted = 0;
  for (const auto& points : sweeps) {
    Curve curve;
    if (!fit_curve(points, &curve).ok()) continue;
    ++fitted;
    double before = 0;
    for (double m = 1; m < 17.2e9; m *= 1.1) {
      const double t = curve(m);
      ASSERT_TRUE(std::isfinite(t) && t >= before) << m;
      before = t;
    }
    for (int i = 0; i < curve.count; ++i) {
      EXPECT_GE(curve.pieces[i].line.fixed_s, 0);
      EXPECT_GE(curve.pieces[i].line.per_byte_s, 0);
    }
  }
  EXPECT_GT(fitted, sweeps.size() / 2);
}

TEST(GateCurve, RefusesWhatSaysNothing) {
  Curve curve;
  curve.count = 77;
  const auto code = [&](const std::vector<FitPoint>& points) { return fit_curve(points, &curve).code(); };
  const std::vector<std::vector<FitPoint>> bad = {
      {},
      {{1e6, 1e-3}},                            // one point
      {{1e6, 1e-3}, {1e6, 2e-3}, {1e6, 3e-3}},  // equal sizes
      {{2e6, 1e-3}, {1e6, 2e-3}},
      {{1e6, 1e-3}, {2e6, 0}},
      {{1e6, 1e-3}, {2e6, -1e-3}},
      {{1e6, 1e-3}, {2e6, kNaN}},
      {{1e6, kInf}, {2e6, 1e-3}},
      {{-1, 1e-3}, {2e6, 1e-3}},
      std::vector<FitPoint>(kMostCurvePoints + 1),
  };
  for (const auto& points : bad) EXPECT_EQ(code(points), StatusCode::invalid_argument);
  EXPECT_EQ(code(sweep([](double) { return 1e-3; })), StatusCode::bad_state) << "flat: no bandwidth to be learned";
  std::mt19937 random(5);
  std::uniform_real_distribution<double> decades(-3, 1);
  EXPECT_EQ(code(sweep([&](double) { return std::pow(10, decades(random)); })), StatusCode::bad_state);
  EXPECT_EQ(code(sweep([](double m) { return std::fmod(std::log2(m), 2) < 1 ? 1e-3 : 1e-1; })), StatusCode::bad_state);
  EXPECT_EQ(curve.count, 77) << "a refused fit writes nothing";
}

}  // namespace
}  // namespace gradgate::gate
