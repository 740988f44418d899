// Whole lives of a gate: start-up, prediction, verification, hold, closing, drift and account, with injected times.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/gate/simulator.h"

namespace gradgate::gate {
namespace {

World fast_link() {
  World w;
  w.link = {0.5e-6, 450e9};
  return w;
}

TEST(GateLife, SlowLinkOpensVerifiesAndHolds) {
  World w;
  w.noise = 0.02;
  Simulation sim(w, {});
  sim.run(300);
  EXPECT_EQ(sim.gates[0].running(0), 1);
  EXPECT_TRUE(sim.gates[0].settled());
  ASSERT_EQ(sim.lines("verify", "\"verdict\":\"win\"").size(), 1u);
  // Start-up is short and dense; then ABBA windows of 8 in which the base sends the plain gradient.
  const auto& actions = sim.actions[0];
  for (int i = 0; i < 10; ++i) EXPECT_EQ(actions[i].action, Action::dense);
  for (int i = 0; i < 32; ++i) {
    const bool plan = i < 8 || i >= 24;
    EXPECT_EQ(actions[10 + i].action, plan ? Action::compress : Action::probe) << i;
  }
  EXPECT_EQ(sim.count(0, Action::compress, 42), 258);
  EXPECT_EQ(sim.count(0, Action::flush), 0);
  // The verified ratio is the true one of the whole step.
  const double dense = 20e-3 + ring_allreduce(50e-6, 125e6, 4, 4e6);
  const double plan = 20e-3 + two_shot_exchange(50e-6, 125e6, 4, 4e6 / 3.94) + 4e6 / 4e9 + 1.75 * 4e6 / 8e9;
  const GateTotals totals = sim.gates[0].totals();
  EXPECT_NEAR(totals.dense_step_s / totals.plan_step_s, dense / plan, 0.05);
  EXPECT_NEAR(totals.saved_s, (dense - plan) * (16 + 256), 0.03 * (dense - plan) * (16 + 256))
      << "verification and hold";
  const std::string text = sim.gates[0].explain(0).text;
  EXPECT_NE(text.find("→ int8 (verified 2."), std::string::npos) << text;
  EXPECT_NE(std::string(sim.gates[0].explain_plan().text).find("1 of 1 buckets compressed"), std::string::npos);
}

TEST(GateLife, FastLinkStaysDense) {
  World w = fast_link();
  w.noise = 0.02;
  w.bucket_bytes = {4e6, 25e6, 1e3};
  Simulation sim(w, {});
  sim.run(2000);
  for (size_t b = 0; b < 3; ++b) {
    EXPECT_EQ(sim.gates[0].running(b), 0);
    EXPECT_EQ(sim.gates[0].decision(b).why, Why::break_even);
    EXPECT_EQ(sim.count(b, Action::dense), 2000) << "no residual was ever made, so nothing but plain dense";
  }
  EXPECT_TRUE(sim.lines("verify").empty());
  EXPECT_NE(std::string(sim.gates[0].explain(0).text).find("≥"), std::string::npos);
}

TEST(GateLife, SmallBucketStaysDenseBesideALargeOne) {
  World w;
  w.link = {50e-6, 1.25e9};
  w.bucket_bytes = {25e6, 2e3};
  w.codecs[0].fixed_s = 2e-6;  // a call costs as much as 2 kB save
  w.codecs[0].encode_Bps = w.codecs[0].decode_Bps = 20e9;
  Simulation sim(w, {});
  sim.run(100);
  EXPECT_EQ(sim.gates[0].running(0), 1);
  EXPECT_EQ(sim.gates[0].running(1), 0);
  EXPECT_EQ(sim.gates[0].decision(1).why, Why::break_even);
  EXPECT_EQ(sim.count(1, Action::dense), 100) << "no probe and no flush where nothing was compressed";
}

// The threshold is bytes: a million elements of 8, 4, 2, 2 bytes against 3,000,000 bytes.
TEST(GateLife, MinimumIsBytesNotElements) {
  World w;
  w.bucket_bytes = {8e6, 4e6, 2e6, 2e6};
  GateConfig config;
  config.min_bytes = 3e6;
  Simulation sim(w, config);
  sim.run(100);
  const int want[] = {1, 1, 0, 0};
  for (size_t b = 0; b < 4; ++b) EXPECT_EQ(sim.gates[0].running(b), want[b]) << b;
  EXPECT_EQ(nlohmann::json::parse(sim.lines("predict", "\"bucket\":0").at(0)).at("dense_bytes"), 8e6);
}

TEST(GateLife, LosingStepClosesFlushesOnceAndStaysClosed) {
  World w;
  w.codecs[0].hidden_s = 80e-3;  // predicted to win by 34 ms, measured to lose
  Simulation sim(w, {});
  sim.run(5000);
  EXPECT_EQ(sim.gates[0].running(0), 0);
  EXPECT_EQ(sim.lines("verify", "\"verdict\":\"lose\"").size(), 1u);
  ASSERT_EQ(sim.lines("close").size(), 1u);
  EXPECT_NE(sim.lines("close")[0].find("\"why\":\"lost_verification\",\"flush\":true"), std::string::npos);
  EXPECT_EQ(sim.count(0, Action::flush), 1);
  EXPECT_EQ(sim.actions[0][42].action, Action::flush) << "the first step after the verification";
  EXPECT_EQ(sim.count(0, Action::dense, 43), 5000 - 43);
  EXPECT_EQ(sim.gates[0].decision(0).why, Why::lost_verification);
  // The prediction's numbers stay visible beside the verdict that overruled them.
  const std::string text = sim.gates[0].explain(0).text;
  EXPECT_NE(text.find("1.88 ms < T(M) 48.3 − T_two_shot(M/3.94) 12.5 = 35.8 ms → dense (int8: closed for good"),
            std::string::npos)
      << text;
}

TEST(GateLife, NextCandidateGetsItsTurnAfterALoss) {
  World w;
  w.codecs = {SimCodec{"bf16", Exchange::two_shot, 1, 2, 8e9, 16e9},
              SimCodec{"int8", Exchange::two_shot, 2, 3.94, 4e9, 8e9, 80e-3}};
  Simulation sim(w, {});
  sim.run(400);
  EXPECT_EQ(sim.lines("close", "\"candidate\":\"int8\"").size(), 1u);
  EXPECT_EQ(sim.lines("close").size(), 1u);
  EXPECT_EQ(sim.gates[0].running(0), 1);
  EXPECT_EQ(sim.count(0, Action::flush), 1);
}

TEST(GateLife, FaithfulCandidateIsPreferredWithinFivePercent) {
  World w;
  w.codecs = {SimCodec{"int8", Exchange::two_shot, 2, 3.94, 4e9, 8e9},
              SimCodec{"lossy", Exchange::two_shot, 5, 4.0, 4e9, 8e9}};
  Simulation near_tie(w, {});
  near_tie.run(20);
  EXPECT_EQ(near_tie.gates[0].decision(0).chosen, 1);
  EXPECT_EQ(near_tie.gates[0].decision(0).why, Why::most_faithful);
  near_tie.run(80);
  EXPECT_EQ(near_tie.gates[0].running(0), 1);
  EXPECT_EQ(near_tie.gates[0].decision(0).why, Why::kept) << "measured, the other one is not faster by 5 % either";
  w.codecs[1].ratio = 8;
  Simulation clear(w, {});
  clear.run(100);
  EXPECT_EQ(clear.gates[0].running(0), 2);
}

// Four times smaller pays as a two-shot; gathered from 15 peers it is more than the dense exchange moves.
TEST(GateLife, APayloadThatMustBeGatheredIsPricedAsGathered) {
  World w;
  w.ranks = 16;
  w.codecs = {SimCodec{"topk", Exchange::all_gather, 5, 4.0}};
  Simulation gathered(w, {});
  gathered.run(100);
  EXPECT_EQ(gathered.gates[0].running(0), 0);
  EXPECT_EQ(gathered.gates[0].decision(0).why, Why::break_even);
  EXPECT_NEAR(gathered.gates[0].decision(0).transfer_s, gather_exchange(50e-6, 125e6, 16, 1e6), 1e-9);
  w.codecs[0].exchange = Exchange::two_shot;
  Simulation two_shot(w, {});
  two_shot.run(100);
  EXPECT_EQ(two_shot.gates[0].running(0), 1);
}

// On a fast link inside the node, a hierarchical exchange sends a quarter of the payload over the slow one.
TEST(GateLife, HierarchicalRunsWhereTheNodeIsFast) {
  World w;
  w.ranks = 8;
  w.ranks_per_node = 4;
  w.inside = {1e-6, 100e9};
  w.codecs = {SimCodec{"int8", Exchange::two_shot, 2, 3.94},
              SimCodec{"int8 hierarchical", Exchange::hierarchical, 2, 3.94}};
  Simulation sim(w, {});
  sim.run(100);
  EXPECT_EQ(sim.gates[0].running(0), 2);
  const Decision& d = sim.gates[0].decision(0);
  EXPECT_NEAR(d.transfer_s, exchange_cost(Exchange::hierarchical, w.model(), std::ceil(4e6 / 3.94), 4e6), 1e-9);
  // Without knowledge of the nodes it cannot be priced, and the flat one runs.
  w.ranks_per_node = 0;
  Simulation flat(w, {});
  flat.run(100);
  EXPECT_EQ(flat.gates[0].running(0), 1);
}

TEST(GateLife, UndecidedKeepsDenseAndFlushes) {
  World w;
  // The prediction wins clearly, but the step as measured is equal to dense.
  const double dense = ring_allreduce(50e-6, 125e6, 4, 4e6);
  const double plan = two_shot_exchange(50e-6, 125e6, 4, std::ceil(4e6 / 3.94)) + 4e6 / 4e9 + 1.75 * 4e6 / 8e9;
  w.codecs[0].hidden_s = dense - plan;
  Simulation sim(w, {});
  sim.run(10 + 64 + 1);
  EXPECT_EQ(sim.gates[0].running(0), 0);
  EXPECT_EQ(sim.gates[0].decision(0).why, Why::undecided);
  EXPECT_EQ(sim.lines("verify", "\"verdict\":\"undecided\"").size(), 1u) << "after two rounds";
  EXPECT_EQ(sim.actions[0][74].action, Action::flush);
  EXPECT_TRUE(sim.lines("close").empty()) << "undecided closes nothing for good";
}

TEST(GateLife, NearTieSwitchesRarely) {
  World w;
  w.noise = 0.03;
  const double dense = ring_allreduce(50e-6, 125e6, 4, 4e6);
  const double plan = two_shot_exchange(50e-6, 125e6, 4, std::ceil(4e6 / 3.94)) + 4e6 / 4e9 + 1.75 * 4e6 / 8e9;
  w.codecs[0].hidden_s = dense - plan;
  Simulation sim(w, {});
  sim.run(10000);
  int flips = 0;
  for (size_t i = 1; i < sim.actions[0].size(); ++i) {
    flips += (sim.actions[0][i].action == Action::compress) != (sim.actions[0][i - 1].action == Action::compress);
  }
  // Holds double, so there are at most log2(10000 / 64) of them, each followed by at most two rounds of four switches.
  EXPECT_LE(flips, 8 * 8);
  EXPECT_LT(sim.total_s, 1.01 * 10000 * (w.compute_s + dense));
}

TEST(GateLife, DriftIsNoticedBothWays) {
  Simulation sim(World{}, {});
  sim.run(300);
  ASSERT_EQ(sim.gates[0].running(0), 1);
  sim.world.link = {0.5e-6, 100e9};  // the job moved to a fast network
  sim.world.compute_s = 5e-3;
  sim.run(200);
  ASSERT_GE(sim.lines("drift").size(), 1u);
  EXPECT_EQ(sim.gates[0].running(0), 0) << "what the link saves no longer pays for the codec";
  EXPECT_EQ(sim.count(0, Action::flush), 1);

  Simulation slower(fast_link(), {});
  slower.run(300);
  ASSERT_EQ(slower.gates[0].running(0), 0);
  slower.world.link = {50e-6, 125e6};
  slower.gates[0].set_link(link_model(slower.world.link, 4));
  slower.run(300);
  ASSERT_GE(slower.lines("drift", "\"action\":\"measure\"").size(), 1u);
  EXPECT_EQ(slower.gates[0].running(0), 1);
}

TEST(GateLife, FallingAccountShutsTheGate) {
  World w;
  GateConfig config;
  config.token_fraction = 0;  // after one overdrawn check nothing more can be measured
  Simulation sim(w, config);
  sim.run(42 + 32);
  ASSERT_EQ(sim.gates[0].running(0), 1);
  sim.world.compute_s = 55e-3;  // both sides are slower now: the first check wins and renews what is compared with
  sim.run(200);
  ASSERT_EQ(sim.gates[0].running(0), 1);
  ASSERT_LT(sim.gates[0].totals().tokens_s, 0);
  sim.codec(1).hidden_s = 45e-3;  // now the plan is truly slower than dense
  sim.run(4 * 32);
  EXPECT_EQ(sim.gates[0].running(0), 0);
  ASSERT_EQ(sim.lines("account", "\"action\":\"shut\"").size(), 1u);
  ASSERT_EQ(sim.lines("close", "lost_account").size(), 1u);
  EXPECT_EQ(sim.count(0, Action::flush), 1);
  const size_t after = sim.actions[0].size();
  sim.run(3000);
  EXPECT_EQ(sim.count(0, Action::dense, after), 3000) << "closed for good";
}

TEST(GateLife, FailingCodecIsClosedAtTheNextAgreement) {
  Simulation sim(World{}, {});
  sim.run(100);
  ASSERT_EQ(sim.gates[0].running(0), 1);
  sim.codec(1).fails = true;
  sim.run(40);
  EXPECT_EQ(sim.gates[0].running(0), 0);
  EXPECT_EQ(sim.lines("failure").size(), 1u);
  EXPECT_EQ(sim.lines("close", "codec_failed").size(), 1u);
  EXPECT_EQ(sim.count(0, Action::flush), 1);
  EXPECT_GT(sim.gates[0].totals().rejected_samples, 0u);
}

TEST(GateLife, MeasuringAfterStartUpStaysWithinItsBudget) {
  for (const double noise : {0.0, 0.05}) {
    World w;
    w.noise = noise;
    w.codecs = {SimCodec{"bf16", Exchange::two_shot, 1, 2, 8e9, 16e9}, SimCodec{"int8"}};
    GateConfig config;
    config.hold_max = 256;  // so that it is the tokens that hold it back
    Simulation sim(w, config);
    sim.run(200);
    ASSERT_TRUE(sim.gates[0].settled());
    const double shadow = sim.total_shadow_s;
    const size_t start = sim.step_times.size();
    const double began = sim.total_s;
    sim.run(20000);
    const GateTotals totals = sim.gates[0].totals();
    const double probes = sim.count(0, Action::probe, start) * (totals.dense_step_s - totals.plan_step_s);
    EXPECT_GT(probes, 0) << "it did check again";
    EXPECT_LE(sim.total_shadow_s - shadow + probes, 1.05 * 0.005 * (sim.total_s - began)) << "noise " << noise;
    EXPECT_EQ(sim.gates[0].running(0), 2);
  }
}

TEST(GateLife, HoldsDouble) {
  Simulation sim(fast_link(), {});
  sim.run(3000);
  double previous = 32;
  for (const std::string& line : sim.lines("hold")) {
    const double steps = nlohmann::json::parse(line).at("steps");
    EXPECT_EQ(steps, 2 * previous);
    previous = steps;
  }
  EXPECT_GE(previous, 1024);
  EXPECT_LE(sim.agreements, 3000 / 32 + 10) << "and agreements stay rare";
}

TEST(GateLife, LateRanksAreNotTransferTime) {
  World w;
  w.link = {0.5e-6, 40e9};
  w.late_s = 30e-3;  // every step some rank is 30 ms late; the exchange itself takes 0.15 ms
  Simulation sim(w, {});
  sim.run(200);
  EXPECT_EQ(sim.gates[0].running(0), 0);
  EXPECT_LT(sim.gates[0].decision(0).dense_s, 1e-3);
}

TEST(GateLife, SlowestRankDecidesTheCodecTime) {
  World w;
  w.compute_s = 5e-3;
  // 4 MB over 1.25 GB/s saves 3.6 ms; the codec takes 1.9 ms on most ranks and 5.6 ms on one.
  w.link = {1e-6, 1.25e9};
  Simulation even(w, {});
  even.run(100);
  EXPECT_EQ(even.gates[0].running(0), 1);
  w.codec_slowdown_of_rank0 = 3;
  Simulation uneven(w, {});
  uneven.run(100);
  EXPECT_EQ(uneven.gates[0].running(0), 0);
  EXPECT_TRUE(uneven.lines("verify").empty()) << "it was not even predicted to pay";
}

TEST(GateLife, SlowestRankDecidesTheStepTime) {
  World w;
  w.codecs[0].hidden_s = 80e-3;
  w.hidden_on_rank0_only = true;  // three ranks of four see a faster step
  Simulation sim(w, {});
  sim.run(100);
  EXPECT_EQ(sim.gates[0].running(0), 0);
  EXPECT_EQ(sim.lines("verify", "\"verdict\":\"lose\"").size(), 1u);
}

nlohmann::json first_prediction(const World& w, const GateConfig& config = {}) {
  Simulation sim(w, config);
  sim.run(20);
  return nlohmann::json::parse(sim.lines("predict").at(0));
}

TEST(GateLife, PredictionIsFedWithShadowTimesAndTheMeasuredDenseTransfer) {
  const auto p = first_prediction(World{});
  EXPECT_NEAR(p.at("encode_s").get<double>(), 4e6 / 4e9, 1e-12);
  EXPECT_NEAR(p.at("decode_s").get<double>(), 1.75 * 4e6 / 8e9, 1e-12);
  EXPECT_NEAR(p.at("dense_s").get<double>(), ring_allreduce(50e-6, 125e6, 4, 4e6), 1e-12);
  EXPECT_NEAR(p.at("transfer_s").get<double>(), two_shot_exchange(50e-6, 125e6, 4, std::ceil(4e6 / 3.94)), 1e-12);
}

TEST(GateLife, ModelIsPricedUnderTheLoadOfTheJob) {
  const double model = two_shot_exchange(50e-6, 125e6, 4, std::ceil(4e6 / 3.94));
  World w;
  for (const auto& [load, factor] : {std::pair(1.5, 1.5), {0.75, 0.75}, {6.0, 2.0}, {0.1, 0.5}}) {
    w.load = load;
    EXPECT_NEAR(first_prediction(w).at("transfer_s").get<double>(), factor * model, 1e-9) << load;
  }
}

TEST(GateLife, FirstStepsOfAJobAreNotItsTransferTime) {
  World w;
  w.cold_steps = 2;
  GateConfig config;
  config.startup_min = config.startup_max = 4;
  EXPECT_NEAR(first_prediction(w, config).at("dense_s").get<double>(), ring_allreduce(50e-6, 125e6, 4, 4e6), 1e-12);
}

TEST(GateLife, MeasuringAgainForgetsOldShadowTimes) {
  World w;
  w.link = {1e-6, 1.25e9};         // int8 saves 3.6 ms of 4.8
  w.codecs[0].encode_Bps = 0.5e9;  // and costs 8.9 ms
  Simulation sim(w, {});
  sim.run(700);
  ASSERT_EQ(sim.gates[0].running(0), 0);
  ASSERT_EQ(sim.lines("predict").size(), 2u);
  sim.codec(1).encode_Bps = 8e9;  // the processor is free now: 1.4 ms
  sim.run(1000);
  EXPECT_EQ(sim.gates[0].running(0), 1);
  EXPECT_EQ(sim.lines("predict", "\"chosen\":\"dense\"").size(), 2u) << "the first new measurement is enough";
}

TEST(GateLife, BetterCandidateReplacesTheRunningOneIfItBeatsIt) {
  for (const double hidden : {0.0, 40e-3}) {
    World w;
    w.codecs = {SimCodec{"bf16", Exchange::two_shot, 1, 2, 8e9, 16e9},
                SimCodec{"int8", Exchange::two_shot, 2, 3.94, 0.1e9, 8e9}};
    Simulation sim(w, {});
    sim.run(200);
    ASSERT_EQ(sim.gates[0].running(0), 1) << "int8 encodes too slowly";
    const double dense = sim.gates[0].totals().dense_step_s;
    sim.codec(2).encode_Bps = 8e9;
    sim.codec(2).hidden_s = hidden;
    size_t at = sim.actions[0].size();
    while (sim.lines("verify", "challenge").size() < 2 && sim.gates[0].step() < 8000) sim.run(1);
    // Verified against what ran, not against dense: windows of candidates 2, 1, 1, 2.
    while (at < sim.actions[0].size() && sim.actions[0][at].candidate != 2) ++at;
    ASSERT_EQ(at + 32, sim.actions[0].size());
    for (size_t i = 0; i < 32; ++i) {
      ASSERT_EQ(sim.actions[0][at + i].action, Action::compress);
      ASSERT_EQ(sim.actions[0][at + i].candidate, i < 8 || i >= 24 ? 2 : 1) << i;
    }
    EXPECT_EQ(sim.gates[0].running(0), hidden > 0 ? 1 : 2);
    EXPECT_NEAR(sim.gates[0].totals().dense_step_s, dense, 1e-9) << "the base of that comparison was not dense";
    EXPECT_EQ(sim.count(0, Action::flush), 0) << "the residual goes from codec to codec";
    EXPECT_EQ(sim.lines("close", "int8").size(), hidden > 0 ? 1u : 0u);
  }
}

TEST(GateLife, WhatWasSeenOnTheWireBeatsTheModel) {
  World w;
  w.codecs = {SimCodec{"bf16", Exchange::two_shot, 1, 2, 8e9, 16e9}, SimCodec{"int8"}};
  Simulation sim(w, {});
  sim.run(300);
  sim.codec(2).wire_factor = 1.25;
  sim.run(6000);
  const auto lines = sim.lines("predict");
  ASSERT_GE(lines.size(), 2u);
  const double model = two_shot_exchange(50e-6, 125e6, 4, std::ceil(4e6 / 3.94));
  EXPECT_NEAR(nlohmann::json::parse(lines[0]).at("transfer_s").get<double>(), model, 1e-9);
  EXPECT_NEAR(nlohmann::json::parse(lines[1]).at("transfer_s").get<double>(), 1.25 * model, 1e-9);
}

}  // namespace
}  // namespace gradgate::gate
