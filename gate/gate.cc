#include "gate/gate.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "gate/estimator.h"
#include "gate/plan/planner.h"
#include "gate/plan/report.h"
#include "gate/plan/state.h"

namespace gradgate::gate {
namespace {

/// First shadow calls of each bucket and candidate that do not count: cold caches, first use of buffers.
constexpr uint32_t kShadowDiscard = 1;

struct CodecEstimate {
  RunningMedian encode, decode;
};

// The counters of this rank that are no series.
struct LocalCounters {
  uint64_t step = 0, compressed_steps = 0, rejected = 0, failures = 0, failed = 0;
  double shadow_s = 0, shadow_since_s = 0;
};

constexpr uint64_t kStateMagic = 0x3153544147474747ull;  // "GGGGATS1" in memory order on little-endian machines

uint64_t checksum(const std::byte* data, size_t n) noexcept {
  uint64_t hash = 14695981039346656037ull;  // FNV-1a
  for (size_t i = 0; i < n; ++i) hash = (hash ^ std::to_integer<uint64_t>(data[i])) * 1099511628211ull;
  return hash;
}

}  // namespace

struct Gate::Impl {
  GateShape shape;
  PlanState state;
  LinkModel link;
  LogSink sink;
  LocalCounters local;
  std::vector<CodecEstimate> codecs;     // bucket × candidates
  std::vector<AlignedWindow> transfers;  // bucket × (1 + candidates)
  std::vector<AlignedWindow> ready;      // bucket: seconds since the step's first bucket
  std::vector<GuardReading> guards;      // bucket: since the last agreement
  std::vector<double> step_times;        // ring by step
  std::vector<double> pending_transfer;  // bucket: of the current step, NaN until it is recorded
  std::vector<double> pending_ready;

  CodecEstimate& codec(size_t bucket, int candidate) noexcept {
    return codecs[bucket * shape.candidate_count() + candidate - 1];
  }
  AlignedWindow& transfer(size_t bucket, int candidate) noexcept {
    return transfers[bucket * (shape.candidate_count() + 1) + candidate];
  }
  const CodecEstimate& codec(size_t bucket, int candidate) const noexcept {
    return const_cast<Impl*>(this)->codec(bucket, candidate);
  }
  const AlignedWindow& transfer(size_t bucket, int candidate) const noexcept {
    return const_cast<Impl*>(this)->transfer(bucket, candidate);
  }
  bool flushes(size_t bucket) const noexcept { return state.buckets[bucket].flush && local.step == state.applies_at; }

  // Everything measured by this rank alone, for save() and load().
  template <class Visit>
  static void visit_arrays(auto& self, Visit&& visit) {
    visit(self.codecs), visit(self.transfers), visit(self.step_times), visit(self.pending_transfer);
    visit(self.ready), visit(self.guards), visit(self.pending_ready);
  }
  size_t array_bytes() const noexcept {
    size_t n = sizeof(LocalCounters);
    visit_arrays(*this, [&](const auto& v) { n += v.size() * sizeof(v[0]); });
    return n;
  }
};

Gate::Gate() noexcept = default;
Gate::~Gate() = default;
Gate::Gate(Gate&&) noexcept = default;
Gate& Gate::operator=(Gate&&) noexcept = default;

Status Gate::create(const GateConfig& config, std::span<const CandidateInfo> candidates,
                    std::span<const BucketInfo> buckets, Gate* out) noexcept {
  if (out == nullptr || !valid_config(config) || !valid_inputs(candidates, buckets))
    return StatusCode::invalid_argument;
  try {
    auto impl = std::make_unique<Impl>();
    impl->shape.config = config;
    impl->shape.candidates.assign(candidates.begin(), candidates.end());
    impl->shape.buckets.assign(buckets.begin(), buckets.end());
    impl->shape.hash = hash_shape(impl->shape);
    impl->shape.message_size = message_doubles(buckets.size());
    impl->state = initial_state(impl->shape);
    const RunningMedian series(config.window, kShadowDiscard);
    impl->codecs.assign(buckets.size() * candidates.size(), {series, series});
    impl->transfers.resize(buckets.size() * (candidates.size() + 1));
    impl->step_times.assign(impl->shape.step_capacity(), kMissing);
    impl->pending_transfer.assign(buckets.size(), kMissing);
    impl->ready.resize(buckets.size());
    impl->guards.resize(buckets.size());
    impl->pending_ready.assign(buckets.size(), kMissing);
    out->impl_ = std::move(impl);
  } catch (const std::bad_alloc&) {
    return StatusCode::out_of_memory;
  } catch (...) {
    return StatusCode::internal;
  }
  return {};
}

void Gate::set_link(const LinkModel& link) noexcept {
  if (impl_ != nullptr) impl_->link = link;
}

void Gate::set_log(LogSink sink) noexcept {
  if (impl_ == nullptr) return;
  impl_->sink = sink;
  log_start(impl_->shape, impl_->state, impl_->local.step, sink);
}

StepPlan Gate::plan(size_t bucket) const noexcept {
  if (impl_ == nullptr || bucket >= impl_->state.buckets.size()) return {};
  StepPlan p;
  const Impl& g = *impl_;
  p.shadow = static_cast<int8_t>(shadow_candidate(g.shape, g.state, bucket, g.local.step));
  if (g.flushes(bucket)) {
    p.action = Action::flush;
    return p;
  }
  const Assignment a = assignment(g.shape, g.state, bucket, g.local.step);
  p.candidate = a.candidate;
  p.action = a.candidate != 0 ? Action::compress : a.probe ? Action::probe : Action::dense;
  p.guard = p.action == Action::compress && guard_step(g.shape, g.state, g.local.step);
  return p;
}

void Gate::record_guard(size_t bucket, const GuardReading& reading) noexcept {
  if (impl_ != nullptr && bucket < impl_->guards.size()) impl_->guards[bucket] = reading;
}

void Gate::record_ready(size_t bucket, double since_first_s) noexcept {
  if (impl_ == nullptr || bucket >= impl_->pending_ready.size()) return;
  impl_->pending_ready[bucket] = std::isfinite(since_first_s) && since_first_s >= 0 ? since_first_s : kMissing;
}

void Gate::record(size_t bucket, const Sample& sample) noexcept {
  if (impl_ == nullptr || bucket >= impl_->state.buckets.size()) return;
  Impl& g = *impl_;
  const int candidate = sample.candidate;
  if (candidate > static_cast<int>(g.shape.candidate_count()) || (sample.shadow && candidate == 0)) {
    ++g.local.rejected;
    return;
  }
  if (!sample.ok && !sample.shadow && candidate != 0) {
    ++g.local.failures;
    g.local.failed = bucket * 16 + candidate;
  }
  const bool codec_ok = candidate == 0 || (usable_seconds(sample.encode_s) && usable_seconds(sample.decode_s));
  if (!sample.ok || !codec_ok || (!sample.shadow && sample.transfer_seen && !usable_seconds(sample.transfer_s))) {
    ++g.local.rejected;
    return;
  }
  if (candidate != 0) {
    g.codec(bucket, candidate).encode.add(sample.encode_s);
    g.codec(bucket, candidate).decode.add(sample.decode_s);
  }
  if (sample.shadow) {
    g.local.shadow_s += sample.encode_s + sample.decode_s;
    g.local.shadow_since_s += sample.encode_s + sample.decode_s;
  } else if (candidate == (g.flushes(bucket) ? 0 : assignment(g.shape, g.state, bucket, g.local.step).candidate)) {
    g.pending_transfer[bucket] = sample.transfer_seen ? sample.transfer_s : kMissing;
  }
}

void Gate::end_step(double step_s) noexcept {
  if (impl_ == nullptr) return;
  Impl& g = *impl_;
  const uint64_t step = g.local.step;
  const bool counts = transfer_counts(g.shape, g.state, step);
  bool compressed = false;
  for (size_t b = 0; b < g.state.buckets.size(); ++b) {
    const int candidate = assignment(g.shape, g.state, b, step).candidate;
    compressed = compressed || (candidate != 0 && !g.flushes(b));
    // Pushed at the same steps on every rank, whether this rank has a number or not.
    if (counts && !g.flushes(b)) g.transfer(b, candidate).push(g.pending_transfer[b], g.shape.config.window);
    g.pending_transfer[b] = kMissing;
    if (counts) g.ready[b].push(g.pending_ready[b], g.shape.config.window);
    g.pending_ready[b] = kMissing;
  }
  g.local.compressed_steps += compressed;
  g.step_times[step % g.step_times.size()] = usable_seconds(step_s) ? step_s : kMissing;
  ++g.local.step;
}

bool Gate::agreement_due() const noexcept {
  return impl_ != nullptr && impl_->local.step >= impl_->state.next_agreement;
}

size_t Gate::report_size() const noexcept {
  return impl_ == nullptr ? 0 : report_layout(impl_->shape, impl_->state).size();
}

size_t Gate::message_size() const noexcept { return impl_ == nullptr ? 0 : impl_->shape.message_size; }

Status Gate::write_report(std::span<double> out) const noexcept {
  if (impl_ == nullptr) return StatusCode::bad_state;
  const Impl& g = *impl_;
  const ReportLayout layout = report_layout(g.shape, g.state);
  if (out.size() < layout.size())
    return Status(StatusCode::payload_too_small, static_cast<int64_t>(layout.size() * sizeof(double)));
  out[ReportLayout::kStep] = static_cast<double>(g.local.step);
  out[ReportLayout::kEpoch] = static_cast<double>(g.state.epoch);
  out[ReportLayout::kHash] = g.shape.hash;
  out[ReportLayout::kFailures] = static_cast<double>(g.local.failures);
  out[ReportLayout::kFailed] = static_cast<double>(g.local.failed);
  out[ReportLayout::kShadow] = g.local.shadow_since_s;
  for (size_t i = 0; i < layout.steps; ++i) {
    const uint64_t step = g.state.next_agreement - layout.steps + i;
    const bool kept = step < g.local.step && g.local.step - step <= g.step_times.size();
    out[ReportLayout::kHeader + i] = kept ? g.step_times[step % g.step_times.size()] : kMissing;
  }
  for (size_t b = 0; b < layout.buckets; ++b) {
    const GuardReading& r = g.guards[b];
    const double numbers[kGuardNumbers] = {r.error1,   r.norm1,         r.error2,         r.norm2, r.residual,
                                           r.gradient, r.non_finite_in, r.non_finite_out, r.hash};
    std::copy_n(numbers, kGuardNumbers, out.begin() + static_cast<std::ptrdiff_t>(layout.guard_at(b)));
  }
  if (!layout.full) return {};
  for (size_t b = 0; b < layout.buckets; ++b) {
    double ready[kMaxWindow];
    g.ready[b].copy({ready, layout.window});
    out[layout.ready_at(b)] = median_in_place({ready, layout.window});
    for (size_t c = 1; c <= layout.candidates; ++c) {
      out[layout.encode_at(b, c)] = g.codec(b, static_cast<int>(c)).encode.median();
      out[layout.decode_at(b, c)] = g.codec(b, static_cast<int>(c)).decode.median();
    }
    g.transfer(b, 0).copy(out.subspan(layout.dense_at(b), layout.window));
    const int plan = g.state.buckets[b].plan;
    const auto plan_window = out.subspan(layout.plan_at(b), layout.window);
    if (plan != 0) {
      g.transfer(b, plan).copy(plan_window);
    } else {
      std::fill(plan_window.begin(), plan_window.end(), kMissing);
    }
  }
  return {};
}

Status Gate::decide(std::span<const double> reports, std::span<double> message) const noexcept {
  if (impl_ == nullptr) return StatusCode::bad_state;
  const Impl& g = *impl_;
  if (message.size() < g.shape.message_size) {
    return Status(StatusCode::payload_too_small, static_cast<int64_t>(g.shape.message_size * sizeof(double)));
  }
  message = message.first(g.shape.message_size);
  Status status;
  try {
    PlanState next;
    status = advance(g.shape, g.state, g.link, g.local.step, reports, &next);
    if (status.ok()) write_message(g.shape, next, message);
  } catch (const std::bad_alloc&) {
    status = StatusCode::out_of_memory;
  } catch (...) {
    status = StatusCode::internal;
  }
  if (!status.ok()) write_error_message(g.shape, status, message);
  return status;
}

Status Gate::apply(std::span<const double> message) noexcept {
  if (impl_ == nullptr) return StatusCode::bad_state;
  Impl& g = *impl_;
  try {
    PlanState next;
    Status error;
    GRADGATE_TRY(read_message(g.shape, message, &next, &error));
    GRADGATE_TRY(error);
    if (next.epoch != g.state.epoch + 1 || next.applies_at != g.local.step) return StatusCode::bad_payload;
    // A measuring phase that begins wants new shadow series; what runs is measured as it runs.
    for (size_t b = 0; next.phase == Phase::measure && b < next.buckets.size(); ++b) {
      for (int c = 1; c <= static_cast<int>(g.shape.candidate_count()); ++c) {
        if (c != next.buckets[b].running) g.codec(b, c).encode.restart(), g.codec(b, c).decode.restart();
      }
    }
    g.state = std::move(next);
  } catch (const std::bad_alloc&) {
    return StatusCode::out_of_memory;
  } catch (...) {
    return StatusCode::internal;
  }
  g.local.failures = g.local.failed = 0;
  g.local.shadow_since_s = 0;
  std::fill(g.guards.begin(), g.guards.end(), GuardReading{});
  log_events(g.shape, g.state, g.sink);
  return {};
}

uint64_t Gate::step() const noexcept { return impl_ == nullptr ? 0 : impl_->local.step; }
size_t Gate::bucket_count() const noexcept { return impl_ == nullptr ? 0 : impl_->state.buckets.size(); }
Mode Gate::mode() const noexcept { return impl_ == nullptr ? Mode::off : impl_->shape.config.mode; }
bool Gate::settled() const noexcept {
  return impl_ == nullptr || impl_->state.phase == Phase::hold || impl_->state.phase == Phase::fixed ||
         (impl_->state.phase == Phase::observe && impl_->state.next_agreement == kNever);
}
const char* Gate::phase_name() const noexcept {
  return phase_text(impl_ == nullptr ? Phase::fixed : impl_->state.phase);
}
int Gate::running(size_t bucket) const noexcept {
  return bucket < bucket_count() ? impl_->state.buckets[bucket].running : 0;
}
Decision Gate::decision(size_t bucket) const noexcept {
  return bucket < bucket_count() ? impl_->state.buckets[bucket].decision : Decision{};
}

GateTotals Gate::totals() const noexcept {
  GateTotals t;
  if (impl_ == nullptr) return t;
  const PlanState& s = impl_->state;
  t.steps = impl_->local.step;
  t.compressed_steps = impl_->local.compressed_steps;
  t.shadow_s = impl_->local.shadow_s;
  t.startup_shadow_s = s.startup_shadow_s;
  t.rejected_samples = impl_->local.rejected;
  t.saved_s = s.saved_s;
  t.dense_step_s = s.dense_step_s;
  t.plan_step_s = s.plan_step_s;
  t.tokens_s = s.tokens_s;
  t.demotions = s.demotions;
  for (const BucketState& b : s.buckets) {
    t.largest_error = std::fmax(t.largest_error, std::fmax(b.guard_stage1, b.guard_stage2));
    t.largest_residual = std::fmax(t.largest_residual, b.guard_residual);
  }
  return t;
}

Message Gate::explain(size_t bucket) const noexcept {
  if (bucket >= bucket_count()) return {};
  const Impl& g = *impl_;
  const char* names[1 + kMaxCandidates] = {"dense"};
  Exchange exchanges[1 + kMaxCandidates] = {Exchange::all_reduce};
  const size_t n = g.shape.candidate_count();
  for (size_t i = 0; i < n; ++i)
    names[i + 1] = g.shape.candidates[i].name, exchanges[i + 1] = g.shape.candidates[i].exchange;
  const BucketState& b = g.state.buckets[bucket];
  const bool verified = b.running != 0 && b.running == b.decision.chosen && g.shape.config.mode == Mode::automatic;
  return gate::explain(g.state.applies_at, bucket, g.shape.buckets[bucket].dense_bytes, b.decision, {names, n + 1},
                       {exchanges, n + 1}, verified ? g.state.dense_step_s / g.state.plan_step_s : 0);
}

Message Gate::explain_plan() const noexcept {
  Message message;
  if (impl_ == nullptr) return message;
  const PlanState& s = impl_->state;
  TextBuilder out(message.text, sizeof(message.text));
  out.text("gradgate: step ")
      .integer(static_cast<int64_t>(impl_->local.step))
      .text(" ")
      .text(phase_text(s.phase))
      .text(": ");
  int64_t running = 0, predicted = 0;
  for (const BucketState& b : s.buckets) running += b.running != 0, predicted += b.decision.chosen != 0;
  const bool observe = s.phase == Phase::observe;
  out.integer(observe ? predicted : running).text(" of ").integer(static_cast<int64_t>(s.buckets.size()));
  out.text(observe ? " buckets would be compressed" : " buckets compressed");
  if ((observe ? predicted : running) > 0 && usable_seconds(s.dense_step_s) && usable_seconds(s.plan_step_s)) {
    const double ratio = s.dense_step_s / s.plan_step_s;
    out.text(", step ").milliseconds(s.dense_step_s).text(" → ").milliseconds(s.plan_step_s).text(" ms (");
    out.text(observe ? "predicted " : "verified ").fixed(ratio, 2).text("x; pays while it costs fewer than ");
    out.fixed((ratio - 1) * 100, 0).text(" % more steps)");
  }
  if (s.saved_s != 0) out.text(", saved ").fixed(s.saved_s, 3).text(" s so far");
  return message;
}

size_t Gate::state_bytes() const noexcept {
  if (impl_ == nullptr) return 0;
  return 4 * sizeof(uint64_t) + impl_->shape.message_size * sizeof(double) + impl_->array_bytes();
}

Status Gate::save(Bytes out) const noexcept {
  if (impl_ == nullptr) return StatusCode::bad_state;
  const Impl& g = *impl_;
  const size_t total = state_bytes();
  if (out.size() < total) return Status(StatusCode::payload_too_small, static_cast<int64_t>(total));
  std::byte* at = out.data() + 4 * sizeof(uint64_t);
  const auto put = [&](const void* data, size_t n) {
    if (n > 0) std::memcpy(at, data, n);
    at += n;
  };
  try {
    std::vector<double> state(g.shape.message_size);
    write_message(g.shape, g.state, state);
    put(state.data(), state.size() * sizeof(double));
  } catch (const std::bad_alloc&) {
    return StatusCode::out_of_memory;
  }
  put(&g.local, sizeof(g.local));
  Impl::visit_arrays(g, [&](const auto& v) {
    static_assert(std::is_trivially_copyable_v<std::remove_cvref_t<decltype(v[0])>>);
    put(v.data(), v.size() * sizeof(v[0]));
  });
  const uint64_t head[4] = {kStateMagic, total, static_cast<uint64_t>(g.shape.hash),
                            checksum(out.data() + sizeof(head), total - sizeof(head))};
  std::memcpy(out.data(), head, sizeof(head));
  return {};
}

Status Gate::load(ConstBytes in) noexcept {
  if (impl_ == nullptr) return StatusCode::bad_state;
  Impl& g = *impl_;
  uint64_t head[4];
  if (in.size() < sizeof(head)) return StatusCode::bad_payload;
  std::memcpy(head, in.data(), sizeof(head));
  if (head[0] != kStateMagic || head[1] > in.size() || head[1] < sizeof(head)) return StatusCode::bad_payload;
  if (checksum(in.data() + sizeof(head), head[1] - sizeof(head)) != head[3]) return StatusCode::bad_payload;
  if (head[2] != static_cast<uint64_t>(g.shape.hash)) return StatusCode::peer_mismatch;
  if (head[1] != state_bytes()) return StatusCode::bad_payload;
  try {
    const std::byte* at = in.data() + sizeof(head);
    std::vector<double> message(g.shape.message_size);
    std::memcpy(message.data(), at, message.size() * sizeof(double));
    at += message.size() * sizeof(double);
    PlanState state;
    Status error;
    GRADGATE_TRY(read_message(g.shape, message, &state, &error));
    GRADGATE_TRY(error);
    g.state = std::move(state);
    std::memcpy(&g.local, at, sizeof(g.local));
    at += sizeof(g.local);
    Impl::visit_arrays(g, [&](auto& v) {
      const size_t n = v.size() * sizeof(v[0]);
      if (n > 0) std::memcpy(static_cast<void*>(v.data()), at, n);
      at += n;
    });
  } catch (const std::bad_alloc&) {
    return StatusCode::out_of_memory;
  }
  return {};
}

}  // namespace gradgate::gate
