// The session over host memory: a bucket's way through its exchange. At most one bucket is left on the wire, and ends
// before the one after the next begins. When it does may differ between ranks: what is started keeps its order, and so
// does the rest, also where a failure makes all of them repeat a bucket (Communicator::start_all_gather()).
#include <algorithm>
#include <cstring>

#include "integration/session_impl.h"

namespace gradgate {
namespace {

template <class Word>
bool all_zero(const void* data, size_t first, size_t count) noexcept {
  constexpr auto kMagnitude = static_cast<Word>(static_cast<Word>(~Word{0}) >> 1);  // of a number that may be -0
  for (size_t i = first; i < first + count; ++i) {
    Word word;
    std::memcpy(&word, static_cast<const std::byte*>(data) + i * sizeof(Word), sizeof(Word));
    if ((word & kMagnitude) != 0) return false;
  }
  return true;
}

bool all_zero(const Vec& v, size_t first, size_t count) noexcept {
  return dtype_bytes(v.dtype) == 2 ? all_zero<uint16_t>(v.data, first, count)
                                   : all_zero<uint32_t>(v.data, first, count);
}

}  // namespace

// Codecs keep the residual of a group of 256 elements whose gradient is zero, so that a parameter that takes no part
// in a step sends nothing: a trainer drops what arrives for it, and it would be lost. In a group that it shares with
// another parameter it is kept here, out of the codec's sight until the exchange is over.
void SessionImpl::hold_edges(const Bucket& bucket, HostFlight* flight) noexcept {
  float* kept = flight->held.data();
  for (size_t i = 0; i < bucket.edges.size(); ++i) {
    const auto [offset, count] = bucket.edges[i];
    flight->is_held[i] = all_zero(flight->args.gradient, offset, count);
    if (!flight->is_held[i]) continue;
    float* residual = flight->args.residual + offset;
    kept = std::copy(residual, residual + count, kept);
    std::fill(residual, residual + count, 0.0f);
  }
}

// Added, not put back: a codec that turns zeros into something leaves an error there.
void SessionImpl::return_edges(const Bucket& bucket, HostFlight* flight) noexcept {
  const float* kept = flight->held.data();
  float* residuals = residuals_.floats() + bucket.residual_offset;
  for (size_t i = 0; i < bucket.edges.size(); ++i) {
    const auto [offset, count] = bucket.edges[i];
    if (!flight->is_held[i]) continue;
    for (size_t j = offset; j < offset + count; ++j) residuals[j] += *kept++;
  }
}

Status SessionImpl::reduce(uint32_t index, Vec gradient, bool leave) noexcept {
  Bucket& bucket = buckets_[index];
  const gate::StepPlan plan = gate_.plan(index);
  const Turn now = turn(bucket, plan);
  const Exchange exchange = now.candidate.exchange;
  leave = leave && (exchange == Exchange::all_gather || exchange == Exchange::two_shot);
  leave = leave && plan.shadow <= 0 && !plan.guard;
  // What is to be timed has wire and processor for itself.
  if (!leave) GRADGATE_TRY(finish_left());
  if (plan.shadow > 0) measure_shadow(index, gradient, plan.shadow);

  const int place = left_ == &host_flights_[0] ? 1 : 0;
  HostFlight& flight = host_flights_[place];
  flight.index = index, flight.turn = now;
  flight.args = args_of(index, gradient, now.candidate, now.feedback);
  const size_t bytes = workspace_.size() / workspaces();
  flight.args.workspace = {workspace_.data() + static_cast<size_t>(place) * bytes, bytes};
  flight.args.threshold = &bucket.threshold;
  if (flight.args.residual != nullptr) GRADGATE_TRY(save_residual(bucket));
  if (now.feedback == Feedback::apply) hold_edges(bucket, &flight);
  flight.guarded = begin_guard(plan, &flight.args, &flight.reading);

  Message why;
  const Status started =
      flight.run.start(comm_, flight.args, options_.timeout_s, options_.virtual_rates, &tiers_, leave, &why);
  ++next_bucket_;
  GRADGATE_TRY(finish_left());
  if (!flight.run.under_way()) return settle_flight(flight, started, why);
  left_ = &flight;
  return next_bucket_ < buckets_.size() ? Status{} : finish_left();
}

Status SessionImpl::finish_left() noexcept {
  if (left_ == nullptr) return {};
  HostFlight& flight = *left_;
  left_ = nullptr;
  Message why;
  const Status status = flight.run.finish(&wire_free_s_, &why);
  return settle_flight(flight, status, why);
}

Status SessionImpl::settle_flight(HostFlight& flight, Status status, const Message& why) noexcept {
  Bucket& bucket = buckets_[flight.index];
  const Vec& gradient = flight.args.gradient;
  const ExchangeTimes& times = flight.run.times();
  if (!status.ok()) {
    Message full;
    full.format("bucket %u step %llu: %s", flight.index, static_cast<unsigned long long>(step_),
                why.text[0] ? why.text : status.message());
    if (!can_go_on(bucket, flight.turn, times, status)) return fail(status, full);
    return reduce_dense_instead(flight.index, gradient, flight.turn, full);
  }
  note_residual(bucket, flight.turn);
  watch_result(gradient);
  if (flight.guarded) end_guard(flight.index, flight.args, flight.reading);
  if (flight.turn.feedback == Feedback::apply) return_edges(bucket, &flight);
  count_exchange(flight.index, flight.turn, flight.args.shape, times, true);
  stats_.non_finite += times.non_finite;
  return end_bucket(flight.index);
}

// A failure that every rank knows of left all gradients as they were. The residual was not: without a copy of it the
// session ends.
bool SessionImpl::can_go_on(const Bucket& bucket, const Turn& now, const ExchangeTimes& times,
                            Status status) const noexcept {
  return now.index != 0 && times.told && status.code() != StatusCode::peer_mismatch && comm_.last_error()[0] == '\0' &&
         (now.feedback == Feedback::none || bucket.saved);
}

// All ranks come here together: none falls back alone. The gate closes the candidate at the next agreement.
Status SessionImpl::reduce_dense_instead(uint32_t index, Vec gradient, const Turn& failed,
                                         const Message& reason) noexcept {
  Bucket& bucket = buckets_[index];
  if (bucket.saved) GRADGATE_TRY(take_back(bucket));
  Message line;
  line.format("gradgate: %.240s; reduced dense", reason.text);
  say(line);
  gate::Sample sample;
  sample.candidate = failed.index;
  sample.ok = false;
  gate_.record(index, sample);
  ++stats_.failed_exchanges;
  Message where;
  where.format("bucket %u step %llu, after a failed exchange", index, static_cast<unsigned long long>(step_));
  GRADGATE_TRY(reduce_dense(gradient, where));
  return end_bucket(index);
}

Status SessionImpl::reduce_dense(Vec gradient, const Message& where) noexcept {
  ExchangeArgs args;
  args.shape = {dense_candidate(), gradient.count, gradient.dtype, comm_.rank(), comm_.size(), options_.executor.width};
  args.gradient = gradient;
  args.executor = options_.executor;
  args.divide = divide_;
  ExchangeTimes times;
  Message why;
  if (const Status s = run_exchange(comm_, args, options_.timeout_s, options_.virtual_rates, &times, &why); !s.ok())
    return fail_dense(s, where, why);
  watch_result(gradient);
  count_dense(gradient);
  stats_.transfer_s += times.transfer_s;
  return {};
}

Status SessionImpl::fail_dense(Status status, const Message& where, const Message& why) noexcept {
  Message full;
  full.format("%s: %s", where.text, why.text[0] ? why.text : status.message());
  return fail(status, full);
}

void SessionImpl::count_dense(const Vec& gradient) noexcept {
  const size_t bytes = gradient.count * dtype_bytes(gradient.dtype);
  ++stats_.dense_buckets;
  stats_.dense_bytes += bytes;
  stats_.wire_bytes += bytes;
}

}  // namespace gradgate
