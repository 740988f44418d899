// The session's private parts: what session.cc (steps), session_host.cc and session_device.cc (a bucket's way, by where
// its memory is), session_layout.cc (buckets and residuals), session_state.cc (checkpoints) and session_agree.cc
// (comparison of ranks, link probe) share.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "gate/cost.h"
#include "gate/gate.h"
#include "gradgate/device_exchange.h"
#include "gradgate/session.h"
#include "integration/comm/driver.h"
#include "integration/comm/two_shot_layout.h"
#include "integration/gate_agreement.h"
#include "integration/session_place.h"

namespace gradgate {

/// One line of what ranks must agree on; compared as text so that the message can show both values.
struct AgreedField {
  char name[16] = {};
  char value[112] = {};
};
AgreedField agreed_field(const char* name, const char* format, ...) noexcept __attribute__((format(printf, 2, 3)));
/// Collective. peer_mismatch on every rank when a value differs from rank 0's; `why` names the field, both values and
/// the rank.
Status agree_on(Communicator& comm, std::span<const AgreedField> fields, double timeout_s, Message* why) noexcept;

/// Collective. Whether every rank has the same usable profile for this number of ranks; if not, and any has one,
/// `ignored` says why.
Status agree_on_profile(Communicator& comm, const LinkProfile& profile, double timeout_s, bool* use, Message* ignored,
                        Message* why) noexcept;
gate::LinkModel profile_model(const LinkProfile& profile) noexcept;

/// Collective. Times small collectives and fits a model of the link (gate/fit.h), the same on every rank; `usable()` is
/// false when the samples did not lie near a line.
Status probe_link(Communicator& comm, double timeout_s, gate::LinkModel* link, Message* why) noexcept;
/// The same over a communicator of devices, timed by events on the place's stream; `control` gathers the numbers.
Status probe_device_link(Communicator& comm, Communicator& control, const Place& place, double timeout_s,
                         gate::LinkModel* link, Message* why) noexcept;

/// The part of the vector that this rank owns in stage 2, or whose node's sum it encodes; empty for exchanges of one
/// stage. What the guard tells apart.
comm::Shard owned_part(const ExchangeShape& shape) noexcept;

/// FNV-1a over bytes, 64 bits: layouts and state files.
uint64_t fnv1a64(const void* data, size_t size, uint64_t hash = 0xcbf29ce484222325ull) noexcept;

/// The parts of a model that are about nodes, probed over both tiers, in the memory of `place`; rank 0's on every rank,
/// by `control`.
Status probe_nodes(Communicator& control, const NodeTiers& tiers, const Place& place, double timeout_s,
                   gate::LinkModel* link, Message* why) noexcept;

/// Part of a parameter that lies in a codec's group together with a part of another one.
struct Edge {
  size_t offset = 0, count = 0;  ///< in the bucket
};

class SessionImpl final : public Session {
 public:
  SessionImpl(Communicator& comm, const SessionOptions& options);
  Status start(Message* why);

  Status set_layout(std::span<const BucketLayout> buckets) noexcept override;
  ~SessionImpl() override;
  Status all_reduce(uint32_t bucket, Vec gradient, Stream stream) noexcept override;
  Status all_reduce_overlapped(uint32_t bucket, Vec gradient) noexcept override;
  Status finish() noexcept override;
  bool unfinished() const noexcept override { return left_ != nullptr; }
  void bucket_ready(uint32_t bucket, double ready_s) noexcept override;
  Status all_reduce_dense(Vec gradient, Stream stream) noexcept override;
  Status join(Stream stream) noexcept override;
  Status synchronize() noexcept override;
  Status flush() noexcept override;
  Status set_gradient_scale(double scale) noexcept override;
  Status skip_step() noexcept override;
  void set_dense_division(bool divide) noexcept override { divide_ = divide; }
  const float* residual(uint32_t bucket) const noexcept override;
  Status read_residual(uint32_t bucket, float* to) const noexcept override;
  SessionStats stats() const noexcept override;
  const char* explain(uint32_t bucket) const noexcept override;
  Candidate current(uint32_t bucket) const noexcept override;
  const char* phase() const noexcept override { return gate_.phase_name(); }
  size_t state_bytes() const noexcept override;
  Status save_state(Bytes out, size_t* written) const noexcept override;
  Status load_state(ConstBytes state) noexcept override;
  const char* last_error() const noexcept override { return error_.text; }

 private:
  struct Bucket {
    DType dtype = DType::f32;
    size_t count = 0;
    std::vector<ParamSlice> slices;
    std::vector<Edge> edges;
    bool has_residual = false;   ///< some candidate of this bucket uses feedback
    size_t residual_offset = 0;  ///< into residuals_
    bool pending = false;        ///< the residual may hold unsent gradient
    bool in_shards = false;      ///< what is pending lies in the shards of a hierarchical exchange
    uint32_t threshold = 0;      ///< topk: of its last step
    bool saved = false;          ///< before_ holds this bucket's residual as it was before the step that runs
    bool pending_before = false;
    double ready_s = std::numeric_limits<double>::quiet_NaN();  ///< bucket_ready() of the step that runs
  };
  /// What one bucket does in one step, after the session's own reasons have been weighed against the gate's plan.
  struct Turn {
    Candidate candidate;
    uint8_t index = 0;  ///< of the candidate for the gate; 0 = dense
    Feedback feedback = Feedback::none;
  };

  /// A bucket's way through its exchange in host memory.
  struct HostFlight {
    uint32_t index = 0;
    ExchangeArgs args;
    Turn turn;
    gate::GuardReading reading;
    bool guarded = false;
    std::vector<float> held;       ///< residuals of edges that do not take part
    std::vector<uint8_t> is_held;  ///< by edge
    comm::ExchangeRun run;
  };

  /// What a device reports of one bucket in one step, copied to the host as a whole.
  struct DeviceWords {
    ExchangeRecord exchange, shadow;
    kernels::cuda::GuardSums guard;
    uint64_t watched;  ///< elements of the result that were not finite, where that is asked
  };
  /// A bucket's work on the device, from its all_reduce() to the end of its step's books.
  struct Flight {
    ExchangeArgs args;
    Turn turn;
    int shadow = 0;  ///< the candidate that was measured beside it
    bool guarded = false, watched = false;
    DeviceMarks marks, shadow_marks;
    void* ready = nullptr;  ///< event: when the trainer's stream had the gradient
  };

  Status check_nodes(Message* why) noexcept;
  static Status check_layout(std::span<const BucketLayout> buckets, Message* why);
  Status build_layout(std::span<const BucketLayout> buckets);
  Status make_gate();
  Status move_residuals(const std::vector<Bucket>& old_buckets, const Memory& old_residuals);
  uint64_t layout_hash() const noexcept;

  ExchangeShape shape_of(const Bucket& bucket, const Candidate& candidate) const noexcept;
  float* residual_of(Bucket& bucket) noexcept {
    return bucket.has_residual ? residuals_.floats() + bucket.residual_offset : nullptr;
  }
  Turn turn(const Bucket& bucket, const gate::StepPlan& plan) const noexcept;
  Status check_bucket(uint32_t index, const Vec& gradient) const noexcept;
  Status reduce(uint32_t index, Vec gradient, bool leave) noexcept;
  /// Ends the exchange that was left on the wire, if one was.
  Status finish_left() noexcept;
  void hold_edges(const Bucket& bucket, HostFlight* flight) noexcept;
  void return_edges(const Bucket& bucket, HostFlight* flight) noexcept;
  Status settle_flight(HostFlight& flight, Status status, const Message& why) noexcept;
  /// One per exchange that can be under way at a time.
  size_t workspaces() const noexcept { return comm_.can_start() ? 2 : 1; }
  /// What both places ask of an exchange of this bucket in this step.
  ExchangeArgs args_of(uint32_t index, const Vec& gradient, const Candidate& candidate, Feedback feedback) noexcept;
  void note_residual(Bucket& bucket, const Turn& now) noexcept;
  void count_exchange(uint32_t index, const Turn& now, const ExchangeShape& shape, const ExchangeTimes& times,
                      bool timed) noexcept;
  void record_shadow(uint32_t index, int candidate, const ExchangeTimes& times, bool ok) noexcept;
  bool begin_guard(const gate::StepPlan& plan, ExchangeArgs* args, gate::GuardReading* reading) noexcept;
  Status allocate_flights(size_t buckets);
  void release_flights() noexcept;
  Status enqueue(uint32_t bucket, Vec gradient, Stream stream) noexcept;
  Status enqueue_dense(Vec gradient, Stream stream, const Message& where) noexcept;
  void enqueue_shadow_of(uint32_t bucket, const Vec& gradient, int candidate) noexcept;
  Status end_enqueued_step() noexcept;
  Status settle() noexcept;
  Status wait_for_exchanges() noexcept;
  void settle_bucket(uint32_t bucket) noexcept;
  Communicator& control() const noexcept { return control_ != nullptr ? *control_ : comm_; }
  DeviceWords* device_words(size_t flight) const noexcept {
    return reinterpret_cast<DeviceWords*>(words_.data()) + flight;
  }
  void end_guard(uint32_t bucket, const ExchangeArgs& args, gate::GuardReading reading) noexcept;
  void record_ready(uint32_t bucket) noexcept;
  Status end_bucket(uint32_t bucket) noexcept;
  bool can_go_on(const Bucket& bucket, const Turn& now, const ExchangeTimes& times, Status status) const noexcept;
  Status reduce_dense_instead(uint32_t bucket, Vec gradient, const Turn& failed, const Message& reason) noexcept;
  /// Outside the gate's plan; `where` begins an error.
  Status reduce_dense(Vec gradient, const Message& where) noexcept;
  Status fail_dense(Status status, const Message& where, const Message& why) noexcept;
  void count_dense(const Vec& gradient) noexcept;
  Status take_back(Bucket& bucket) noexcept;
  Status save_residual(Bucket& bucket) noexcept;
  void watch_result(const Vec& gradient) noexcept;
  Status settle_residuals() noexcept;
  Status end_unplanned_step() noexcept;
  void measure_shadow(uint32_t bucket, const Vec& gradient, int candidate) noexcept;
  Status end_step(double now, double seconds) noexcept;
  Status agree() noexcept;
  void explain_changes() noexcept;
  void say(const Message& message) const noexcept;
  Status fail(Status status, const Message& why) noexcept;
  Status refuse(Status status, const char* format, ...) const noexcept __attribute__((format(printf, 3, 4)));

  Communicator& comm_;
  SessionOptions options_;
  std::vector<Candidate> candidates_;  ///< [0] is dense; the gate numbers them the same way
  gate::LinkModel link_;
  NodeTiers tiers_;  ///< where a candidate is hierarchical
  gate::Gate gate_;

  std::vector<Bucket> buckets_;
  Place place_;
  std::unique_ptr<Communicator> control_;  ///< device: what ranks tell each other, from host memory
  Memory residuals_;
  Memory before_;  ///< residuals before the step that runs; only with a gradient scale
  Memory workspace_, shadow_;
  HostFlight host_flights_[2];
  HostFlight* left_ = nullptr;  ///< the one on the wire
  double wire_free_s_ = 0;      ///< when the last one that was left had arrived
  GateAgreement agreement_;
  std::vector<int> explained_;  ///< per bucket: the candidate that was last explained
  std::string explained_phase_;
  bool explained_settled_ = false;

  // Device: one flight per bucket, and one for buckets outside the layout.
  std::vector<Flight> flights_;
  Memory words_;                       ///< DeviceWords of every flight
  Memory thresholds_;                  ///< topk: one per bucket, of its last step
  DeviceWords* host_words_ = nullptr;  ///< pinned: what words_ was when the step ended
  void* joined_ = nullptr;             ///< event
  DeviceMarks step_end_, step_end_before_;
  bool unsettled_ = false;  ///< a step has been enqueued whose books are not closed

  uint64_t step_ = 0;
  uint32_t next_bucket_ = 0;
  bool has_layout_ = false, failed_ = false, flush_ = false, warned_dtype_ = false;
  bool unplanned_ = false;  ///< this step has buckets outside the layout: only set_layout() can end it
  bool scaled_ = false;     ///< set_gradient_scale() was called: steps can be skipped
  bool skip_step_ = false;  ///< the step that runs will be skipped
  bool divide_ = false;     ///< dense scaling by division
  double gradient_scale_ = 1;
  double first_ready_s_ = 0;  ///< bucket_ready() of this step's first bucket
  double last_end_s_ = 0;
  bool timed_step_ = false;  ///< the step since last_end_s_ can be measured
  SessionStats stats_;
  mutable Message error_, explanation_;
};

}  // namespace gradgate
