// Session: one rank's gradient reduction with a gate in front of it. A trainer describes its buckets, then calls
// all_reduce() for each bucket of each step; the session measures, agrees with the other ranks, compresses where it
// pays, and says why.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "gradgate/codec.h"
#include "gradgate/communicator.h"
#include "gradgate/exchange.h"
#include "gradgate/mode.h"

namespace gradgate {

/// Parses auto, on, off, observe.
GRADGATE_API Status parse_mode(std::string_view text, Mode* mode) noexcept;

/// A piece of a bucket that belongs to one parameter. Residuals belong to parameters: they follow param_id when buckets
/// are rebuilt.
struct ParamSlice {
  uint64_t param_id = 0;
  size_t offset = 0;  ///< elements from the start of the bucket
  size_t count = 0;
};
struct BucketLayout {
  DType dtype = DType::f32;
  std::span<const ParamSlice> slices;  ///< ascending, without gaps; their counts add up to the bucket
};

struct SessionOptions {
  Mode mode = Mode::automatic;
  std::span<const CodecSpec>
      codecs;  ///< candidates in auto and observe (dense and, for f32, bf16 always take part); the codec in on
  uint64_t seed = 0;
  double timeout_s = 30;     ///< of every wait for a peer
  LinkSpec link;             ///< a known link; alpha = beta = 0: the link is probed when the session starts
  CodecRates virtual_rates;  ///< only with a virtual clock
  Executor executor;         ///< thread ranks leave this inline
  /// Lines of the decision log (JSONL, docs/gate.md) of this rank, without the newline. Called from the thread that
  /// calls the session.
  void (*log)(void* context, const char* line, size_t length) = nullptr;
  void* log_context = nullptr;
  /// One-line explanations for people ("gradgate: step 200 bucket 3 …"), on rank 0 only.
  void (*explain)(void* context, const char* line) = nullptr;
  void* explain_context = nullptr;
};

/// Totals since create(). Times in seconds, bytes per rank.
struct SessionStats {
  uint64_t steps = 0;          ///< completed steps
  uint64_t dense_buckets = 0;  ///< bucket reductions by dense all-reduce
  uint64_t compressed_buckets = 0;
  uint64_t dense_bytes = 0;        ///< M summed over all reductions
  uint64_t wire_bytes = 0;         ///< what was sent in their place
  uint64_t non_finite = 0;         ///< elements encoders saw as Inf or NaN
  uint64_t dropped_residuals = 0;  ///< residual elements dropped because their parameter vanished or changed size
  double dropped_sum = 0;          ///< their sum, so that the law can be checked
  double encode_s = 0, transfer_s = 0, decode_s = 0;
  double gate_s = 0;   ///< probing, shadow measurements and agreement: the cost of knowing
  double saved_s = 0;  ///< verified saving against dense so far; negative when the gate lost time
};

/// One rank's session. Calls are made by one thread at a time, in the same order on every rank. After an error every
/// later call but last_error() returns bad_state: peers may hold other data.
class GRADGATE_API Session {
 public:
  /// Collective (agrees on options; probes the link in auto and observe unless one is given). `comm` must outlive the
  /// session.
  static Status create(Communicator& comm, const SessionOptions& options, std::unique_ptr<Session>* out,
                       Message* why = nullptr) noexcept;
  virtual ~Session() = default;

  /// Collective. Describes the buckets of a step; called before the first step and whenever the trainer regroups them,
  /// between steps. All memory is allocated here. Residuals follow their parameters; what cannot be carried over is
  /// counted in the stats and logged once.
  virtual Status set_layout(std::span<const BucketLayout> buckets) noexcept = 0;
  /// Collective. Averages `gradient` over ranks, in place. Buckets come in ascending order, each once per step; the
  /// last one ends the step.
  virtual Status all_reduce(uint32_t bucket, Vec gradient) noexcept = 0;
  /// Asks for the residuals to be sent with the next step (dense, everything): before an evaluation, a change of the
  /// number of ranks, the end. Call on every rank between steps.
  virtual Status flush() noexcept = 0;

  /// Read-only view of this rank's residual of a bucket; null where there is none. Sum units.
  virtual const float* residual(uint32_t bucket) const noexcept = 0;
  virtual SessionStats stats() const noexcept = 0;
  /// What the gate does with a bucket now, with the inequality's numbers. Valid until the next call.
  virtual const char* explain(uint32_t bucket) const noexcept = 0;
  /// The candidate a bucket uses in the next step.
  virtual Candidate current(uint32_t bucket) const noexcept = 0;
  /// Phase of the gate: "start-up", "verify", "hold", "off", …
  virtual const char* phase() const noexcept = 0;

  /// State of this rank: residuals by parameter, step, decisions. Between steps only. load_state() needs the same rank,
  /// number of ranks and a layout with the same parameters (any bucketing), and refuses anything else without changing
  /// the session; call it on every rank.
  virtual size_t state_bytes() const noexcept = 0;
  virtual Status save_state(Bytes out, size_t* written) const noexcept = 0;
  virtual Status load_state(ConstBytes state) noexcept = 0;

  /// Names the operation, bucket, step and time of the last failure.
  virtual const char* last_error() const noexcept = 0;
};

}  // namespace gradgate
