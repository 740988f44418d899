#include "gate/plan/planner.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace gradgate::gate {

void Planner::run() {
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

void Planner::begin() {
  next_ = state_;
  ++next_.epoch;
  next_.applies_at = next_.last_agreement = step_;
  next_.events = 0;
  next_.window_saved_s = next_.check_cost_s = 0;
  next_.window_steps = static_cast<uint32_t>(step_ - state_.last_agreement);
  next_.verdict = Verdict::undecided;
  next_.pairs = next_.wins = next_.losses = 0;
  next_.p = 1;
  next_.median_gain_s = next_.test_plan_s = next_.test_base_s = next_.drift_from_s = kMissing;
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
void Planner::finish() {
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

void Planner::close_failed() {
  const auto code = static_cast<uint64_t>(agreed_.failed);
  const size_t bucket = code / 16;
  const auto candidate = static_cast<uint8_t>(code % 16);
  next_.events |= kEventFailure;
  if (bucket < next_.buckets.size() && candidate >= 1 && candidate <= shape_.candidate_count()) {
    close(bucket, candidate, Why::codec_failed);
  }
}

void Planner::on_failure() {
  for (BucketState& b : next_.buckets) b.plan = b.running;
  close_failed();
  next_.hold_steps = config_.hold_first;
  enter_hold();
}

// What the last window's exchanges lost. A codec over its budget is closed together with all that are no more
// faithful.
bool Planner::guard() {
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
    if (b.running != 0 && (b.barred >> (b.running - 1) & 1) != 0) b.running = 0, b.running_transfer_s = kMissing;
    ++next_.demotions;
    demoted = true;
  }
  return demoted;
}

void Planner::on_demoted() {
  for (BucketState& b : next_.buckets) b.plan = b.running;
  next_.hold_steps = config_.hold_first;
  if (!agreed_.dense_transfer.empty()) return predict_then_verify_or_hold(config_.hold_first);
  if (alternatives()) return enter_measure();
  enter_hold();
}

// Mode on: a codec that failed or lost too much gives way to the next more faithful of those that are listed.
void Planner::on_fixed() {
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

void Planner::on_measured() {
  if (state_.phase == Phase::startup) next_.events |= kEventStartup;
  predict_then_verify_or_hold(next_.hold_steps);
}

void Planner::on_hold() {
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
bool Planner::on_drift(bool drifted, bool is_open) {
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

void Planner::on_hold_end(bool is_open) {
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

void Planner::on_observe() {
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

void Planner::predict_then_verify_or_hold(uint32_t hold_steps) {
  predict(Objective::exposed, next_.bring_up ? Hysteresis::none : Hysteresis::for_running);
  const bool changed = challenge_with(Trial::none);
  next_.hold_steps = hold_steps;
  if (!changed) enter_hold();
}

void Planner::enter_hold() {
  next_.phase = Phase::hold;
  next_.phase_start = step_;
  next_.phase_end = step_ + next_.hold_steps;
  next_.rounds = 0;
  next_.bring_up = false;
  next_.reference_step_s = kMissing;
  // Where nothing is left to decide, the ranks need not talk before the hold ends.
  const bool watch = open(next_) || alternatives();
  next_.next_agreement = watch ? std::min(step_ + config_.agree_every, next_.phase_end) : next_.phase_end;
  next_.events |= kEventHold;
}

void Planner::enter_measure() {
  next_.phase = Phase::measure;
  next_.phase_start = step_;
  next_.phase_end = next_.next_agreement = step_ + shape_.measure_steps();
}

void Planner::enter_verify(bool challenge) {
  next_.phase = Phase::verify;
  next_.challenge = challenge;
  next_.rounds = 1;
  next_.phase_start = step_;
  next_.phase_end = next_.next_agreement = step_ + 4 * config_.verify_window;
}

void Planner::close(size_t bucket, uint8_t candidate, Why why) {
  BucketState& b = next_.buckets[bucket];
  b.barred |= 1u << (candidate - 1);
  b.barred_why = why;
  b.closed_now = true;
  b.closed_candidate = candidate;
  b.decision.why = why;
  if (b.running == candidate) b.running = 0, b.running_transfer_s = kMissing;
  next_.events |= kEventClose;
  next_.shut_by = static_cast<uint8_t>(why);
}

bool Planner::open(const PlanState& state) noexcept {
  return std::any_of(state.buckets.begin(), state.buckets.end(), [](const BucketState& b) { return b.running != 0; });
}

bool Planner::alternatives() const noexcept {
  for (size_t b = 0; b < next_.buckets.size(); ++b) {
    for (size_t c = 1; c <= shape_.candidate_count(); ++c) {
      if (selectable(shape_, next_, b, static_cast<int>(c)) && c != next_.buckets[b].running) return true;
    }
  }
  return false;
}

// Of one ABBA round against dense: what its dense windows lose.
double Planner::recheck_cost() const noexcept {
  const double gain = next_.dense_step_s - next_.plan_step_s;
  return gain > 0 ? 2.0 * config_.verify_window * gain : 0;
}

// Every bucket's decision.
void Planner::predict(Objective objective, Hysteresis hysteresis) {
  const Prediction prediction = pricing().predict(objective, hysteresis);
  for (size_t i = 0; i < next_.buckets.size(); ++i) {
    next_.buckets[i].decision = prediction.decisions[i];
    next_.buckets[i].ready_s = agreed_.ready[i];
  }
  next_.exposed = prediction.exposed;
  next_.exposed_dense_s = prediction.step.dense_s, next_.exposed_plan_s = prediction.step.chosen_s;
}

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
