// Session: the steps. Everything a bucket does in a step is decided in turn(), from the gate's plan (equal on all
// ranks) and from state that is equal on all ranks too, so that every rank issues the same collectives in the same
// order.
#include "gradgate/session.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <limits>
#include <string>

#include "gradgate/nccl.h"
#include "gradgate/version.h"
#include "integration/session_impl.h"

namespace gradgate {

Status parse_mode(std::string_view text, Mode* mode) noexcept {
  for (const Mode m : {Mode::automatic, Mode::on, Mode::off, Mode::observe}) {
    if (text == mode_name(m)) {
      *mode = m;
      return {};
    }
  }
  return StatusCode::invalid_argument;
}

Status Session::create(Communicator& comm, const SessionOptions& options, std::unique_ptr<Session>* out,
                       Message* why) noexcept {
  Message unused;
  if (why == nullptr) why = &unused;
  *why = {};
  try {
    auto session = std::make_unique<SessionImpl>(comm, options);
    GRADGATE_TRY(session->start(why));
    *out = std::move(session);
    return {};
  } catch (const std::bad_alloc&) {
    why->format("out of memory while creating a session");
    return StatusCode::out_of_memory;
  }
}

SessionImpl::SessionImpl(Communicator& comm, const SessionOptions& options) : comm_(comm), options_(options) {
  candidates_.push_back(dense_candidate());
  for (const CodecSpec& codec : options.codecs) {
    if (codec.id != CodecId::none) candidates_.push_back(default_candidate(codec));
  }
  for (const Candidate& candidate : options.candidates) {
    if (candidate != dense_candidate()) candidates_.push_back(candidate);
  }
  // The honest baseline is a plain cast (it costs one line of any trainer), so it always competes.
  const bool competes = options.mode == Mode::automatic || options.mode == Mode::observe;
  bool has_cast = false;
  for (const Candidate& candidate : candidates_) has_cast = has_cast || candidate.codec.id == CodecId::bf16;
  if (competes && !has_cast) {
    Candidate cast;
    if (parse_candidate("bf16", &cast, nullptr).ok()) candidates_.push_back(cast);
  }
  options_.codecs = {};
  options_.candidates = {};  // the caller's memory
}

Status SessionImpl::start(Message* why) {
  if (!(options_.timeout_s > 0) || !std::isfinite(options_.timeout_s)) {
    why->format("timeout_s is %g, accepted: a positive number of seconds", options_.timeout_s);
    return StatusCode::invalid_argument;
  }
  if (!(options_.error_budget > 0) || !std::isfinite(options_.error_budget)) {
    why->format("error_budget is %g, accepted: a positive share, e.g. 0.1", options_.error_budget);
    return StatusCode::invalid_argument;
  }
  const bool link_given = options_.link.alpha_s != 0 || options_.link.beta_bytes_per_s != 0;
  if (link_given && !(options_.link.alpha_s >= 0 && options_.link.beta_bytes_per_s > 0 &&
                      std::isfinite(options_.link.alpha_s) && std::isfinite(options_.link.beta_bytes_per_s))) {
    why->format("link is alpha %g s, beta %g B/s, accepted: alpha >= 0, beta > 0, or both 0 to probe",
                options_.link.alpha_s, options_.link.beta_bytes_per_s);
    return StatusCode::invalid_argument;
  }
  if (comm_.on_device()) {
    GRADGATE_TRY(place_.use_device(comm_, options_.timeout_s, why));
    GRADGATE_TRY(make_staged(comm_, place_.stream(), &control_, why));  // one stream, one order on every rank
  }
  const std::span<const Candidate> listed = std::span(candidates_).subspan(1);  // without dense
  if (options_.mode == Mode::on && listed.empty()) {
    why->format("mode on needs a codec other than none");
    return StatusCode::invalid_argument;
  }
  if (listed.size() > static_cast<size_t>(gate::kMaxCandidates)) {
    why->format("%zu codecs, accepted: up to %d (bf16 is one of them)", listed.size(), gate::kMaxCandidates);
    return StatusCode::invalid_argument;
  }
  for (const Candidate& candidate : listed) {
    const bool two_tiers = candidate.exchange == Exchange::hierarchical;
    const Exchange carrier = two_tiers ? candidate.between : candidate.exchange;
    if (two_tiers && options_.ranks_per_node == 0) {
      why->format("codecs: %s: hierarchical needs ranks_per_node", format_candidate(candidate).text);
      return StatusCode::invalid_argument;
    }
    if (codec_travels_by(candidate.codec, candidate.exchange) && carrier != Exchange::hierarchical &&
        codec_travels_by(candidate.codec, carrier))
      continue;
    why->format("codecs: %s does not travel by %s", format_codec(candidate.codec).text, exchange_name(carrier));
    return StatusCode::invalid_argument;
  }
  GRADGATE_TRY(check_nodes(why));

  std::string names;
  for (const Candidate& candidate : listed) {
    if (!names.empty()) names += ',';
    names += format_candidate(candidate).text;
  }
  const AgreedField fields[] = {
      agreed_field("version", "%s", GRADGATE_VERSION),
      agreed_field("mode", "%s", mode_name(options_.mode)),
      agreed_field("codecs", "%s", names.c_str()),
      agreed_field("seed", "%llu", static_cast<unsigned long long>(options_.seed)),
      agreed_field("link", "alpha %.17g s, beta %.17g B/s", options_.link.alpha_s, options_.link.beta_bytes_per_s),
      agreed_field("nodes", "%d ranks each, alpha %.17g s, beta %.17g B/s", options_.ranks_per_node,
                   options_.node_link.alpha_s, options_.node_link.beta_bytes_per_s),
  };
  GRADGATE_TRY(agree_on(control(), fields, options_.timeout_s, why));

  bool two_tiers = false;
  for (const Candidate& candidate : listed) two_tiers = two_tiers || candidate.exchange == Exchange::hierarchical;
  if (two_tiers && options_.mode != Mode::off)
    GRADGATE_TRY(split_nodes(comm_, options_.ranks_per_node, options_.timeout_s, &tiers_, why));

  if (options_.mode == Mode::automatic || options_.mode == Mode::observe) {
    const double start = comm_.now();
    const bool node_given = options_.node_link.beta_bytes_per_s != 0;
    if (link_given) {
      const gate::Link link{options_.link.alpha_s, options_.link.beta_bytes_per_s};
      const gate::Link inside =
          node_given ? gate::Link{options_.node_link.alpha_s, options_.node_link.beta_bytes_per_s} : link;
      link_ = two_tiers ? gate::two_level_model(inside, link, static_cast<uint32_t>(comm_.size()),
                                                static_cast<uint32_t>(options_.ranks_per_node))
                        : gate::link_model(link, static_cast<uint32_t>(comm_.size()));
    } else {
      bool calibrated = false;
      Message ignored;
      GRADGATE_TRY(agree_on_profile(control(), options_.profile, options_.timeout_s, &calibrated, &ignored, why));
      say(ignored);
      if (calibrated) {
        link_ = profile_model(options_.profile);
      } else {
        GRADGATE_TRY(place_.on_device() ? probe_device_link(comm_, *control_, place_, options_.timeout_s, &link_, why)
                                        : probe_link(comm_, options_.timeout_s, &link_, why));
      }
    }
    if (two_tiers && !link_given) GRADGATE_TRY(probe_nodes(control(), tiers_, place_, options_.timeout_s, &link_, why));
    stats_.gate_s += comm_.now() - start;
  }
  return {};
}

Status SessionImpl::check_nodes(Message* why) noexcept {
  const int nodes = options_.ranks_per_node;
  if (nodes < 0 || (nodes > 0 && comm_.size() % nodes != 0)) {
    why->format("ranks_per_node is %d, accepted: 0, or a divisor of the %d ranks", nodes, comm_.size());
    return StatusCode::invalid_argument;
  }
  const LinkSpec& link = options_.node_link;
  if (link.alpha_s == 0 && link.beta_bytes_per_s == 0) return {};
  if (nodes > 0 && options_.link.beta_bytes_per_s > 0 && link.alpha_s >= 0 && link.beta_bytes_per_s > 0 &&
      std::isfinite(link.alpha_s) && std::isfinite(link.beta_bytes_per_s))
    return {};
  why->format(
      "node_link is alpha %g s, beta %g B/s, accepted: alpha >= 0, beta > 0 beside ranks_per_node and link, or "
      "both 0",
      link.alpha_s, link.beta_bytes_per_s);
  return StatusCode::invalid_argument;
}

SessionImpl::Turn SessionImpl::turn(const Bucket& bucket, const gate::StepPlan& plan) const noexcept {
  const Turn flush{dense_candidate(), 0, bucket.has_residual ? Feedback::flush : Feedback::none};
  if (flush_) return flush;
  switch (plan.action) {
    case gate::Action::dense:
      // A flush may be skipped with its step; what is then still pending goes out with the next dense one.
      return bucket.pending ? flush : Turn{dense_candidate(), 0, Feedback::none};
    case gate::Action::probe:
      return {dense_candidate(), 0, Feedback::none};
    case gate::Action::flush:
      return flush;
    case gate::Action::compress:
      break;
  }
  const Candidate& candidate = candidates_[plan.candidate];
  // A hierarchical exchange looks only at the residual of this rank's shard: what other exchanges or another layout
  // left elsewhere goes out first.
  if (candidate.exchange == Exchange::hierarchical && bucket.pending && !bucket.in_shards) return flush;
  if (candidate.codec.feedback) return {candidate, plan.candidate, Feedback::apply};
  // The codec before this one kept a residual and this one does not: one dense step sends what is left first.
  if (bucket.pending) return flush;
  return {candidate, plan.candidate, Feedback::none};
}

Status SessionImpl::check_bucket(uint32_t index, const Vec& gradient) const noexcept {
  if (failed_) return refuse(StatusCode::bad_state, "this session failed before: %s", error_.text);
  if (!has_layout_) return refuse(StatusCode::bad_state, "all_reduce before set_layout");
  if (unplanned_) return refuse(StatusCode::bad_state, "all_reduce after all_reduce_dense; set_layout ends that step");
  if (index != next_bucket_ || index >= buckets_.size()) {
    return refuse(
        StatusCode::invalid_argument,
        "bucket %u in step %llu, accepted now: %u (buckets come in ascending order, once per step, %zu of them)", index,
        static_cast<unsigned long long>(step_), next_bucket_, buckets_.size());
  }
  const Bucket& bucket = buckets_[index];
  if (gradient.dtype != bucket.dtype || gradient.count != bucket.count ||
      (gradient.data == nullptr && gradient.count > 0)) {
    return refuse(StatusCode::invalid_argument, "bucket %u is %zu elements of %s%s, accepted by its layout: %zu of %s",
                  index, gradient.count, dtype_name(gradient.dtype),
                  gradient.data == nullptr ? " at a null address" : "", bucket.count, dtype_name(bucket.dtype));
  }

  return {};
}

Status SessionImpl::all_reduce(uint32_t index, Vec gradient, Stream stream) noexcept {
  GRADGATE_TRY(check_bucket(index, gradient));
  if (place_.on_device()) return enqueue(index, gradient, stream);
  if (stream.handle != nullptr)
    return refuse(StatusCode::invalid_argument, "bucket %u: a stream, but the communicator is one of host memory",
                  index);
  return reduce(index, gradient, false);
}

Status SessionImpl::finish() noexcept {
  if (failed_) return refuse(StatusCode::bad_state, "this session failed before: %s", error_.text);
  return finish_left();
}

Status SessionImpl::all_reduce_overlapped(uint32_t index, Vec gradient) noexcept {
  GRADGATE_TRY(check_bucket(index, gradient));
  if (place_.on_device())
    return refuse(StatusCode::unsupported, "bucket %u: device memory is enqueued as a whole (all_reduce)", index);
  return reduce(index, gradient, comm_.can_start());
}

ExchangeArgs SessionImpl::args_of(uint32_t index, const Vec& gradient, const Candidate& candidate,
                                  Feedback feedback) noexcept {
  Bucket& bucket = buckets_[index];
  ExchangeArgs args;
  args.shape = shape_of(bucket, candidate);
  args.gradient = gradient;
  args.residual = feedback == Feedback::none ? nullptr : residual_of(bucket);
  args.feedback = feedback;
  args.workspace = {workspace_.data(), workspace_.size()};
  args.seed = {options_.seed, index, static_cast<uint32_t>(step_), 0};
  args.executor = options_.executor;
  args.divide = divide_;
  return args;
}

// What an exchange leaves in the residual.
void SessionImpl::note_residual(Bucket& bucket, const Turn& now) noexcept {
  if (now.feedback == Feedback::apply) {
    bucket.pending = true;
    bucket.in_shards = now.candidate.exchange == Exchange::hierarchical;
  }
  if (now.feedback == Feedback::flush) bucket.pending = false;
}

void SessionImpl::count_exchange(uint32_t index, const Turn& now, const ExchangeShape& shape,
                                 const ExchangeTimes& times, bool timed) noexcept {
  gate::Sample sample;
  sample.candidate = now.index;
  sample.ok = timed;
  sample.encode_s = times.encode_s;
  sample.transfer_s = times.transfer_s;
  sample.transfer_seen = times.transfer_seen;
  sample.decode_s = times.decode_s;
  if (now.feedback != Feedback::flush) gate_.record(index, sample);

  (now.index == 0 ? stats_.dense_buckets : stats_.compressed_buckets) += 1;
  stats_.wire_bytes += exchange_wire_bytes(shape);
  stats_.dense_bytes += shape.count * dtype_bytes(shape.dtype);
  stats_.encode_s += times.encode_s;
  stats_.transfer_s += times.transfer_s;
  stats_.decode_s += times.decode_s;
}

void SessionImpl::record_shadow(uint32_t index, int candidate, const ExchangeTimes& times, bool ok) noexcept {
  gate::Sample sample;
  sample.candidate = static_cast<uint8_t>(candidate);
  sample.shadow = true;
  sample.ok = ok;
  sample.encode_s = times.encode_s;
  sample.decode_s = times.decode_s;
  gate_.record(index, sample);
}

Status SessionImpl::end_bucket(uint32_t index) noexcept {
  record_ready(index);
  if (index + 1 < buckets_.size()) return {};
  const double now = comm_.now();
  return end_step(now, now - last_end_s_);
}

void SessionImpl::measure_shadow(uint32_t index, const Vec& gradient, int candidate) noexcept {
  const double start = comm_.now();
  const Candidate& chosen = candidates_[static_cast<size_t>(candidate)];
  const ExchangeArgs args = args_of(index, gradient, chosen, chosen.codec.feedback ? Feedback::apply : Feedback::none);
  ExchangeTimes times;
  const Bytes scratch{shadow_.data(), shadow_.size()};
  const bool ok = shadow_exchange(comm_, args, scratch, options_.virtual_rates, &times).ok();
  record_shadow(index, candidate, times, ok);
  stats_.gate_s += comm_.now() - start;
}

Status SessionImpl::end_step(double now, double seconds) noexcept {
  GRADGATE_TRY(settle_residuals());
  // A step that flushed, or the first one after a pause, says nothing about the plan.
  const bool counts = timed_step_ && !flush_;
  gate_.end_step(counts ? seconds : std::numeric_limits<double>::quiet_NaN());
  last_end_s_ = now;
  timed_step_ = true;
  flush_ = false;
  next_bucket_ = 0;
  ++step_;
  ++stats_.steps;
  return gate_.agreement_due() ? agree() : Status{};
}

Status SessionImpl::agree() noexcept {
  const double start = comm_.now();
  Message why;
  if (const Status s = agreement_.run(gate_, control(), step_, options_.timeout_s, &why); !s.ok()) return fail(s, why);
  stats_.gate_s += comm_.now() - start;
  explain_changes();
  return {};
}

void SessionImpl::explain_changes() noexcept {
  if (comm_.rank() != 0 || options_.explain == nullptr) return;
  // When the gate settles (also: gives its verdict in observe) every bucket is explained; in between only those that
  // changed.
  const bool settles = gate_.settled() && !explained_settled_;
  const bool phase = explained_phase_ != gate_.phase_name();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    if (gate_.running(b) == explained_[b] && !settles) continue;
    explained_[b] = gate_.running(b);
    say(gate_.explain(b));
  }
  explained_settled_ = gate_.settled();
  explained_phase_ = gate_.phase_name();  // short names: no allocation
  if (phase || settles) say(gate_.explain_plan());
}

void SessionImpl::say(const Message& message) const noexcept {
  if (comm_.rank() == 0 && options_.explain != nullptr && message.text[0] != '\0')
    options_.explain(options_.explain_context, message.text);
}

Status SessionImpl::flush() noexcept {
  if (failed_) return refuse(StatusCode::bad_state, "this session failed before: %s", error_.text);
  if (next_bucket_ != 0 || unplanned_)
    return refuse(StatusCode::bad_state, "flush within a step (bucket %u is next); call it between steps",
                  next_bucket_);
  GRADGATE_TRY(settle());
  flush_ = true;
  return {};
}

const float* SessionImpl::residual(uint32_t index) const noexcept {
  if (index >= buckets_.size() || !buckets_[index].has_residual) return nullptr;
  return residuals_.floats() + buckets_[index].residual_offset;
}

Status SessionImpl::read_residual(uint32_t index, float* to) const noexcept {
  if (failed_) return refuse(StatusCode::bad_state, "this session failed before: %s", error_.text);
  const float* from = residual(index);
  if (from == nullptr || to == nullptr) return refuse(StatusCode::bad_state, "bucket %u has no residual", index);
  if (unsettled_) return refuse(StatusCode::bad_state, "the residual of a step that still runs; synchronize() first");
  return place_.read(to, from, buckets_[index].count * sizeof(float));
}

SessionStats SessionImpl::stats() const noexcept {
  SessionStats stats = stats_;
  const gate::GateTotals totals = gate_.totals();
  stats.saved_s = totals.saved_s;
  stats.demotions = totals.demotions;
  stats.compression_error = totals.largest_error;
  stats.residual_ratio = totals.largest_residual;
  return stats;
}

const char* SessionImpl::explain(uint32_t index) const noexcept {
  if (index >= buckets_.size()) return "";
  explanation_ = gate_.explain(index);
  return explanation_.text;
}

Candidate SessionImpl::current(uint32_t index) const noexcept {
  return index < buckets_.size() ? turn(buckets_[index], gate_.plan(index)).candidate : dense_candidate();
}

Status SessionImpl::fail(Status status, const Message& why) noexcept {
  failed_ = true;
  error_ = why;
  return status;
}

Status SessionImpl::refuse(Status status, const char* format, ...) const noexcept {
  if (failed_) return status;  // keep the text of the failure
  va_list list;
  va_start(list, format);
  std::vsnprintf(error_.text, sizeof(error_.text), format, list);
  va_end(list);
  return status;
}

}  // namespace gradgate
