// Rank 0's part of an agreement: from the old state and all ranks' reports to the next state.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "gate/plan/pricing.h"
#include "gate/plan/report.h"
#include "gate/plan/state.h"

namespace gradgate::gate {

/// Rank 0: the next state from all ranks' reports (ranks × layout.size()). peer_mismatch when they contradict each
/// other.
Status advance(const GateShape& shape, const PlanState& state, const LinkModel& link, uint64_t step,
               std::span<const double> reports, PlanState* next);

/// One agreement. Reads the old state, writes the next one.
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

  void run();

 private:
  void begin();
  void finish();

  // What each phase makes of its numbers, and what may come in between.
  bool guard();
  void on_demoted();
  void on_failure();
  void on_fixed();
  void on_measured();
  void on_verified();
  void on_hold();
  void on_observe();

  bool on_drift(bool drifted, bool is_open);
  void on_hold_end(bool is_open);

  // After a verification (verification.cc).
  void after_challenge(const PairedTest& test);
  void after_recheck(const PairedTest& test);
  bool takes_over(const PairedTest& test, Trial trial) const noexcept;
  bool loses_more() const noexcept;
  void compare_next(Trial done);
  void note_uniform();
  bool propose_uniform();
  bool challenge_with(Trial trial);

  // Into the next phase.
  void predict_then_verify_or_hold(uint32_t hold_steps);
  void enter_hold();
  void enter_measure();
  void enter_verify(bool challenge);
  void close_failed();
  void close(size_t bucket, uint8_t candidate, Why why);

  static bool open(const PlanState& state) noexcept;
  bool alternatives() const noexcept;
  double recheck_cost() const noexcept;
  Pricing pricing() const { return {shape_, link_, agreed_, next_}; }
  void predict(Objective objective, Hysteresis hysteresis);

  const GateShape& shape_;
  const GateConfig& config_;
  const PlanState& state_;
  const LinkModel& link_;
  const uint64_t step_;
  const Agreed agreed_;
  PlanState& next_;
};

}  // namespace gradgate::gate
