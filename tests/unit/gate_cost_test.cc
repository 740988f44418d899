// What the gate prices exchanges with, against values by hand. The formulas themselves: gate_models_test.cc.
#include <gtest/gtest.h>

#include <cmath>

#include "gate/cost.h"
#include "gate/interconnects.h"

namespace gradgate::gate {
namespace {

// Published step counts: 2·3·5 us + 1.5·100 us, and an all-gather of 1 MB per rank.
TEST(GateCost, KnownSmallCases) {
  EXPECT_NEAR(ring_allreduce(5e-6, 1e10, 4, 1e6), 180e-6, 1e-15);
  EXPECT_NEAR(ring_pass(5e-6, 1e10, 4, 4e6), 315e-6, 1e-15);
  EXPECT_NEAR(gather_exchange(5e-6, 1e10, 4, 1e6), 315e-6, 1e-15);
}

// 1 GB, 256 ranks, 50 GB/s, 5 us, 64x: the ring formula promises 3.2 ms, the all-gather that top-k needs takes 81.0 ms.
TEST(GateCost, TextbookExampleDependsOnTheCollective) {
  const LinkModel link = link_model(find_interconnect("ib-ndr")->nominal, 256);
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
  const Link link = find_interconnect("tcp-10")->nominal;
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

// Two nodes of four: 0.75·1 MB/100 GB/s and 3 us inside, twice; between the nodes a shard of a quarter.
TEST(GateCost, HierarchicalIsPricedOnBothLinks) {
  const Link inside{1e-6, 100e9}, between{10e-6, 10e9};
  const LinkModel link = two_level_model(inside, between, 8, 4);
  const double in_node = 2 * (3e-6 + 0.75 * 1e6 / 100e9);
  const auto cost = [&](double payload, Exchange exchange) {
    return exchange_cost(Exchange::hierarchical, link, payload, 1e6, exchange);
  };
  EXPECT_NEAR(cost(1e6, Exchange::all_reduce), in_node + 2 * (10e-6 + 0.5 * 250e3 / 10e9), 1e-18);
  EXPECT_NEAR(cost(1e6, Exchange::all_reduce), hierarchical_sharded(inside, between, 4, 2, 1e6), 1e-18);
  EXPECT_NEAR(cost(250e3, Exchange::two_shot), in_node + 2 * (10e-6 + 0.5 * 62.5e3 / 10e9), 1e-18);
  EXPECT_NEAR(cost(250e3, Exchange::all_gather), in_node + 10e-6 + 62.5e3 / 10e9, 1e-18);
  EXPECT_EQ(exchange_cost(Exchange::two_shot, link, 1e6),
            exchange_cost(Exchange::two_shot, link_model(between, 8), 1e6))
      << "flat exchanges cross the link between nodes";
  const LinkModel one_node = two_level_model(inside, between, 4, 4);
  EXPECT_NEAR(exchange_cost(Exchange::hierarchical, one_node, 250e3, 1e6), in_node, 1e-18);
  EXPECT_EQ(exchange_cost(Exchange::all_reduce, one_node, 1e6), ring_allreduce(1e-6, 100e9, 4, 1e6));
  EXPECT_EQ(exchange_cost(Exchange::hierarchical, two_level_model(inside, between, 1, 1), 1e6, 1e6), 0);
  EXPECT_TRUE(std::isnan(exchange_cost(Exchange::hierarchical, link, 250e3))) << "dense bytes are missing";
  EXPECT_TRUE(std::isnan(cost(250e3, Exchange::hierarchical)));
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
    EXPECT_GT(entry.nominal.alpha_s, 0);
    EXPECT_GT(entry.effective.alpha_s, 0);
    EXPECT_GT(entry.effective.beta_Bps, 1e9);
    EXPECT_LE(entry.effective.beta_Bps, entry.nominal.beta_Bps) << entry.name;
    EXPECT_TRUE(entry.role == kInsideNode || entry.role == kBetweenNodes);
    EXPECT_NE(entry.source[0], '\0');
    EXPECT_NE(entry.effective_source[0], '\0');
  }
  const struct {
    const char* name;
    Link nominal;
  } stated[] = {{"nvlink4", {500e-9, 450e9}}, {"pcie5", {1e-6, 64e9}},       {"ib-ndr", {5e-6, 50e9}},
                {"ib-hdr", {7e-6, 25e9}},     {"roce-100", {10e-6, 12.5e9}}, {"tcp-100", {50e-6, 12.5e9}}};
  for (const auto& [name, nominal] : stated) {
    ASSERT_NE(find_interconnect(name), nullptr) << name;
    EXPECT_EQ(find_interconnect(name)->nominal.alpha_s, nominal.alpha_s) << name;
    EXPECT_EQ(find_interconnect(name)->nominal.beta_Bps, nominal.beta_Bps) << name;
  }
  EXPECT_EQ(find_interconnect("ib"), nullptr);
  EXPECT_EQ(find_interconnect(""), nullptr);
}

}  // namespace
}  // namespace gradgate::gate
