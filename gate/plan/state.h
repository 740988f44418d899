// What all ranks agree on: the replicated part of the gate. A message of rank 0 carries the whole next state, so after
// apply() every rank holds the same one, whatever it measured. The planner (planner.h) computes it from the old state
// and the reports.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gate/gate.h"
#include "gate/plan/verify.h"
#include "gate/predict.h"

namespace gradgate::gate {

enum class Phase : uint8_t {
  startup = 0,  ///< dense, candidates in shadow
  measure = 1,  ///< the plan runs, candidates in shadow again (after a hold or a drift)
  verify = 2,   ///< ABBA windows of plan and base
  hold = 3,     ///< the plan runs; step times only
  observe = 4,  ///< dense; waits for the verdict, or has given it
  fixed = 5,    ///< nothing to decide
};
const char* phase_text(Phase phase) noexcept;

/// Things that an agreement decided, written to the log by every rank in this order.
enum Event : uint32_t {
  kEventStartup = 1u << 0,
  kEventFailure = 1u << 1,
  kEventVerify = 1u << 2,
  kEventAccount = 1u << 3,
  kEventDrift = 1u << 4,
  kEventClose = 1u << 5,
  kEventDefer = 1u << 6,
  kEventPredict = 1u << 7,
  kEventObserve = 1u << 8,
  kEventHold = 1u << 9,
  kEventGuard = 1u << 10,
};

inline constexpr uint64_t kNever = 1ull << 52;  ///< a step that does not come; exact as a double

struct BucketState {
  uint8_t running = 0;      ///< settled candidate; 0: dense
  uint8_t plan = 0;         ///< candidate of the plan under verification; else equal to running
  bool flush = false;       ///< sends gradient + residual in the step at which the message applies
  bool closed_now = false;  ///< closed by this agreement (for the log)
  uint8_t closed_candidate = 0;
  uint32_t barred = 0;  ///< bit c − 1: candidate c is closed for good
  Why barred_why = Why::starting;
  double running_transfer_s = kMissing;  ///< last agreed transfer time of `running`
  Decision decision;
  double ready_s = kMissing;  ///< since the step's first bucket, at the last prediction
  bool guarded_now = false;   ///< this agreement has a reading of guard_candidate (for the log)
  uint8_t guard_candidate = 0;
  double guard_stage1 = kMissing, guard_stage2 = kMissing, guard_residual = kMissing;  ///< the last reading
  double guard_non_finite = 0;                                                         ///< elements of the result
};

/// Challenges between two plans that compress, in this order, after the first win and before the first hold: they close
/// nothing for good.
enum class Trial : uint8_t {
  none = 0,
  refined = 1,  ///< of the first plan, predicted again from its own steps
  serial = 2,   ///< of the plan for the sum of all costs, where nothing counts as hidden
  uniform = 3   ///< of one candidate for all buckets, what a user would choose by hand
};

struct PlanState {
  uint64_t epoch = 0;       ///< agreements so far
  uint64_t applies_at = 0;  ///< step at which this state began
  Phase phase = Phase::fixed;
  uint64_t phase_start = 0, last_agreement = 0, next_agreement = kNever, phase_end = kNever;
  uint32_t hold_steps = 0;  ///< length of the current or the next hold
  uint32_t rounds = 0;      ///< ABBA rounds in this verification
  bool challenge = false;   ///< verification of a new plan against `running`; else of `running` against dense
  Trial trial = Trial::none;
  uint32_t uniform_seen = 0;  ///< bit c − 1: candidate c for all buckets has been in a comparison, on either side
  bool bring_up = true;       ///< before the first hold: its cost is start-up cost, not charged to the tokens
  bool drift_deferred = false;
  uint32_t losing = 0;  ///< agreement windows of negative saving in a row
  double tokens_s = 0, saved_s = 0, startup_shadow_s = 0;
  double dense_step_s = kMissing, plan_step_s = kMissing;  ///< verified medians
  double reference_step_s = kMissing;                      ///< what a drift is measured against
  double measure_cost_s = 0;                               ///< what a measuring phase would cost
  // The agreement that produced this state, for the log.
  uint32_t events = 0;
  double step_s = kMissing, window_saved_s = 0, shadow_s = 0, check_cost_s = 0;
  uint32_t window_steps = 0;
  Verdict verdict = Verdict::undecided;
  uint32_t pairs = 0, wins = 0, losses = 0;
  double p = 1, median_gain_s = kMissing, test_plan_s = kMissing, test_base_s = kMissing;
  double drift_from_s = kMissing;
  bool test_challenge = false, deferred_drift_check = false;
  uint32_t failed_calls = 0;
  uint8_t shut_by = 0;   ///< Why of the closing in this agreement
  bool exposed = false;  ///< the last prediction was of exposed time
  double exposed_dense_s = kMissing, exposed_plan_s = kMissing;
  uint32_t demotions = 0;  ///< buckets that the guard closed

  std::vector<BucketState> buckets;
};

/// Everything fixed about one gate; the state is what changes.
struct GateShape {
  GateConfig config;
  std::vector<CandidateInfo> candidates;  ///< index c − 1
  std::vector<BucketInfo> buckets;
  double hash = 0;  ///< of all the above; exact as a double
  size_t message_size = 0;

  size_t candidate_count() const noexcept { return candidates.size(); }
  bool offered(size_t bucket, int candidate) const noexcept {
    return buckets[bucket].payload_bytes[candidate - 1] > 0 && buckets[bucket].dense_bytes >= config.min_bytes;
  }
  /// Steps of a measuring phase, and shadow calls per candidate in it.
  uint32_t measure_steps() const noexcept;
  uint32_t shadow_calls() const noexcept;
  /// Step times that a rank keeps.
  size_t step_capacity() const noexcept;
};
/// False where the candidate is not offered, or closed for good.
inline bool selectable(const GateShape& shape, const PlanState& state, size_t bucket, int candidate) noexcept {
  return shape.offered(bucket, candidate) && (state.buckets[bucket].barred >> (candidate - 1) & 1) == 0;
}
double hash_shape(const GateShape& shape) noexcept;
/// False: a value outside its range.
bool valid_config(const GateConfig& config) noexcept;
bool valid_inputs(std::span<const CandidateInfo> candidates, std::span<const BucketInfo> buckets) noexcept;

/// The state before the first step.
PlanState initial_state(const GateShape& shape);

/// The candidate that a bucket runs at `step`, and whether a bucket that then runs dense keeps a residual (probe).
struct Assignment {
  uint8_t candidate = 0;
  bool probe = false;
};
Assignment assignment(const GateShape& shape, const PlanState& state, size_t bucket, uint64_t step) noexcept;
/// The candidate to call in shadow at `step`; −1: none.
int shadow_candidate(const GateShape& shape, const PlanState& state, size_t bucket, uint64_t step) noexcept;
/// False for steps whose transfer times do not count: first steps of a phase or of a verification window.
bool transfer_counts(const GateShape& shape, const PlanState& state, uint64_t step) noexcept;
/// True for the one step of an agreement window in which the guard looks: the last one, in a verification the first of
/// the last window that runs the plan, which is not timed.
bool guard_step(const GateShape& shape, const PlanState& state, uint64_t step) noexcept;

/// Doubles of a message, its writing, and its reading (bad_payload: not a message, or values out of range).
size_t message_doubles(size_t buckets);
void write_message(const GateShape& shape, const PlanState& state, std::span<double> out) noexcept;
void write_error_message(const GateShape& shape, Status error, std::span<double> out) noexcept;
/// `*error` receives the status that rank 0 put into the message; `*state` is written only when both are ok.
Status read_message(const GateShape& shape, std::span<const double> in, PlanState* state, Status* error);

/// Writes the log lines of the agreement that produced `state`.
void log_events(const GateShape& shape, const PlanState& state, const LogSink& sink) noexcept;
/// Writes the "start" line.
void log_start(const GateShape& shape, const PlanState& state, uint64_t step, const LogSink& sink) noexcept;

}  // namespace gradgate::gate
