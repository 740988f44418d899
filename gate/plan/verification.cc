// The planner's part after a verification: who goes on, and what is compared next.
#include <algorithm>
#include <cmath>
#include <vector>

#include "gate/plan/planner.h"

namespace gradgate::gate {
namespace {

/// Of the plans with one candidate for all buckets the fastest two are compared with what runs; not those that are
/// predicted to be slower than the fastest plan by more than this share.
constexpr size_t kUniformPlans = 2;
constexpr double kUniformReach = 0.25;
/// Of the step: how much faster a less faithful plan has to be measured. Half of what a more faithful one may cost,
/// since the median of a few pairs is wrong by a few percent itself, and what runs is to be within all of it.
constexpr double kMeasuredTolerance = kFaithfulTolerance / 2;

}  // namespace

void Planner::on_verified() {
  const uint32_t window = config_.verify_window;
  const PairedTest test =
      paired_test(agreed_.steps, window, state_.rounds, config_.discard, config_.significance, config_.min_gain);
  if (test.verdict == Verdict::undecided && state_.rounds < config_.verify_rounds) {
    ++next_.rounds;
    next_.phase_end = next_.next_agreement = step_ + 4 * window;
    return;
  }
  next_.events |= kEventVerify;
  next_.verdict = test.verdict;
  next_.pairs = test.pairs, next_.wins = test.wins, next_.losses = test.losses;
  next_.p = test.p, next_.median_gain_s = test.median_gain_s;
  next_.test_plan_s = test.plan_s, next_.test_base_s = test.base_s;
  next_.test_challenge = state_.challenge;
  const bool base_dense = !state_.challenge || !open(state_);
  const double half = 2.0 * window * state_.rounds, gain = test.pairs > 0 ? test.base_s - test.plan_s : 0;
  if (base_dense) next_.saved_s += half * gain;
  // What the comparison cost against simply running what ran before.
  const double cost = half * std::fmax(state_.challenge ? -gain : gain, 0);
  next_.check_cost_s = cost;
  if (!state_.bring_up) next_.tokens_s -= cost;
  if (base_dense && test.pairs > 0) next_.dense_step_s = test.base_s;
  if (state_.challenge) {
    after_challenge(test);
  } else {
    after_recheck(test);
  }
}

void Planner::after_challenge(const PairedTest& test) {
  next_.hold_steps = config_.hold_first;
  const Trial trial = state_.trial;
  next_.trial = Trial::none;
  if (takes_over(test, trial)) {
    for (size_t i = 0; i < next_.buckets.size(); ++i) {
      BucketState& b = next_.buckets[i];
      if (b.plan != b.running) b.running_transfer_s = agreed_.plan_transfer[i];
      b.running = b.plan;
    }
    next_.losing = 0;
    next_.plan_step_s = test.plan_s;
    if (!open(next_)) next_.dense_step_s = test.plan_s;
    return trial == Trial::none && !state_.bring_up ? enter_hold() : compare_next(trial);
  }
  if (test.verdict == Verdict::undecided || trial != Trial::none) {
    const Pricing prices = pricing();
    for (size_t i = 0; i < next_.buckets.size(); ++i) {
      BucketState& b = next_.buckets[i];
      if (b.plan == b.running) continue;
      b.decision.why = test.verdict == Verdict::undecided ? Why::undecided : Why::kept;
      // What goes on is explained by its own numbers.
      if (b.running != 0) b.decision = prices.running_decision(i, b.decision.why);
    }
    return trial == Trial::none ? enter_hold() : compare_next(trial);
  }
  for (size_t i = 0; i < next_.buckets.size(); ++i) {
    BucketState& b = next_.buckets[i];
    if (b.plan != b.running && b.plan != 0) close(i, b.plan, Why::lost_verification);
    b.plan = b.running;
  }
  predict_then_verify_or_hold(config_.hold_first);
}

bool Planner::takes_over(const PairedTest& test, Trial trial) const noexcept {
  if (trial == Trial::none) return test.verdict == Verdict::win;
  // Between two plans that compress nothing speaks for the one that runs but its fidelity: both were predicted from
  // times that are known to be wrong. Where the pairs do not decide, the better median goes on. A plan that loses more
  // has to be faster by kMeasuredTolerance; a refined one corrects the plan that runs.
  const bool needs_margin = trial != Trial::refined && loses_more();
  return test.verdict != Verdict::lose && test.median_gain_s > (needs_margin ? kMeasuredTolerance * test.base_s : 0);
}

// True where the plan under verification is less faithful in any bucket than what runs.
bool Planner::loses_more() const noexcept {
  const auto fidelity = [&](uint8_t c) { return c == 0 ? 0 : shape_.candidates[c - 1u].fidelity; };
  return std::any_of(state_.buckets.begin(), state_.buckets.end(),
                     [&](const BucketState& b) { return fidelity(b.plan) > fidelity(b.running); });
}

// The comparisons between the first win and the first hold, each once and only where the plans differ.
void Planner::compare_next(Trial done) {
  next_.bring_up = false;
  note_uniform();
  switch (done) {
    case Trial::none:
      if (!state_.exposed) break;
      // What the first prediction knew of the backward pass it had seen beside dense transfers. Where both use the
      // same cores, a pass beside compressed ones is over sooner, and less is hidden behind it: the plan is predicted
      // again with the times of its own steps.
      predict(Objective::exposed, Hysteresis::for_running);
      if (challenge_with(Trial::refined)) return;
      [[fallthrough]];
    case Trial::refined:
      // Hidden transfers cost nothing in the prediction. Where they take cores or memory from the backward pass they
      // do, and no sample shows it: the plan for the sum of all costs.
      predict(Objective::sum, Hysteresis::none);
      if (challenge_with(Trial::serial)) return;
      break;
    case Trial::serial:
    case Trial::uniform:
      break;
  }
  if (propose_uniform() && challenge_with(Trial::uniform)) return;
  enter_hold();
}

// Predictions of single buckets can be wrong by more than what separates the candidates, all in one direction. So
// what came of them is measured against one candidate for all buckets, which a user could have chosen by hand.
bool Planner::propose_uniform() {
  const Pricing prices = pricing();
  const std::vector<UniformPlan> plans = prices.uniform_plans();
  double fastest_s = prices.running_sum_s();
  for (const UniformPlan& plan : plans) fastest_s = std::fmin(fastest_s, plan.seen_sum_s);
  for (size_t rank = 0; rank < std::min(kUniformPlans, plans.size()); ++rank) {
    const UniformPlan& plan = plans[rank];
    if (plan.sum_s > (1 + kUniformReach) * fastest_s || (next_.uniform_seen >> (plan.candidate - 1) & 1) != 0) continue;
    for (BucketState& b : next_.buckets) b.decision.chosen = b.running;
    for (const size_t i : plan.buckets) {
      if (next_.buckets[i].running == plan.candidate) continue;
      next_.buckets[i].decision = prices.uniform_decision(i, plan.candidate);
    }
    next_.exposed = false;
    next_.exposed_dense_s = next_.exposed_plan_s = kMissing;
    return true;
  }
  return false;
}

// Notes which uniform plans the comparison that is over has seen, on either side.
void Planner::note_uniform() {
  for (const UniformPlan& plan : pricing().uniform_plans()) {
    const auto all_run = [&](uint8_t BucketState::*side) {
      return std::all_of(plan.buckets.begin(), plan.buckets.end(),
                         [&](size_t i) { return state_.buckets[i].*side == plan.candidate; });
    };
    if (all_run(&BucketState::plan) || all_run(&BucketState::running)) {
      next_.uniform_seen |= 1u << (plan.candidate - 1);
    }
  }
}

// Compares what was predicted with what runs; false where they are the same.
bool Planner::challenge_with(Trial trial) {
  next_.events |= kEventPredict;
  next_.hold_steps = config_.hold_first;
  bool changed = false;
  for (BucketState& b : next_.buckets) {
    b.plan = static_cast<uint8_t>(b.decision.chosen);
    changed = changed || b.plan != b.running;
  }
  if (!changed) return false;
  next_.trial = trial;
  enter_verify(true);
  return true;
}

void Planner::after_recheck(const PairedTest& test) {
  if (test.pairs > 0) next_.plan_step_s = test.plan_s;
  if (test.verdict == Verdict::lose) {
    for (size_t i = 0; i < next_.buckets.size(); ++i) {
      if (next_.buckets[i].running != 0) close(i, next_.buckets[i].running, Why::lost_verification);
    }
    return predict_then_verify_or_hold(config_.hold_first);
  }
  if (test.verdict == Verdict::undecided) {
    for (BucketState& b : next_.buckets) {
      if (b.running != 0) b.decision.why = Why::undecided;
    }
    return enter_hold();
  }
  next_.losing = 0;
  if (alternatives() && next_.tokens_s >= next_.measure_cost_s) return enter_measure();
  enter_hold();
}

}  // namespace gradgate::gate
