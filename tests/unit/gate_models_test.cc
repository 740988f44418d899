// Every formula of gate/models/ against the independent oracle's table (tests/golden/cost_model_golden.json), which was
// computed in exact arithmetic, and against what must hold for all of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "gate/cost.h"
#include "gate/interconnects.h"
#include "gate/models/parameters.h"
#include "gate/models/pipeline.h"

namespace gradgate::gate {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kExact = 1e-12;

nlohmann::json golden(const char* list) {
  std::ifstream file(GRADGATE_SOURCE_DIR "/tests/golden/cost_model_golden.json");
  EXPECT_TRUE(file.good());
  return nlohmann::json::parse(file).at(list);
}

// One row of the table: inputs by name, and expectations by name.
class Row {
 public:
  explicit Row(const nlohmann::json& row) : row_(row) {}
  double operator[](const char* key) const { return row_.at(key).get<double>(); }
  uint32_t ranks() const { return row_.at("N").get<uint32_t>(); }
  // Relative to the value itself; null stands for NaN.
  void check(const char* key, double got) const { check(key, got, 0); }
  // Relative to the value or to `scale`, where the formula is a difference of terms of that size.
  void check(const char* key, double got, double scale) const {
    const nlohmann::json& want = row_.contains(key) ? row_.at(key) : nlohmann::json();
    if (want.is_null()) {
      EXPECT_TRUE(std::isnan(got)) << key << ": " << got << " instead of nothing, " << row_.dump();
      return;
    }
    const double value = want.get<double>();
    EXPECT_LE(std::fabs(got - value), kExact * std::fmax(std::fabs(value), scale))
        << key << ": " << got << " instead of " << value << ", " << row_.dump();
  }

 private:
  const nlohmann::json& row_;
};

TEST(GateModels, MatchTheOraclesRandomCases) {
  const nlohmann::json cases = golden("random_cases");
  ASSERT_EQ(cases.size(), 40u);
  for (const auto& entry : cases) {
    const Row row(entry);
    const double a = row["alpha"], b = row["beta"], m = row["M"], r = row["r"], p = m / r;
    const uint32_t n = row.ranks();
    row.check("p2p", p2p(a, b, m));
    row.check("crossover_bytes", crossover_bytes(a, b));
    row.check("ring_allreduce", ring_allreduce(a, b, n, m));
    row.check("tree_allreduce", tree_allreduce(a, b, n, m));
    row.check("halving_doubling_allreduce", halving_doubling_allreduce(a, b, n, m));
    for (const char* pass : {"allgather", "reduce_scatter", "alltoall"}) row.check(pass, ring_pass(a, b, n, m));
    row.check("broadcast", tree_broadcast(a, b, n, m));
    row.check("ring_tree_crossover", ring_tree_crossover(a, b, n));
    row.check("gather_exchange", gather_exchange(a, b, n, p));
    row.check("two_shot_exchange", two_shot_exchange(a, b, n, p));
    row.check("codec_budget_ring", codec_budget_ring(b, n, m, p));
    row.check("codec_budget_two_shot", codec_budget_ring(b, n, m, p));
    row.check("codec_budget_gather", codec_budget_gather(a, b, n, m, p),
              std::fmax(row["ring_allreduce"], row["gather_exchange"]));
    // As differences of the exchanges' times, too.
    const double dense = ring_allreduce(a, b, n, m), gather = gather_exchange(a, b, n, p);
    row.check("codec_budget_two_shot", codec_budget(dense, two_shot_exchange(a, b, n, p)), dense);
    row.check("codec_budget_gather", codec_budget(dense, gather), std::fmax(dense, gather));

    const LinkModel link = link_model({a, b}, n);
    row.check("ring_allreduce", exchange_cost(Exchange::all_reduce, link, m));
    row.check("two_shot_exchange", exchange_cost(Exchange::two_shot, link, p));
    row.check("gather_exchange", exchange_cost(Exchange::all_gather, link, p));
  }
}

TEST(GateModels, MatchTheOraclesExtendedCases) {
  const nlohmann::json cases = golden("extended_cases");
  ASSERT_EQ(cases.size(), 25u);
  for (const auto& entry : cases) {
    const Row row(entry);
    const double a = row["alpha"], b = row["beta"], m = row["M"], r = row["r"], codec = row["codec_time"];
    const Link inside{row["intra_alpha"], row["intra_beta"]}, between{a, b};
    const uint32_t n = row.ranks(), g = static_cast<uint32_t>(row["ranks_per_node"]), nodes = n / g;
    row.check("tree_allreduce_steps", tree_allreduce_steps(a, b, n, m));
    row.check("broadcast_steps", tree_broadcast_steps(a, b, n, m));
    row.check("halving_doubling_allreduce_steps", halving_doubling_allreduce_steps(a, b, n, m));
    row.check("hierarchical_representative", hierarchical_representative(inside, between, g, nodes, m));
    row.check("hierarchical_sharded", hierarchical_sharded(inside, between, g, nodes, m));
    row.check("hierarchical_sharded", exchange_cost(Exchange::hierarchical, two_level_model(inside, between, n, g), m,
                                                    m, Exchange::all_reduce));
    const LogGP loggp{row["o_send"], row["L"], row["g"], row["G"], row["o_recv"]};
    row.check("loggp_long", loggp_long(loggp, row["message_bytes"]));
    row.check("loggp_train", loggp_train(loggp, row["message_bytes"], row["messages"]));
    row.check("breakeven_bandwidth_ring", breakeven_bandwidth_ring(n, m, r, codec));
    row.check("breakeven_ratio_ring", breakeven_ratio_ring(b, n, m, codec));
    row.check("breakeven_bytes_ring", breakeven_bytes_ring(b, n, r, row["codec_fixed"], row["codec_rate"]));
    row.check("breakeven_ranks_gather", breakeven_ranks_gather(a, b, m, m / r, codec));
  }
}

TEST(GateModels, MatchTheWorkedExamples) {
  const double a = 5e-6, b = 50e9, m = 1e9, n = 256, p = m / 64;
  const double dense = ring_allreduce(a, b, n, m), ring = ring_allreduce(a, b, n, p);
  std::map<std::string, double> got = {
      {"crossover n* on InfiniBand NDR (5 us, 50 GB/s), bytes", crossover_bytes(a, b)},
      {"ring all-reduce, 1 GB, 256 ranks, NDR, s", dense},
      {"tree all-reduce, same, s", tree_allreduce(a, b, n, m)},
      {"ring all-reduce of the payload compressed 64x, s", ring},
      {"compressed total with 2 ms of codec, s", compressed_total(1.5e-3, ring, 0.5e-3)},
      {"speed-up", dense / compressed_total(1e-3, ring, 1e-3)},
      {"codec budget at r = 64, s", codec_budget_ring(b, n, m, p)},
      {"bubble p=8 m=16 V=4", pipeline_bubble(8, 16, 4)},
      {"bubble reduction", pipeline_bubble(8, 16) / pipeline_bubble(8, 16, 4)},
      {"all-gather exchange of the same 64x top-k payload (P = 15.625 MB), s: SLOWER than dense",
       gather_exchange(a, b, n, p)},
      {"two-shot exchange of that payload, s", two_shot_exchange(a, b, n, p)},
      {"codec budget of the all-gather exchange, s: NEGATIVE, the gate must stay shut",
       codec_budget_gather(a, b, n, m, p)},
  };
  for (const int stages : {4, 8}) {
    for (const int micro : {8, 16, 32, 64}) {
      got["bubble p=" + std::to_string(stages) + " m=" + std::to_string(micro)] = pipeline_bubble(stages, micro);
    }
  }
  for (const int ms : {10, 40, 100}) {
    for (const int r : {4, 16, 64, 256}) {
      const std::string what = std::to_string(ms) + " ms, r=" + std::to_string(r) + ", s";
      // Without latency a transfer is in proportion to its bytes.
      got["bandwidth-only codec budget, dense " + what] = codec_budget(ms * 1e-3, ms * 1e-3 / r);
    }
  }
  const nlohmann::json rows = golden("worked_examples");
  ASSERT_EQ(rows.size(), 33u);
  for (const auto& row : rows) {
    const std::string what = row.at("what");
    ASSERT_TRUE(got.count(what)) << what;
    const double want = row.at("value");
    EXPECT_NEAR(got[what], want, 4e-15 * std::fabs(want) + 1e-17) << what;
  }
}

// The formulas that depend on ranks and bytes, by name, on one link.
std::map<std::string, std::function<double(uint32_t, double)>> times(Link l) {
  const double a = l.alpha_s, b = l.beta_Bps;
  return {{"ring_allreduce", [=](uint32_t n, double m) { return ring_allreduce(a, b, n, m); }},
          {"ring_pass", [=](uint32_t n, double m) { return ring_pass(a, b, n, m); }},
          {"tree_allreduce", [=](uint32_t n, double m) { return tree_allreduce(a, b, n, m); }},
          {"halving_doubling", [=](uint32_t n, double m) { return halving_doubling_allreduce(a, b, n, m); }},
          {"tree_broadcast", [=](uint32_t n, double m) { return tree_broadcast(a, b, n, m); }},
          {"tree_allreduce_steps", [=](uint32_t n, double m) { return tree_allreduce_steps(a, b, n, m); }},
          {"tree_broadcast_steps", [=](uint32_t n, double m) { return tree_broadcast_steps(a, b, n, m); }},
          {"gather_exchange", [=](uint32_t n, double m) { return gather_exchange(a, b, n, m); }},
          {"two_shot_exchange", [=](uint32_t n, double m) { return two_shot_exchange(a, b, n, m); }},
          {"representative", [=](uint32_t n, double m) { return hierarchical_representative(l, l, 1, n, m); }},
          {"sharded", [=](uint32_t n, double m) {
             return hierarchical_sharded({a / 10, b * 10}, l, 1, n, m);
           }}};
}

TEST(GateModels, CostNothingOnOneRankAndGrowWithRanksAndBytes) {
  for (const Interconnect& interconnect : kInterconnects) {
    for (const auto& [name, time] : times(interconnect.effective)) {
      for (const double m : {0.0, 1.0, 4096.0, 1e6, 1e9, 1e12}) {
        EXPECT_EQ(time(1, m), 0) << name;
        double previous = 0;
        for (const uint32_t n : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 9u, 64u, 1000u, 1024u, 65536u, 1000000u}) {
          const double t = time(n, m);
          ASSERT_TRUE(std::isfinite(t)) << name << " N " << n << " M " << m;
          ASSERT_GE(t, previous) << name << " N " << n << " M " << m;
          ASSERT_LE(t, time(n, 2 * m + 1)) << name << " N " << n << " M " << m;
          previous = t;
        }
      }
    }
  }
  // The exception: ranks beyond a power of two are folded in, and cost more than filling up to the next one.
  EXPECT_GT(halving_doubling_allreduce_steps(1e-6, 1e9, 3, 1e6), halving_doubling_allreduce_steps(1e-6, 1e9, 4, 1e6));
  EXPECT_EQ(halving_doubling_allreduce_steps(1e-6, 1e9, 1, 1e6), 0);
  for (uint32_t n = 2; n <= 1024; n *= 2) {
    EXPECT_EQ(halving_doubling_allreduce_steps(1e-6, 1e9, n, 1e6), halving_doubling_allreduce(1e-6, 1e9, n, 1e6)) << n;
  }
}

TEST(GateModels, TheExtremesOfTheRangesAreFinite) {
  const auto low = [](Parameter p) { return range_of(p).low; };
  const auto high = [](Parameter p) { return range_of(p).high; };
  const Link slowest{high(Parameter::alpha), low(Parameter::beta)},
      fastest{low(Parameter::alpha), high(Parameter::beta)};
  const auto most = static_cast<uint32_t>(high(Parameter::ranks));
  for (const Link link : {slowest, fastest}) {
    for (const auto& [name, time] : times(link)) {
      EXPECT_TRUE(std::isfinite(time(most, high(Parameter::bytes)))) << name;
      EXPECT_GE(time(most, 0), 0) << name;
    }
  }
}

TEST(GateModels, TheCrossoverIsWhereRingAndTreeMeet) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 200; ++i) {
    const double a = 1e-9 * (1 + random() % 200000), b = 1e7 + static_cast<double>(random() % 900000000000);
    const double n = 3 + static_cast<double>(random() % 5000);
    const double m = ring_tree_crossover(a, b, n);
    const double ring = ring_allreduce(a, b, n, m);
    EXPECT_NEAR(ring, tree_allreduce(a, b, n, m), 1e-10 * ring) << n;
    EXPECT_LT(ring_allreduce(a, b, n, 2 * m), tree_allreduce(a, b, n, 2 * m)) << n;
  }
  EXPECT_TRUE(std::isnan(ring_tree_crossover(1e-6, 1e9, 2)));
  EXPECT_TRUE(std::isnan(ring_tree_crossover(1e-6, 1e9, 1)));
}

TEST(GateModels, AdviceTakesTheFastest) {
  const Link link{5e-6, 50e9};
  EXPECT_EQ(advise(link, 256, 1024).ring_or_tree, AllReduceAlgorithm::tree);
  EXPECT_EQ(advise(link, 256, 1e9).ring_or_tree, AllReduceAlgorithm::ring);
  EXPECT_EQ(advise(link, 256, 1e9).best, AllReduceAlgorithm::halving_doubling) << "the ring's bytes in fewer messages";
  EXPECT_EQ(advise(link, 255, 1e9).best, AllReduceAlgorithm::ring) << "127 ranks would be folded in";
  EXPECT_EQ(advise(link, 2, 1e9).best, AllReduceAlgorithm::ring) << "a tie with halving-doubling";
  EXPECT_STREQ(algorithm_name(AllReduceAlgorithm::halving_doubling), "halving-doubling");
}

TEST(GateModels, InversesInvert) {
  const double a = 5e-6, b = 50e9, n = 64, m = 1e8, r = 4, codec = 1e-3, p = m / r;
  const double beta = breakeven_bandwidth_ring(n, m, r, codec);
  EXPECT_NEAR(codec_budget_ring(beta, n, m, p), codec, 1e-15);
  const double ratio = breakeven_ratio_ring(b, n, m, codec);
  EXPECT_NEAR(codec_budget_ring(b, n, m, m / ratio), codec, 1e-15);
  const double fixed = 20e-6, rate = 1e12, bytes = breakeven_bytes_ring(b, n, r, fixed, rate);
  EXPECT_NEAR(codec_budget_ring(b, n, bytes, bytes / r), fixed + bytes / rate, 1e-15);
  const uint32_t most = breakeven_ranks_gather(a, b, m, m / 100, codec);
  EXPECT_GT(codec_budget_gather(a, b, most, m, m / 100), codec);
  EXPECT_LE(codec_budget_gather(a, b, most + 1, m, m / 100), codec);
  EXPECT_EQ(breakeven_ranks_gather(a, b, m, m, codec), 1u) << "a payload as large as the gradient";
  EXPECT_EQ(breakeven_ranks([](uint32_t) { return true; }), kMostRanks);
  EXPECT_TRUE(std::isinf(breakeven_bandwidth_ring(n, m, r, 0))) << "free: pays on every link";
  EXPECT_TRUE(std::isnan(breakeven_bandwidth_ring(n, m, 1, 0)));
  EXPECT_TRUE(std::isnan(breakeven_ratio_ring(b, n, m, 1)));
  EXPECT_TRUE(std::isnan(breakeven_bytes_ring(b, n, r, fixed, 1e9)));
}

TEST(GateModels, MicroBatchesReachTheTarget) {
  for (const double stages : {1.0, 2.0, 4.0, 8.0, 100.0}) {
    for (const double target : {1e-6, 0.01, 0.05, 0.1, 0.3, 1.0 / 3, 0.5, 1.0}) {
      for (const double chunks : {1.0, 2.0, 4.0}) {
        const double m = micro_batches_for(stages, target, chunks);
        EXPECT_EQ(m, std::floor(m));
        EXPECT_LE(pipeline_bubble(stages, m, chunks), target);
        if (m > 1) {
          EXPECT_GT(pipeline_bubble(stages, m - 1, chunks), target) << stages << " " << target;
        }
      }
    }
  }
  EXPECT_EQ(micro_batches_for(8, 0.1), 63);
  EXPECT_EQ(micro_batches_for(8, 0.1, 4), 16);
}

TEST(GateModels, DecodingPasses) {
  EXPECT_EQ(decode_passes(Exchange::all_reduce, 8), 1);
  EXPECT_EQ(decode_passes(Exchange::two_shot, 4), 1.75);
  EXPECT_EQ(decode_passes(Exchange::all_gather, 8), 8);
}

TEST(GateModels, ParametersOutOfRangeAreNamed) {
  Message why;
  EXPECT_TRUE(check_parameter(Parameter::alpha, 0, &why).ok());
  EXPECT_TRUE(check_parameter(Parameter::ranks, 256, &why).ok());
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < std::size(kParameters); ++i) {
    const auto parameter = static_cast<Parameter>(i);
    const ParameterRange& range = range_of(parameter);
    for (const double bad : {-1.0, nan, inf, -inf, 1e300}) {
      EXPECT_EQ(check_parameter(parameter, bad, &why).code(), StatusCode::invalid_argument) << range.name;
      EXPECT_THAT(why.text, AllOf(HasSubstr(range.name), HasSubstr("expected"), HasSubstr("...")));
    }
    EXPECT_TRUE(check_parameter(parameter, range.low, &why).ok()) << range.name;
    EXPECT_TRUE(check_parameter(parameter, range.high, &why).ok()) << range.name;
    EXPECT_EQ(check_parameter(parameter, std::fmin(range.low + 0.5, range.high - 0.5), &why).ok(), !range.whole);
  }
  EXPECT_FALSE(check_parameter(Parameter::beta, 0, &why).ok());
  EXPECT_STREQ(why.text, "beta is 0 B/s; expected 1 ... 1e+18 B/s");
  EXPECT_TRUE(check_nodes(16, 8, &why).ok());
  EXPECT_FALSE(check_nodes(12, 8, &why).ok());
  EXPECT_STREQ(why.text, "ranks per node is 8; expected a divisor of the 12 ranks");
}

}  // namespace
}  // namespace gradgate::gate
