// The gate: which buckets are compressed, with what, from measured times. A pure state machine: it receives numbers and
// returns plans; it has no clock, no codec, no communicator and no thread. plan(), record() and end_step() are O(1) and
// allocate nothing. Every rank holds one Gate built from equal configuration. What a rank does next depends only on
// step numbers and on the messages of rank 0, never on its own clock, so that all ranks always run the same
// collectives.
//
// One training step, on every rank:
//
//   for each bucket:  StepPlan p = gate.plan(bucket);  … run the exchange p asks for, and the shadow call if any …
//                     gate.record(bucket, sample);            // one per exchange, one more per shadow call
//   gate.end_step(seconds);                                    // last-bucket completion to last-bucket completion
//   if (gate.agreement_due()) {
//     gate.write_report(mine);                  all ranks: gather the reports (rank order) on rank 0
//     if (rank == 0) gate.decide(all, message); then broadcast the message
//     gate.apply(message);                      // before the first plan() of the next step
//   }
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "gate/cost.h"
#include "gate/guard.h"
#include "gate/log.h"
#include "gate/predict.h"
#include "gradgate/mode.h"
#include "gradgate/status.h"
#include "gradgate/types.h"

namespace gradgate::gate {

inline constexpr int kMaxCandidates = 8;  ///< codec candidates, dense not counted
inline constexpr int kMaxWindow = 16;     ///< samples of a running median

/// All of it must be equal on all ranks. The defaults are the documented behaviour (docs/gate.md).
struct GateConfig {
  Mode mode = Mode::automatic;
  uint32_t ranks = 1;
  double min_bytes = 0;         ///< buckets of fewer gradient bytes stay dense
  uint32_t shadow_samples = 3;  ///< counted shadow calls per bucket and candidate in one measuring phase
  uint32_t startup_max = 20;    ///< steps of a measuring phase, at most
  uint32_t startup_min = 10;    ///< and at least (dense transfers want samples too)
  uint32_t discard = 2;         ///< first calls of a series, and first steps of a verification window, not counted
  uint32_t window = 8;          ///< samples of a running median, 1 … kMaxWindow
  uint32_t verify_window = 8;   ///< steps of one ABBA window; at least discard + 1
  uint32_t verify_rounds = 2;   ///< ABBA rounds before a measurement is called undecided
  double significance = 0.05;   ///< two-sided sign test
  double min_gain = 0.005;      ///< share of the step that a verified gain or loss must reach
  uint32_t agree_every = 32;    ///< steps between agreements in hold
  uint32_t hold_first = 64;     ///< first hold; doubles every time
  uint32_t hold_max = 8192;
  double drift = 0.25;            ///< a median step time off by more is a drift
  double token_fraction = 0.005;  ///< share of step time that measuring after start-up may cost
  uint32_t losing_windows = 3;    ///< agreement windows of negative saving in a row that shut the gate
  uint32_t observe_after = 100;   ///< steps before the verdict of Mode::observe
  double error_budget = 0.1;      ///< largest relative L2 error of a stage, for codecs without feedback
  double residual_budget = 2;     ///< largest ‖e‖ / ‖g‖ as a multiple of M / P, for codecs with feedback
};

/// One codec and the exchange that carries it. Candidates are numbered from 1 in the order given; 0 is dense.
struct CandidateInfo {
  char name[48] = {};  ///< as the user wrote it, e.g. "int8"; appears in the log and in explanations
  Exchange exchange = Exchange::two_shot;
  int fidelity = 0;                       ///< 0 is exact; a larger number loses more
  bool feedback = false;                  ///< what is lost is kept for later steps
  bool unpriced = false;                  ///< a black box: not predicted, only verified against what runs
  Exchange between = Exchange::two_shot;  ///< of hierarchical: the exchange between the nodes
};

struct BucketInfo {
  double dense_bytes = 0;  ///< bytes of the gradient, not elements
  /// Bytes of one rank's payload for the whole bucket per candidate (index c − 1); 0: not offered for this bucket.
  double payload_bytes[kMaxCandidates] = {};
};

enum class Action : uint8_t {
  dense = 0,     ///< the plain exchange; there is no residual
  probe = 1,     ///< dense with the plain gradient; the residual stays as it is
  flush = 2,     ///< dense sending gradient + residual, once, because the bucket closes
  compress = 3,  ///< the candidate's exchange
};
const char* action_name(Action action) noexcept;

struct StepPlan {
  Action action = Action::dense;
  uint8_t candidate = 0;  ///< of Action::compress; else 0
  int8_t shadow = -1;     ///< candidate whose codec work is done once on this gradient, changing nothing; −1: none
  bool guard = false;     ///< of Action::compress: record_guard() wants to know what this exchange loses
};

/// One measurement of one bucket. Seconds from a steady clock.
struct Sample {
  uint8_t candidate = 0;  ///< 0 for dense, probe and flush
  /// All encoding, all collectives, all decoding (decode-sum included) of this rank in one exchange. A shadow call: the
  /// same codec work without the collectives. Dense: transfer_s.
  double encode_s = 0, transfer_s = 0, decode_s = 0;
  bool transfer_seen = true;  ///< false: its end was not seen, so transfer_s is not used
  bool shadow = false;
  bool ok = true;  ///< false: the call failed; its times are not used, and a failed exchange closes the candidate
};

/// What the gate has done so far; all values agreed between ranks but the counters marked local.
struct GateTotals {
  uint64_t steps = 0;             ///< steps seen
  uint64_t compressed_steps = 0;  ///< local: steps with at least one compressed bucket
  double shadow_s = 0;            ///< local: seconds spent in shadow calls, start-up included
  double startup_shadow_s = 0;    ///< of these, before the first hold; MAX over ranks
  uint64_t rejected_samples = 0;  ///< local: failed, zero, negative or non-finite
  double saved_s = 0;             ///< cumulative saving against dense in holds and verifications
  double dense_step_s = kMissing, plan_step_s = kMissing;  ///< verified medians of the step
  double tokens_s = 0;                             ///< measuring time left; may be negative by one overdrawn check
  uint64_t demotions = 0;                          ///< buckets that the guard closed
  double largest_error = 0, largest_residual = 0;  ///< of the buckets' last readings: relative error, ‖e‖ / ‖g‖
};

class Gate {
 public:
  Gate() noexcept;  ///< dense for ever, no buckets; create() makes a useful one
  ~Gate();
  Gate(Gate&&) noexcept;
  Gate& operator=(Gate&&) noexcept;

  /// Allocates everything the gate will need. invalid_argument: no ranks, more than kMaxCandidates candidates, a
  /// negative or non-finite size, or a configuration value outside its range; out_of_memory. No candidates, or one
  /// rank: dense.
  static Status create(const GateConfig& config, std::span<const CandidateInfo> candidates,
                       std::span<const BucketInfo> buckets, Gate* out) noexcept;

  /// Times of the collectives, from a profile or from probing (gate/fit.h). Used on rank 0 only; without one (or with
  /// an unusable one) the gate stays dense and says no_link_model. May be called again at any time.
  void set_link(const LinkModel& link) noexcept;
  /// Log lines are equal on all ranks; a session usually writes them on rank 0 only.
  void set_log(LogSink sink) noexcept;

  /// What to do with `bucket` in the current step. Out of range: dense.
  StepPlan plan(size_t bucket) const noexcept;
  /// Notes one measurement; bad ones are counted and dropped.
  void record(size_t bucket, const Sample& sample) noexcept;
  void record_guard(size_t bucket, const GuardReading& reading) noexcept;
  /// When this step's gradient of the bucket was ready: seconds since the step's first bucket was. Once every bucket
  /// has one the objective is exposed time (gate/plan/exposed.h), else the sum of all exchanges.
  void record_ready(size_t bucket, double since_first_s) noexcept;
  /// Ends the current step. `step_s` is the time since the last bucket of the previous step completed; NaN when there
  /// is none (first step, or a pause between the two).
  void end_step(double step_s) noexcept;

  /// True after the end_step() that ends an agreement window: the same steps on every rank. Stays true until apply().
  bool agreement_due() const noexcept;
  /// Doubles of one report and of one message, for the agreement that comes next. Equal on all ranks.
  size_t report_size() const noexcept;
  size_t message_size() const noexcept;
  /// Writes report_size() doubles. payload_too_small when `out` is shorter.
  Status write_report(std::span<double> out) const noexcept;
  /// Rank 0: `reports` are ranks × report_size() doubles in rank order. Always writes message_size() doubles that may
  /// be broadcast: when the reports contradict each other the message carries the error, and apply() returns
  /// peer_mismatch on every rank. Changes nothing in this gate.
  Status decide(std::span<const double> reports, std::span<double> message) const noexcept;
  /// Every rank, rank 0 included: takes the message over and writes the log. bad_payload: not a message for this step;
  /// the gate is unchanged.
  Status apply(std::span<const double> message) noexcept;

  uint64_t step() const noexcept;  ///< number of completed steps = number of the current step
  size_t bucket_count() const noexcept;
  Mode mode() const noexcept;
  /// True in the phase "hold" (the state that a run settles into), false in start-up and verification; true for on and
  /// off.
  bool settled() const noexcept;
  /// "startup", "measure", "verify", "hold", "observe", "fixed".
  const char* phase_name() const noexcept;
  /// The candidate that the bucket settled on (0: dense); during verification what ran before it.
  int running(size_t bucket) const noexcept;
  /// Last agreed prediction for the bucket with the reason for what runs now.
  Decision decision(size_t bucket) const noexcept;
  GateTotals totals() const noexcept;

  /// One line about a bucket: the inequality with its numbers, and what runs.
  Message explain(size_t bucket) const noexcept;
  /// One line about the whole plan: phase, measured step times, saving so far, tolerable step inflation.
  Message explain_plan() const noexcept;

  /// Exact state: a gate of equal configuration continues as if nothing had happened. save(): payload_too_small.
  /// load(): bad_payload for damaged bytes, peer_mismatch for those of another configuration, rank count or layout;
  /// then unchanged.
  size_t state_bytes() const noexcept;
  Status save(Bytes out) const noexcept;
  Status load(ConstBytes in) noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradgate::gate
