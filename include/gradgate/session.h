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

/// A measured link: α and β of each collective by its ring formula (docs/cost-models.md) at `ranks` ranks, as `gradgate
/// calibrate` finds them.
struct LinkProfile {
  uint32_t ranks = 0;  ///< 0: none
  LinkSpec all_reduce, all_gather, all_to_all;
};

struct SessionOptions {
  Mode mode = Mode::automatic;
  std::span<const CodecSpec>
      codecs;  ///< candidates in auto and observe (dense and, for f32, bf16 always take part); the codec in on
  std::span<const Candidate>
      candidates;  ///< more of them, behind `codecs`: with an exchange of one's own choice in the place of the codec's
  uint64_t seed = 0;
  double timeout_s = 30;  ///< of every wait for a peer
  double error_budget =
      0.1;                   ///< largest relative L2 error of a stage before the guard demotes a codec without feedback
  LinkSpec link;             ///< a known link; alpha = beta = 0: the link is probed when the session starts
  int ranks_per_node = 0;    ///< 0: all ranks are alike. Else consecutive ranks share a node, so many each, and
                             ///< candidates over hierarchical may be listed; must divide the ranks
  LinkSpec node_link;        ///< a known link inside a node; `link` is then that between nodes. Both 0: that of `link`
                             ///< where it is given, else probed
  LinkProfile profile;       ///< spares the probe where every rank has the same, for this number of ranks; else it is
                             ///< ignored, which explain says in one line
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
  double gate_s = 0;              ///< probing, shadow measurements and agreement: the cost of knowing
  double saved_s = 0;             ///< verified saving against dense so far; negative when the gate lost time
  uint64_t skipped_steps = 0;     ///< steps whose residuals were taken back (set_gradient_scale(), skip_step())
  uint64_t failed_exchanges = 0;  ///< compressed ones that every rank then repeated dense
  uint64_t demotions = 0;         ///< buckets in which the guard closed a codec (docs/gate.md)
  double compression_error = 0;   ///< largest relative error of a bucket's stage at the guard's last look
  double residual_ratio = 0;      ///< largest ‖e‖ / ‖g‖ of a bucket at the guard's last look
};

/// One rank's session. Calls are made by one thread at a time, in the same order on every rank. An exchange that fails
/// on one rank (it cannot encode, its payload arrives damaged) is repeated dense by all ranks, and the gate closes the
/// codec, where every rank knows of the failure and the residual is not spent: without feedback, or with a gradient
/// scale. After any other error every
/// later call but last_error() returns bad_state: peers may hold other data.
class GRADGATE_API Session {
 public:
  /// Collective (agrees on options; probes the link in auto and observe unless one is given). `comm` must outlive the
  /// session. Over a communicator of devices gradients, residuals and workspaces are in the current device's memory.
  static Status create(Communicator& comm, const SessionOptions& options, std::unique_ptr<Session>* out,
                       Message* why = nullptr) noexcept;
  virtual ~Session() = default;

  /// Collective. Describes the buckets of a step; called before the first step and whenever the trainer regroups them,
  /// between steps. All memory is allocated here. Residuals follow their parameters; what cannot be carried over is
  /// counted in the stats and logged once.
  virtual Status set_layout(std::span<const BucketLayout> buckets) noexcept = 0;
  /// Collective. Averages `gradient` over ranks, in place. Buckets come in ascending order, each once per step; the
  /// last one ends the step.
  Status all_reduce(uint32_t bucket, Vec gradient) noexcept { return all_reduce(bucket, gradient, Stream{}); }
  /// The same for a gradient in device memory (over a communicator of devices): what follows runs on the session's own
  /// stream once `stream` has got here, and nothing waits on the host. `gradient` must stay until join() or
  /// synchronize(). The step's errors and times are known when the next step's first bucket comes, or after
  /// synchronize().
  virtual Status all_reduce(uint32_t bucket, Vec gradient, Stream stream) noexcept = 0;
  /// all_reduce() in host memory that may return while the bucket's payloads are on the wire, so that the next bucket
  /// is encoded meanwhile: unfinished() then says so, `gradient` must stay, and its average is there when finish(), or
  /// the call for the next bucket by whichever function, has returned. That call also returns its error. The step's
  /// last bucket leaves nothing behind, nor does any over a communicator that cannot start collectives
  /// (Communicator::can_start()); over one that can, a session has two workspaces.
  virtual Status all_reduce_overlapped(uint32_t bucket, Vec gradient) noexcept = 0;
  virtual Status finish() noexcept = 0;
  virtual bool unfinished() const noexcept = 0;
  /// When the trainer had this bucket's gradient, in seconds of the communicator's now(); called before all_reduce() of
  /// the bucket. Once every bucket of a step has one, the gate prices the time that is exposed after the last gradient
  /// instead of the sum of all exchanges (docs/gate.md).
  virtual void bucket_ready(uint32_t bucket, double ready_s) noexcept = 0;
  /// Collective. The plain dense average of a bucket that the layout does not know: a trainer that regroups its buckets
  /// and says so only bucket by bucket sends the rest of that step this way, then calls set_layout(), which ends the
  /// step. Residuals stay as they are.
  Status all_reduce_dense(Vec gradient) noexcept { return all_reduce_dense(gradient, Stream{}); }
  virtual Status all_reduce_dense(Vec gradient, Stream stream) noexcept = 0;
  /// Device: what is enqueued on `stream` from now on comes after all reductions so far. Host memory: nothing to do.
  virtual Status join(Stream stream) noexcept = 0;
  /// Collective where an agreement is due. Device: waits for all reductions so far and closes the books of a step that
  /// is complete; its error, if it had one. Also what save_state() asks for first. Host memory: nothing to do.
  virtual Status synchronize() noexcept = 0;
  /// Asks for the residuals to be sent with the next step (dense, everything): before an evaluation, a change of the
  /// number of ranks, the end. Call on every rank between steps.
  virtual Status flush() noexcept = 0;

  /// Loss scaling: the next steps' gradients are `scale` times the true ones. Residuals are multiplied by new/old scale
  /// (exact for powers of two). From the first call on a step in which any result is not finite counts as skipped, as
  /// it does for the loss scaler: all residuals return to what they were before it. Costs a second copy of the
  /// residuals and a look at every result. Between steps, the same on every rank; invalid_argument unless finite and
  /// positive.
  virtual Status set_gradient_scale(double scale) noexcept = 0;
  /// The step that is running will be skipped by the trainer for a reason outside this session. Needs
  /// set_gradient_scale().
  virtual Status skip_step() noexcept = 0;
  /// Dense buckets divide by the number of ranks instead of multiplying by 1/N in their dtype: what DDP does to
  /// gradients that live in its buckets. The same on every rank.
  virtual void set_dense_division(bool divide) noexcept = 0;

  /// Read-only view of this rank's residual of a bucket, in the gradients' memory; null where there is none. Sum units.
  virtual const float* residual(uint32_t bucket) const noexcept = 0;
  /// Copies it to host memory: as many floats as the bucket has elements, wherever the residual lives. bad_state where
  /// there is none, or while a step still runs on a device.
  virtual Status read_residual(uint32_t bucket, float* to) const noexcept = 0;
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
