// The inequality to the letter, the order of fidelity, hysteresis, and the line that explains a decision.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "gate/estimator.h"
#include "gate/plan/verify.h"
#include "gate/predict.h"

namespace gradgate::gate {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kUs = 1e-6, kMs = 1e-3;

CandidateCost candidate(double encode, double transfer, double decode, double payload = 2e6, int fidelity = 1) {
  return {encode, transfer, decode, payload, fidelity, false};
}

Decision decide_one(double dense, const CandidateCost& c, double bytes = 8e6, int incumbent = kNoIncumbent) {
  return decide(dense, bytes, {&c, 1}, incumbent);
}

TEST(GatePredict, StrictInequality) {
  for (const double unit : {1.0, kUs}) {  // in microseconds, exact; in seconds, where the differences round
    const Decision equal = decide_one(10000 * unit, candidate(2000 * unit, 7000 * unit, 1000 * unit));
    EXPECT_EQ(equal.chosen, 0);
    EXPECT_EQ(equal.why, Why::break_even);
    EXPECT_EQ(equal.considered, 1) << "the numbers of the candidate turned down are kept";
    const Decision less = decide_one(10000 * unit, candidate(2000 * unit, 6999 * unit, 1000 * unit));
    EXPECT_EQ(less.chosen, 1);
    EXPECT_EQ(less.why, Why::fastest);
  }
}

TEST(GatePredict, BadNumbersAreClosedWithAReason) {
  const CandidateCost good = candidate(2000, 6000, 1000);
  ASSERT_EQ(decide_one(10000, good).chosen, 1);
  for (const double bad : {kNaN, kInf, -kInf, -1.0}) {
    for (double CandidateCost::* field :
         {&CandidateCost::encode_s, &CandidateCost::transfer_s, &CandidateCost::decode_s}) {
      CandidateCost c = good;
      c.*field = bad;
      const Decision d = decide_one(10000, c);
      EXPECT_EQ(d.chosen, 0);
      EXPECT_EQ(d.why, std::isnan(bad) ? Why::not_measured : Why::bad_time);
    }
    EXPECT_EQ(decide_one(bad, good).chosen, 0);
    EXPECT_EQ(decide_one(bad, good).why, Why::bad_dense_time);
    CandidateCost c = good;
    c.payload_bytes = bad;
    EXPECT_EQ(decide_one(10000, c).chosen, 0);
    EXPECT_EQ(decide_one(10000, c).why, Why::payload_not_smaller);
    EXPECT_EQ(decide_one(10000, good, bad).why, Why::empty_bucket);
  }
}

TEST(GatePredict, RatioMustExceedOne) {
  // r = 0.25, 1 and a payload one byte too large; then r just above 1.
  for (const double payload : {32e6, 8e6, 8e6 + 1}) {
    const Decision d = decide_one(10000, candidate(1, 1, 1, payload));
    EXPECT_EQ(d.chosen, 0) << payload;
    EXPECT_EQ(d.why, Why::payload_not_smaller);
  }
  EXPECT_EQ(decide_one(10000, candidate(1, 1, 1, 8e6 - 1)).chosen, 1);
  EXPECT_EQ(decide_one(10000, candidate(1, 1, 1), 0).why, Why::empty_bucket);
  EXPECT_EQ(decide_one(10000, candidate(1, 1, 1, 0)).why, Why::no_candidate);
  // Header and indices larger than a tiny gradient: 24 bytes for 3 floats.
  EXPECT_EQ(decide_one(10000, candidate(1, 1, 1, 24), 12).chosen, 0);
  EXPECT_EQ(decide(10000, 8e6, {}).why, Why::no_candidate);
}

TEST(GatePredict, OneBadCandidateDoesNotCloseTheOthers) {
  const std::vector<CandidateCost> costs = {candidate(kNaN, 1, 1), candidate(100, 5000, 100),
                                            candidate(100, 9900, 101)};
  const Decision d = decide(10000, 8e6, costs);
  EXPECT_EQ(d.chosen, 2);
  EXPECT_EQ(d.encode_s, 100);
  EXPECT_EQ(d.transfer_s, 5000);
}

TEST(GatePredict, FasterTransferWithDearCodecLoses) {
  // Dense 42.4 ms; the all-gather of a 64x payload takes 81.0 ms, the two-shot 3.2 ms.
  const std::vector<CandidateCost> costs = {candidate(1 * kMs, 80.9625 * kMs, 1 * kMs, 1e9 / 64),
                                            candidate(1 * kMs, 3.1726 * kMs, 1 * kMs, 1e9 / 64)};
  EXPECT_EQ(decide(42.39375 * kMs, 1e9, {costs.data(), 1}).chosen, 0);
  EXPECT_EQ(decide(42.39375 * kMs, 1e9, costs).chosen, 2);
}

TEST(GatePredict, MostFaithfulWithinFivePercent) {
  // int8 and a lossy codec: totals 105 against 100, then 105.1 against 100.
  const CandidateCost lossy = candidate(10, 80, 10, 1e6, 5);
  std::vector<CandidateCost> costs = {candidate(10, 85, 10, 2e6, 2), lossy};
  EXPECT_EQ(decide(1000, 8e6, costs).chosen, 1);
  EXPECT_EQ(decide(1000, 8e6, costs).why, Why::most_faithful);
  costs[0].transfer_s = 85.1;
  EXPECT_EQ(decide(1000, 8e6, costs).chosen, 2);
  EXPECT_EQ(decide(1000, 8e6, costs).why, Why::fastest);
  // Equal fidelity: the bigger payload; equal payload too: the first.
  costs = {candidate(10, 80, 10, 1e6, 2), candidate(10, 82, 10, 3e6, 2), candidate(10, 81, 10, 3e6, 2)};
  EXPECT_EQ(decide(1000, 8e6, costs).chosen, 2);
  // A faithful candidate near the fastest must itself pay: T(M) − transfer = 4 here.
  costs = {candidate(2, 96, 2, 2e6, 0), candidate(2, 95, 2, 1e6, 5)};
  EXPECT_EQ(decide(100, 8e6, costs).chosen, 2);
  // Dense is not protected by the rule: a codec that pays by 1 % runs.
  EXPECT_EQ(decide_one(100, candidate(2, 95, 2)).chosen, 1);
}

TEST(GatePredict, BarredCandidatesStayOut) {
  CandidateCost c = candidate(1, 1, 1);
  c.barred = true;
  EXPECT_EQ(decide_one(1000, c).chosen, 0);
  EXPECT_EQ(decide_one(1000, c).why, Why::lost_verification);
  EXPECT_EQ(decide_one(1000, c).considered, 1) << "its numbers are still shown";
}

TEST(GatePredict, NearTiesDoNotFlap) {
  // Gain 1.00 ms; cost 0.99 and 1.01 ms in turn for 1000 steps; then truly 0.5 ms, then 2 ms.
  const auto run = [](int* running, double cost_ms) {
    const Decision d = decide_one(10 * kMs, candidate(cost_ms / 2 * kMs, 9 * kMs, cost_ms / 2 * kMs), 8e6, *running);
    const bool switched = d.chosen != *running;
    *running = d.chosen;
    return switched;
  };
  for (const int start : {0, 1}) {
    int running = start, switches = 0;
    for (int step = 0; step < 1000; ++step) switches += run(&running, step % 2 == 0 ? 0.99 : 1.01);
    EXPECT_LE(switches, 2) << "starting from " << start;
    EXPECT_EQ(running, start);
    run(&running, 0.5);
    EXPECT_EQ(running, 1);
    run(&running, 2);
    EXPECT_EQ(running, 0);
  }
  // Fed through running medians, as the gate does: the real changes are seen within one window of 8.
  RunningMedian cost(8, 0);
  int running = 0, switches = 0;
  const auto feed = [&](double ms) { cost.add(ms * kMs), switches += run(&running, cost.median() / kMs); };
  for (int step = 0; step < 1000; ++step) feed(step % 2 == 0 ? 0.99 : 1.01);
  EXPECT_LE(switches, 2);
  for (int step = 0; step < 8; ++step) feed(0.5);
  EXPECT_EQ(running, 1);
  for (int step = 0; step < 8; ++step) feed(2);
  EXPECT_EQ(running, 0);
}

TEST(GatePredict, HysteresisBetweenCandidates) {
  // Totals: faithful 100 + x, lossy 100. The incumbent keeps running over a band, both ways.
  const auto chosen = [](double faithful_total, int incumbent) {
    const CandidateCost costs[] = {candidate(10, faithful_total - 20, 10, 2e6, 2), candidate(10, 80, 10, 1e6, 5)};
    return decide(1000, 8e6, costs, incumbent).chosen;
  };
  EXPECT_EQ(chosen(104, 2), 2);
  EXPECT_EQ(chosen(102, 2), 1);
  EXPECT_EQ(chosen(106, 1), 1);
  EXPECT_EQ(chosen(109, 1), 1);
  EXPECT_EQ(chosen(111, 1), 2);
  EXPECT_EQ(chosen(106, kNoIncumbent), 2);
  // A choice that only the hysteresis explains says so, open and closed.
  const CandidateCost near[] = {candidate(505, 9000, 500)};
  EXPECT_EQ(decide(10000, 8e6, near, 1).chosen, 1);
  EXPECT_EQ(decide(10000, 8e6, near, 1).why, Why::kept);
  const CandidateCost almost[] = {candidate(490, 9000, 500)};
  EXPECT_EQ(decide(10000, 8e6, almost, 0).chosen, 0);
  EXPECT_EQ(decide(10000, 8e6, almost, 0).why, Why::kept);
}

// Adding encode time, or removing wire savings, never opens a gate.
TEST(GatePredict, MonotoneInEveryCost) {
  for (const int incumbent : {kNoIncumbent, 0, 1}) {
    bool open = true;
    for (double encode = 0; encode < 8; encode += 0.25) {
      const bool now = decide_one(10, candidate(encode, 5, 1), 8e6, incumbent).chosen == 1;
      EXPECT_TRUE(open || !now);
      open = now;
    }
    EXPECT_FALSE(open);
  }
}

std::string explain_text(const Decision& d, double verified) {
  const char* names[] = {"dense", "int8", "bf16"};
  const Exchange exchanges[] = {Exchange::all_reduce, Exchange::two_shot, Exchange::two_shot};
  return explain(200, 3, 26214400, d, names, exchanges, verified).text;
}

TEST(GatePredict, ExplainsWithTheNumbersOfTheInequality) {
  const double payload = 26214400 / 3.94;
  Decision d = decide_one(42.4 * kMs, candidate(0.81 * kMs, 12.1 * kMs, 0.62 * kMs, payload), 26214400);
  EXPECT_EQ(
      explain_text(d, 1.9),
      "gradgate: step 200 bucket 3 25.0 MiB: T_enc 0.81 + T_dec 0.62 = 1.43 ms < T(M) 42.4 − T_two_shot(M/3.94) 12.1 = "
      "30.3 ms → int8 (verified 1.9x)");
  EXPECT_EQ(
      explain_text(d, 0),
      "gradgate: step 200 bucket 3 25.0 MiB: T_enc 0.81 + T_dec 0.62 = 1.43 ms < T(M) 42.4 − T_two_shot(M/3.94) 12.1 = "
      "30.3 ms → int8 (predicted 3.1x)");
  EXPECT_NEAR(d.tolerable_inflation(), 42.4 / 13.53 - 1, 1e-9);
  // The numbers are int8's, what runs is bf16: the line says whose they are, and predicts nothing from them.
  d.chosen = 2, d.why = Why::undecided;
  const std::string numbers =
      "gradgate: step 200 bucket 3 25.0 MiB: T_enc 0.81 + T_dec 0.62 = 1.43 ms < T(M) 42.4 − T_two_shot(M/3.94) 12.1 = "
      "30.3 ms → bf16 (int8: the measurement did not decide: what ran before goes on";
  EXPECT_EQ(explain_text(d, 0), numbers + ")");
  EXPECT_EQ(explain_text(d, 1.9), numbers + "; verified 1.9x)");
  d = decide_one(2.1 * kMs, candidate(0.81 * kMs, 0.9 * kMs, 0.62 * kMs, payload), 26214400);
  EXPECT_EQ(
      explain_text(d, 0),
      "gradgate: step 200 bucket 3 25.0 MiB: T_enc 0.81 + T_dec 0.62 = 1.43 ms ≥ T(M) 2.10 − T_two_shot(M/3.94) 0.90 = "
      "1.20 ms → dense (int8: the codec costs as much as it saves, or more)");
  EXPECT_EQ(explain_text(decide(kNaN, 26214400, {}), 0),
            "gradgate: step 200 bucket 3 25.0 MiB: → dense (the dense time is missing, negative or not finite)");
}

TEST(GatePredict, EveryReasonHasANameAndAText) {
  std::set<std::string> names;
  for (int i = 0; i < kWhyCount; ++i) {
    names.insert(why_name(static_cast<Why>(i)));
    EXPECT_GT(std::string(why_text(static_cast<Why>(i))).size(), 8u);
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(kWhyCount));
  EXPECT_STREQ(why_name(static_cast<Why>(200)), "?");
}

TEST(GateVerify, SignTestIsExact) {
  EXPECT_DOUBLE_EQ(sign_test(12, 0), 2.0 / 4096);
  EXPECT_DOUBLE_EQ(sign_test(2, 10), 2.0 * (1 + 12 + 66) / 4096);
  EXPECT_DOUBLE_EQ(sign_test(3, 9), 2.0 * (1 + 12 + 66 + 220) / 4096);
  EXPECT_DOUBLE_EQ(sign_test(5, 5), 1);
  EXPECT_DOUBLE_EQ(sign_test(0, 0), 1);
}

std::vector<double> windows(double plan, double base, double drift_per_step) {
  std::vector<double> steps;
  for (int i = 0; i < 32; ++i) steps.push_back((verify_runs_plan(i, 8) ? plan : base) + drift_per_step * i);
  return steps;
}

TEST(GateVerify, WinLoseUndecided) {
  EXPECT_EQ(paired_test(windows(9, 10, 0), 8, 1, 2, 0.05, 0.005).verdict, Verdict::win);
  EXPECT_EQ(paired_test(windows(11, 10, 0), 8, 1, 2, 0.05, 0.005).verdict, Verdict::lose);
  EXPECT_EQ(paired_test(windows(10, 10, 0), 8, 1, 2, 0.05, 0.005).verdict, Verdict::undecided);
  EXPECT_EQ(paired_test(windows(9.96, 10, 0), 8, 1, 2, 0.05, 0.005).verdict, Verdict::undecided) << "less than 0.5 %";
  // A steady drift of either sign decides nothing: it cancels between the halves.
  EXPECT_EQ(paired_test(windows(10, 10, 0.1), 8, 1, 2, 0.05, 0.005).verdict, Verdict::undecided);
  EXPECT_EQ(paired_test(windows(10, 10, -0.1), 8, 1, 2, 0.05, 0.005).verdict, Verdict::undecided);
}

TEST(GateVerify, FirstStepsAndOutliersDoNotCount) {
  std::vector<double> steps = windows(9, 10, 0);
  for (int window = 0; window < 4; ++window) steps[8 * window] = steps[8 * window + 1] = window % 3 == 0 ? 90 : 1;
  steps[5] = 1000;   // one stalled step of the plan
  steps[12] = kNaN;  // one step without a time
  const PairedTest test = paired_test(steps, 8, 1, 2, 0.05, 0.005);
  EXPECT_EQ(test.verdict, Verdict::win);
  EXPECT_EQ(test.pairs, 11u);
  EXPECT_EQ(test.losses, 1u);
  EXPECT_EQ(test.plan_s, 9);
  EXPECT_EQ(test.base_s, 10);
  EXPECT_EQ(test.median_gain_s, 1);
  EXPECT_EQ(paired_test(std::vector<double>(32, kNaN), 8, 1, 2, 0.05, 0.005).verdict, Verdict::undecided);
}

}  // namespace
}  // namespace gradgate::gate
