// Rank 0's part of an agreement: from the old state and all ranks' reports to the next state.
#include <algorithm>
#include <cmath>
#include <vector>

#include "gate/plan_state.h"
#include "gate/pricing.h"
#include "gate/report.h"

namespace gradgate::gate {
namespace {

constexpr double kNan = kMissing;
/// Of the plans with one candidate for all buckets the fastest two are compared with what runs; not those that are
/// predicted to be slower than the fastest plan by more than this share.
constexpr size_t kUniformPlans = 2;
constexpr double kUniformReach = 0.25;

class Planner {
 public:
  Planner(const GateShape& shape, const PlanState& state, const LinkModel& link, uint64_t step, Agreed agreed,
          PlanState* next)
      : shape_(shape),
        config_(shape.config),
        state_(state),
        link_(link),
        step_(step),
        agreed_(std::move(agreed)),
        next_(*next) {}

  void run() {
    begin();
    const bool demoted = guard();
    if (state_.phase == Phase::fixed) {
      on_fixed();
    } else if (agreed_.failed > 0) {
      on_failure();
    } else if (demoted) {
      on_demoted();
    } else {
      switch (state_.phase) {
        case Phase::startup:
        case Phase::measure:
          on_measured();
          break;
        case Phase::verify:
          on_verified();
          break;
        case Phase::hold:
          on_hold();
          break;
        case Phase::observe:
          on_observe();
          break;
        case Phase::fixed:  // above
          break;
      }
    }
    finish();
  }

 private:
  void begin() {
    next_ = state_;
    ++next_.epoch;
    next_.applies_at = next_.last_agreement = step_;
    next_.events = 0;
    next_.window_saved_s = next_.check_cost_s = 0;
    next_.window_steps = static_cast<uint32_t>(step_ - state_.last_agreement);
    next_.verdict = Verdict::undecided;
    next_.pairs = next_.wins = next_.losses = 0;
    next_.p = 1;
    next_.median_gain_s = next_.test_plan_s = next_.test_base_s = next_.drift_from_s = kNan;
    next_.deferred_drift_check = false;
    next_.failed_calls = static_cast<uint32_t>(std::fmin(agreed_.failures, 1e9));
    next_.shut_by = 0;
    for (BucketState& b : next_.buckets) b.flush = b.closed_now = b.guarded_now = false, b.closed_candidate = 0;

    std::vector<double> steps = agreed_.steps;
    next_.step_s = median_in_place(steps);
    next_.shadow_s = agreed_.shadow_s;
    if (state_.bring_up) {
      next_.startup_shadow_s += agreed_.shadow_s;
    } else {
      const double step_s = std::isnan(next_.step_s) ? 0 : next_.step_s;
      next_.tokens_s += config_.token_fraction * step_s * next_.window_steps - agreed_.shadow_s;
      // What a longest hold earns can be kept, and in any case what the next check costs: else it would never come.
      const double longest = config_.token_fraction * step_s * config_.hold_max;
      next_.tokens_s = std::fmin(next_.tokens_s, std::fmax(longest, recheck_cost() + next_.measure_cost_s));
    }
    if (!agreed_.dense_transfer.empty()) {
      next_.measure_cost_s = pricing().measure_cost();
      for (size_t i = 0; i < next_.buckets.size(); ++i) {
        const BucketState& old = state_.buckets[i];
        if (old.plan == old.running && !std::isnan(agreed_.plan_transfer[i])) {
          next_.buckets[i].running_transfer_s = agreed_.plan_transfer[i];
        }
      }
    }
  }

  // Sets which buckets flush: those that leave compression for good, or until the next plan.
  void finish() {
    const bool goes_on = next_.phase == Phase::verify && next_.rounds > 1;
    for (size_t i = 0; i < next_.buckets.size(); ++i) {
      const BucketState& old = state_.buckets[i];
      BucketState& b = next_.buckets[i];
      const bool residual = old.running != 0 || (state_.phase == Phase::verify && old.plan != 0);
      b.flush = residual && b.running == 0 && !goes_on;
      if (next_.phase != Phase::verify) {
        b.plan = b.running;
        if (next_.phase != Phase::observe && b.decision.chosen != b.running) {
          b.decision.chosen = b.running;
          if (b.decision.why <= Why::most_faithful || b.decision.why == Why::uniform) b.decision.why = Why::undecided;
        }
      }
    }
  }

  void close_failed() {
    const auto code = static_cast<uint64_t>(agreed_.failed);
    const size_t bucket = code / 16;
    const auto candidate = static_cast<uint8_t>(code % 16);
    next_.events |= kEventFailure;
    if (bucket < next_.buckets.size() && candidate >= 1 && candidate <= shape_.candidate_count()) {
      close(bucket, candidate, Why::codec_failed);
    }
  }

  void on_failure() {
    for (BucketState& b : next_.buckets) b.plan = b.running;
    close_failed();
    next_.hold_steps = config_.hold_first;
    enter_hold();
  }

  // What the last window's exchanges lost. A codec over its budget is closed together with all that are no more
  // faithful.
  bool guard() {
    bool demoted = false;
    for (size_t i = 0; i < next_.buckets.size(); ++i) {
      const BucketState& old = state_.buckets[i];
      const GuardNumbers& numbers = agreed_.guards[i];
      const uint8_t c = state_.phase == Phase::verify ? old.plan : old.running;
      if (!numbers.known || c == 0) continue;
      BucketState& b = next_.buckets[i];
      next_.events |= kEventGuard;
      b.guarded_now = true, b.guard_candidate = c;
      b.guard_stage1 = numbers.stage1, b.guard_stage2 = numbers.stage2, b.guard_residual = numbers.residual;
      b.guard_non_finite = numbers.non_finite_out;
      const CandidateInfo& info = shape_.candidates[c - 1u];
      const double ratio = shape_.buckets[i].dense_bytes / shape_.buckets[i].payload_bytes[c - 1u];
      const Why why = judge(numbers, {config_.error_budget, config_.residual_budget, ratio, info.feedback});
      if (why == Why::starting) continue;
      for (size_t k = 1; k <= shape_.candidate_count(); ++k) {
        if (shape_.candidates[k - 1].fidelity >= info.fidelity) b.barred |= 1u << (k - 1);
      }
      close(i, c, why);
      if (b.running != 0 && (b.barred >> (b.running - 1) & 1) != 0) b.running = 0, b.running_transfer_s = kNan;
      ++next_.demotions;
      demoted = true;
    }
    return demoted;
  }

  void on_demoted() {
    for (BucketState& b : next_.buckets) b.plan = b.running;
    next_.hold_steps = config_.hold_first;
    if (!agreed_.dense_transfer.empty()) return predict_then_verify_or_hold(config_.hold_first);
    if (alternatives()) return enter_measure();
    enter_hold();
  }

  // Mode on: a codec that failed or lost too much gives way to the next more faithful of those that are listed.
  void on_fixed() {
    if (agreed_.failed > 0) close_failed();
    for (size_t i = 0; i < next_.buckets.size(); ++i) {
      BucketState& b = next_.buckets[i];
      if (!b.closed_now || b.running != 0) continue;
      for (size_t c = 1; c <= shape_.candidate_count(); ++c) {
        const int fidelity = shape_.candidates[c - 1].fidelity;
        const bool more_faithful = fidelity < shape_.candidates[b.closed_candidate - 1u].fidelity;
        const bool nearest = b.running == 0 || fidelity > shape_.candidates[b.running - 1u].fidelity;
        if (selectable(shape_, next_, i, static_cast<int>(c)) && more_faithful && nearest)
          b.running = static_cast<uint8_t>(c);
      }
      b.decision.chosen = b.running;
      if (b.running != 0) b.decision.considered = b.running, b.decision.why = Why::mode_on;
    }
    next_.next_agreement = open(next_) ? step_ + config_.agree_every : kNever;
  }

  void on_measured() {
    if (state_.phase == Phase::startup) next_.events |= kEventStartup;
    predict_then_verify_or_hold(next_.hold_steps);
  }

  void on_verified() {
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

  void after_challenge(const PairedTest& test) {
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
      for (BucketState& b : next_.buckets) {
        if (b.plan != b.running) b.decision.why = test.verdict == Verdict::undecided ? Why::undecided : Why::kept;
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

  bool takes_over(const PairedTest& test, Trial trial) const noexcept {
    if (trial == Trial::none) return test.verdict == Verdict::win;
    // A plan that loses more has to be faster by more than what a more faithful one may cost.
    if (trial != Trial::refined && loses_more()) {
      return test.verdict == Verdict::win && test.median_gain_s >= kFaithfulTolerance * test.base_s;
    }
    // Else nothing speaks for what runs: it was predicted from times that are known to be wrong, or is no more
    // faithful. Undecided, the one that was faster goes on.
    return test.verdict == Verdict::win || (test.verdict == Verdict::undecided && test.median_gain_s > 0);
  }

  // True where the plan under verification is less faithful in any bucket than what runs.
  bool loses_more() const noexcept {
    const auto fidelity = [&](uint8_t c) { return c == 0 ? 0 : shape_.candidates[c - 1u].fidelity; };
    return std::any_of(state_.buckets.begin(), state_.buckets.end(),
                       [&](const BucketState& b) { return fidelity(b.plan) > fidelity(b.running); });
  }

  // The comparisons between the first win and the first hold, each once and only where the plans differ.
  void compare_next(Trial done) {
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
  bool propose_uniform() {
    const Pricing prices = pricing();
    const std::vector<UniformPlan> plans = prices.uniform_plans();
    double fastest_s = prices.running_sum_s();
    for (const UniformPlan& plan : plans) fastest_s = std::fmin(fastest_s, plan.seen_sum_s);
    for (size_t rank = 0; rank < std::min(kUniformPlans, plans.size()); ++rank) {
      const UniformPlan& plan = plans[rank];
      if (plan.sum_s > (1 + kUniformReach) * fastest_s || (next_.uniform_seen >> (plan.candidate - 1) & 1) != 0)
        continue;
      for (BucketState& b : next_.buckets) b.decision.chosen = b.running;
      for (const size_t i : plan.buckets) {
        if (next_.buckets[i].running == plan.candidate) continue;
        next_.buckets[i].decision = prices.uniform_decision(i, plan.candidate);
      }
      next_.exposed = false;
      next_.exposed_dense_s = next_.exposed_plan_s = kNan;
      return true;
    }
    return false;
  }

  // Notes which uniform plans the comparison that is over has seen, on either side.
  void note_uniform() {
    for (const UniformPlan& plan : pricing().uniform_plans()) {
      const auto all_run = [&](uint8_t BucketState::* side) {
        return std::all_of(plan.buckets.begin(), plan.buckets.end(),
                           [&](size_t i) { return state_.buckets[i].*side == plan.candidate; });
      };
      if (all_run(&BucketState::plan) || all_run(&BucketState::running)) {
        next_.uniform_seen |= 1u << (plan.candidate - 1);
      }
    }
  }

  // Compares what was predicted with what runs; false where they are the same.
  bool challenge_with(Trial trial) {
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

  void after_recheck(const PairedTest& test) {
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

  void on_hold() {
    const double step_s = next_.step_s;
    const bool is_open = open(next_), known = !std::isnan(step_s);
    if (is_open && known && !std::isnan(next_.dense_step_s)) {
      next_.window_saved_s = next_.window_steps * (next_.dense_step_s - step_s);
      next_.saved_s += next_.window_saved_s;
      next_.losing = next_.window_saved_s < 0 ? next_.losing + 1 : 0;
    }
    if (next_.losing >= config_.losing_windows) {
      next_.events |= kEventAccount;
      for (size_t i = 0; i < next_.buckets.size(); ++i) {
        if (next_.buckets[i].running != 0) close(i, next_.buckets[i].running, Why::lost_account);
      }
      next_.losing = 0;
      next_.hold_steps = config_.hold_first;
      return enter_hold();
    }
    if (std::isnan(next_.reference_step_s)) next_.reference_step_s = step_s;
    const bool drifted = known && std::fabs(step_s / next_.reference_step_s - 1) > config_.drift;
    if (drifted || next_.losing > 0) {
      if (on_drift(drifted, is_open)) return;
    } else {
      next_.drift_deferred = false;
    }
    if (step_ >= state_.phase_end) return on_hold_end(is_open);
    next_.next_agreement = std::min(step_ + config_.agree_every, next_.phase_end);
  }

  // A moved step time, or a window that lost time, asks for a check at once; it may overdraw the tokens by one check.
  bool on_drift(bool drifted, bool is_open) {
    const bool can_check = is_open || alternatives();
    next_.drift_from_s = next_.reference_step_s;
    if (can_check && next_.tokens_s < 0) {
      if (!next_.drift_deferred) {
        next_.events |= drifted ? kEventDrift : kEventAccount;
        next_.drift_deferred = next_.deferred_drift_check = true;
      }
      return false;
    }
    if (drifted) next_.events |= kEventDrift;
    if (next_.losing > 0) next_.events |= kEventAccount;
    next_.drift_deferred = false;
    next_.hold_steps = config_.hold_first;
    if (is_open) {
      enter_verify(false);
    } else if (can_check) {
      enter_measure();
    } else {
      next_.reference_step_s = next_.step_s;
      return false;
    }
    return true;
  }

  void on_hold_end(bool is_open) {
    next_.hold_steps = std::min(2 * state_.hold_steps, config_.hold_max);
    if (is_open) {
      const double cost = recheck_cost();
      if (next_.tokens_s >= cost) return enter_verify(false);
      next_.check_cost_s = cost;
      next_.events |= kEventDefer;
    } else if (alternatives()) {
      if (next_.tokens_s >= next_.measure_cost_s) return enter_measure();
      next_.check_cost_s = next_.measure_cost_s;
      next_.events |= kEventDefer;
    }
    enter_hold();
  }

  void on_observe() {
    double saved = 0;
    predict(Objective::exposed, Hysteresis::none);
    for (const BucketState& b : next_.buckets) {
      if (b.decision.chosen != 0) saved += b.decision.dense_s - b.decision.total_s();
    }
    if (next_.exposed) saved = next_.exposed_dense_s - next_.exposed_plan_s;
    next_.dense_step_s = next_.step_s;
    next_.plan_step_s = next_.step_s - saved;
    next_.events |= kEventPredict | kEventObserve;
    next_.next_agreement = next_.phase_end = kNever;
  }

  // --- transitions ---

  void predict_then_verify_or_hold(uint32_t hold_steps) {
    predict(Objective::exposed, next_.bring_up ? Hysteresis::none : Hysteresis::for_running);
    const bool changed = challenge_with(Trial::none);
    next_.hold_steps = hold_steps;
    if (!changed) enter_hold();
  }

  void enter_hold() {
    next_.phase = Phase::hold;
    next_.phase_start = step_;
    next_.phase_end = step_ + next_.hold_steps;
    next_.rounds = 0;
    next_.bring_up = false;
    next_.reference_step_s = kNan;
    // Where nothing is left to decide, the ranks need not talk before the hold ends.
    const bool watch = open(next_) || alternatives();
    next_.next_agreement = watch ? std::min(step_ + config_.agree_every, next_.phase_end) : next_.phase_end;
    next_.events |= kEventHold;
  }
  void enter_measure() {
    next_.phase = Phase::measure;
    next_.phase_start = step_;
    next_.phase_end = next_.next_agreement = step_ + shape_.measure_steps();
  }
  void enter_verify(bool challenge) {
    next_.phase = Phase::verify;
    next_.challenge = challenge;
    next_.rounds = 1;
    next_.phase_start = step_;
    next_.phase_end = next_.next_agreement = step_ + 4 * config_.verify_window;
  }

  void close(size_t bucket, uint8_t candidate, Why why) {
    BucketState& b = next_.buckets[bucket];
    b.barred |= 1u << (candidate - 1);
    b.barred_why = why;
    b.closed_now = true;
    b.closed_candidate = candidate;
    b.decision.why = why;
    if (b.running == candidate) b.running = 0, b.running_transfer_s = kNan;
    next_.events |= kEventClose;
    next_.shut_by = static_cast<uint8_t>(why);
  }

  // --- numbers ---

  static bool open(const PlanState& state) noexcept {
    return std::any_of(state.buckets.begin(), state.buckets.end(), [](const BucketState& b) { return b.running != 0; });
  }
  bool alternatives() const noexcept {
    for (size_t b = 0; b < next_.buckets.size(); ++b) {
      for (size_t c = 1; c <= shape_.candidate_count(); ++c) {
        if (selectable(shape_, next_, b, static_cast<int>(c)) && c != next_.buckets[b].running) return true;
      }
    }
    return false;
  }
  // Of one ABBA round against dense: what its dense windows lose.
  double recheck_cost() const noexcept {
    const double gain = next_.dense_step_s - next_.plan_step_s;
    return gain > 0 ? 2.0 * config_.verify_window * gain : 0;
  }
  // Every bucket's decision.
  void predict(Objective objective, Hysteresis hysteresis) {
    const Prediction prediction = pricing().predict(objective, hysteresis);
    for (size_t i = 0; i < next_.buckets.size(); ++i) {
      next_.buckets[i].decision = prediction.decisions[i];
      next_.buckets[i].ready_s = agreed_.ready[i];
    }
    next_.exposed = prediction.exposed;
    next_.exposed_dense_s = prediction.step.dense_s, next_.exposed_plan_s = prediction.step.chosen_s;
  }
  Pricing pricing() const { return {shape_, link_, agreed_, next_}; }

  const GateShape& shape_;
  const GateConfig& config_;
  const PlanState& state_;
  const LinkModel& link_;
  const uint64_t step_;
  const Agreed agreed_;
  PlanState& next_;
};

}  // namespace

Status advance(const GateShape& shape, const PlanState& state, const LinkModel& link, uint64_t step,
               std::span<const double> reports, PlanState* next) {
  const ReportLayout layout = report_layout(shape, state);
  if (reports.size() != shape.config.ranks * layout.size()) return StatusCode::invalid_argument;
  const auto counter = [](double v) { return v >= 0 && v <= static_cast<double>(kNever); };
  for (size_t r = 0; r < reports.size(); r += layout.size()) {
    if (!counter(reports[r + ReportLayout::kFailures]) || !counter(reports[r + ReportLayout::kFailed]) ||
        !counter(reports[r + ReportLayout::kShadow])) {
      return StatusCode::peer_mismatch;
    }
    if (reports[r + ReportLayout::kStep] != static_cast<double>(step) ||
        reports[r + ReportLayout::kHash] != shape.hash ||
        reports[r + ReportLayout::kEpoch] != static_cast<double>(state.epoch)) {
      return StatusCode::peer_mismatch;
    }
  }
  Planner(shape, state, link, step, agree(layout, reports), next).run();
  return {};
}

}  // namespace gradgate::gate
