// Cost formulas against exact values, by hand and from the independent oracle's table
// (tests/golden/cost_model_golden.json).
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "gate/cost.h"
#include "gate/interconnects.h"

namespace gradgate::gate {
namespace {

void expect_relative(double got, double want, double scale, const char* what) {
  EXPECT_LE(std::fabs(got - want), 1e-12 * scale) << what << ": " << got << " instead of " << want;
}

TEST(GateCost, MatchesTheOracle) {
  std::ifstream file(GRADGATE_SOURCE_DIR "/tests/golden/cost_model_golden.json");
  ASSERT_TRUE(file.good());
  const auto cases = nlohmann::json::parse(file).at("random_cases");
  ASSERT_EQ(cases.size(), 40u);
  for (const auto& c : cases) {
    const double a = c.at("alpha"), b = c.at("beta"), m = c.at("M"), r = c.at("r");
    const uint32_t n = c.at("N");
    const auto want = [&](const char* key) { return c.at(key).get<double>(); };
    const auto check = [&](double got, const char* key) { expect_relative(got, want(key), std::fabs(want(key)), key); };
    check(p2p(a, b, m), "p2p");
    check(ring_allreduce(a, b, n, m), "ring_allreduce");
    check(ring_pass(a, b, n, m), "allgather");
    check(ring_pass(a, b, n, m), "reduce_scatter");
    check(ring_pass(a, b, n, m), "alltoall");
    check(gather_exchange(a, b, n, m / r), "gather_exchange");
    check(two_shot_exchange(a, b, n, m / r), "two_shot_exchange");
    // The budget is a difference: its rounding is relative to the larger term.
    const double dense = want("ring_allreduce"), gather = want("gather_exchange");
    expect_relative(codec_budget(dense, ring_allreduce(a, b, n, m / r)), want("codec_budget_ring"), dense,
                    "budget ring");
    expect_relative(codec_budget(dense, gather), want("codec_budget_gather"), std::fmax(dense, gather),
                    "budget gather");
    expect_relative(codec_budget(dense, two_shot_exchange(a, b, n, m / r)), want("codec_budget_two_shot"), dense,
                    "budget two-shot");

    const LinkModel link = link_model({a, b}, n);
    expect_relative(exchange_cost(Exchange::all_reduce, link, m), dense, dense, "exchange all_reduce");
    expect_relative(exchange_cost(Exchange::two_shot, link, m / r), want("two_shot_exchange"),
                    want("two_shot_exchange"), "two_shot");
    expect_relative(exchange_cost(Exchange::all_gather, link, m / r), gather, gather, "exchange all_gather");
  }
}

// Published step counts: 2·3·5 us + 1.5·100 us, and an all-gather of 1 MB per rank.
TEST(GateCost, KnownSmallCases) {
  EXPECT_NEAR(ring_allreduce(5e-6, 1e10, 4, 1e6), 180e-6, 1e-15);
  EXPECT_NEAR(ring_pass(5e-6, 1e10, 4, 4e6), 315e-6, 1e-15);
  EXPECT_NEAR(gather_exchange(5e-6, 1e10, 4, 1e6), 315e-6, 1e-15);
}

// 1 GB, 256 ranks, 50 GB/s, 5 us, 64x: the ring formula promises 3.2 ms, the all-gather that top-k needs takes 81.0 ms.
TEST(GateCost, TextbookExampleDependsOnTheCollective) {
  const LinkModel link = link_model(find_interconnect("ib-ndr")->link, 256);
  EXPECT_NEAR(exchange_cost(Exchange::all_reduce, link, 1e9), 0.04239375, 1e-12);
  EXPECT_NEAR(exchange_cost(Exchange::two_shot, link, 1e9 / 64), 0.00317255859375, 1e-12);
  EXPECT_NEAR(exchange_cost(Exchange::all_gather, link, 1e9 / 64), 0.0809625, 1e-12);
}

TEST(GateCost, OneRankCostsNothing) {
  EXPECT_EQ(ring_allreduce(5e-6, 1e9, 1, 1e9), 0);
  EXPECT_EQ(ring_pass(5e-6, 1e9, 1, 1e9), 0);
  EXPECT_EQ(gather_exchange(5e-6, 1e9, 1, 1e9), 0);
  EXPECT_EQ(two_shot_exchange(5e-6, 1e9, 1, 1e9), 0);
  for (const Exchange e : {Exchange::all_reduce, Exchange::two_shot, Exchange::all_gather}) {
    EXPECT_EQ(exchange_cost(e, link_model({5e-6, 1e9}, 1), 1e9), 0);
  }
}

TEST(GateCost, MonotoneFiniteAndNotNegative) {
  const Link link = find_interconnect("tcp-10")->link;
  for (const Exchange e : {Exchange::all_reduce, Exchange::two_shot, Exchange::all_gather}) {
    const uint32_t ranks[] = {1, 2, 3, 4, 8, 64};
    for (size_t i = 0; i < std::size(ranks); ++i) {
      double previous = 0;
      for (double m = 1; m <= 16.0 * (1 << 30); m *= 1.1) {
        const double t = exchange_cost(e, link_model(link, ranks[i]), m);
        ASSERT_TRUE(std::isfinite(t) && t >= 0);
        ASSERT_GE(t, previous) << "M " << m << " N " << ranks[i];
        if (i > 0) {
          ASSERT_GE(t, exchange_cost(e, link_model(link, ranks[i - 1]), m)) << "M " << m << " N " << ranks[i];
        }
        previous = t;
      }
    }
  }
}

TEST(GateCost, UnusableModelsPriceNothing) {
  EXPECT_TRUE(std::isnan(exchange_cost(Exchange::all_reduce, LinkModel{}, 1e6)));
  EXPECT_TRUE(std::isnan(exchange_cost(Exchange::hierarchical, link_model({1e-6, 1e9}, 4), 1e6)));
  LinkModel negative = link_model({1e-6, 1e9}, 4);
  negative.all_gather.per_byte_s = -1e-9;
  EXPECT_TRUE(std::isnan(exchange_cost(Exchange::all_reduce, negative, 1e6)));
}

TEST(GateCost, InterconnectsAreNamedOnceAndFound) {
  for (size_t i = 0; i < kInterconnectCount; ++i) {
    const Interconnect& entry = kInterconnects[i];
    EXPECT_EQ(find_interconnect(entry.name), &entry) << entry.name;
    EXPECT_GT(entry.link.alpha_s, 0);
    EXPECT_GT(entry.link.beta_Bps, 1e9);
    EXPECT_NE(entry.source[0], '\0');
  }
  EXPECT_EQ(find_interconnect("ib-ndr")->link.beta_Bps, 50e9);
  EXPECT_EQ(find_interconnect("nvlink4")->link.alpha_s, 500e-9);
  EXPECT_EQ(find_interconnect("ib"), nullptr);
  EXPECT_EQ(find_interconnect(""), nullptr);
}

}  // namespace
}  // namespace gradgate::gate
