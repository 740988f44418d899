// The session over devices: steps are enqueued on the session's stream, their books closed when the next step's first
// bucket comes. By then the host has enqueued the trainer's forward pass behind them, so that waiting for them costs
// the device nothing; and the gate sees one step after the other, as it does over host memory.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "gate/fit.h"
#include "integration/session_impl.h"

namespace gradgate {
namespace {

const char* part_name(DeviceMarks::Part part) noexcept {
  switch (part) {
    case DeviceMarks::Part::encode:
      return "encoding";
    case DeviceMarks::Part::transfer:
      return "transfer";
    case DeviceMarks::Part::decode:
      return "decoding";
  }
  return "exchange";
}

}  // namespace

SessionImpl::~SessionImpl() { release_flights(); }

void SessionImpl::release_flights() noexcept {
  if (!place_.on_device()) return;
  const auto& cuda = place_.cuda();
  for (Flight& flight : flights_) {
    if (flight.ready != nullptr) cuda.destroy_event(flight.ready);
  }
  flights_.clear();
  if (host_words_ != nullptr) cuda.release_pinned(host_words_);
  host_words_ = nullptr;
  if (joined_ != nullptr) cuda.destroy_event(joined_);
  joined_ = nullptr;
}

Status SessionImpl::allocate_flights(size_t buckets) {
  release_flights();
  const auto& cuda = place_.cuda();
  const auto made = [&](int error) {
    return error == 0 ? Status{}
                      : refuse({StatusCode::out_of_memory, error}, "set_layout: events and pinned memory: %s",
                               cuda.error_text(error));
  };
  flights_ = std::vector<Flight>(buckets + 1);
  for (Flight& flight : flights_) {
    GRADGATE_TRY(flight.marks.create());
    GRADGATE_TRY(flight.shadow_marks.create());
    GRADGATE_TRY(made(cuda.create_event(&flight.ready)));
  }
  GRADGATE_TRY(step_end_.create());
  GRADGATE_TRY(step_end_before_.create());
  const size_t bytes = flights_.size() * sizeof(DeviceWords);
  GRADGATE_TRY(place_.allocate(bytes, &words_));
  GRADGATE_TRY(place_.allocate(flights_.size() * sizeof(uint32_t), &thresholds_));
  GRADGATE_TRY(place_.zero(thresholds_.data(), thresholds_.size()));
  void* pinned = nullptr;
  GRADGATE_TRY(made(cuda.allocate_pinned(&pinned, bytes)));
  host_words_ = static_cast<DeviceWords*>(pinned);
  return made(cuda.create_event(&joined_));
}

Status SessionImpl::enqueue(uint32_t index, Vec gradient, Stream stream) noexcept {
  Bucket& bucket = buckets_[index];
  Flight& flight = flights_[index];
  const auto& cuda = place_.cuda();
  const auto failed = [&](Status status, const char* text) {
    Message full;
    full.format("bucket %u step %llu: %s", index, static_cast<unsigned long long>(step_), text);
    return fail(status, full);
  };
  if (index == 0) {
    GRADGATE_TRY(settle());
    if (const Status s = place_.zero(words_.data(), words_.size()); !s.ok()) return failed(s, "clearing the records");
  }
  int error = cuda.record(flight.ready, stream.handle);
  if (error == 0) error = cuda.wait_event(place_.stream().handle, flight.ready);
  if (error != 0) return failed({StatusCode::internal, error}, cuda.error_text(error));

  const gate::StepPlan plan = gate_.plan(index);
  flight.shadow = 0;
  if (plan.shadow > 0) enqueue_shadow_of(index, gradient, plan.shadow);

  const Turn now = turn(bucket, plan);
  DeviceWords* const words = device_words(index);
  const DevicePlace place{place_.stream(), &words->exchange, nullptr};
  ExchangeArgs args = args_of(index, gradient, now.candidate, now.feedback);
  args.threshold = reinterpret_cast<uint32_t*>(thresholds_.data()) + index;
  args.device = &place;
  if (args.residual != nullptr) {
    if (const Status s = save_residual(bucket); !s.ok()) return failed(s, "keeping the residual");
  }
  gate::GuardReading reading;
  flight.guarded = begin_guard(plan, &args, &reading);
  kernels::cuda::GuardCall guard{};
  if (flight.guarded) {
    const comm::Shard own = owned_part(args.shape);
    guard = {gradient.data,
             gradient.dtype,
             args.residual,
             gradient.count,
             own.first,
             own.count,
             static_cast<double>(args.shape.ranks),
             false,
             &words->guard};
    error = cuda.guard(guard, place_.stream().handle);
  }
  Message why;
  if (const Status s = enqueue_exchange(comm_, args, options_.timeout_s, &flight.marks, &why, &tiers_); !s.ok())
    return failed(s, why.text[0] ? why.text : s.message());
  note_residual(bucket, now);
  if (flight.guarded && error == 0) {
    guard.after = true;
    error = cuda.guard(guard, place_.stream().handle);
  }
  flight.watched = scaled_;
  if (scaled_ && error == 0)
    error =
        cuda.count_non_finite(gradient.data, gradient.count, gradient.dtype, &words->watched, place_.stream().handle);
  if (error != 0) return failed({StatusCode::internal, error}, cuda.error_text(error));
  flight.args = args;
  flight.args.device = nullptr;  // it was on this stack; the record is read from the host's copy
  flight.turn = now;
  if (++next_bucket_ < buckets_.size()) return {};
  return end_enqueued_step();
}

void SessionImpl::enqueue_shadow_of(uint32_t index, const Vec& gradient, int candidate) noexcept {
  Flight& flight = flights_[index];
  const DevicePlace place{place_.stream(), &device_words(index)->shadow, nullptr};
  const Candidate& chosen = candidates_[static_cast<size_t>(candidate)];
  ExchangeArgs args = args_of(index, gradient, chosen, chosen.codec.feedback ? Feedback::apply : Feedback::none);
  args.device = &place;
  flight.shadow = candidate;
  if (enqueue_shadow(args, {shadow_.data(), shadow_.size()}, &flight.shadow_marks).ok()) return;
  record_shadow(index, candidate, {}, false);  // every rank has the same shapes: a refusal is one on all of them
  flight.shadow = 0;
}

Status SessionImpl::end_enqueued_step() noexcept {
  const auto& cuda = place_.cuda();
  const int error = cuda.copy(host_words_, words_.data(), words_.size(), place_.stream().handle);
  if (error != 0) {
    Message full;
    full.format("step %llu: %s", static_cast<unsigned long long>(step_), cuda.error_text(error));
    return fail({StatusCode::internal, error}, full);
  }
  step_end_.begin(place_.stream());
  unsettled_ = true;
  next_bucket_ = 0;
  return {};
}

void SessionImpl::settle_bucket(uint32_t index) noexcept {
  const Flight& flight = flights_[index];
  const DeviceWords& words = host_words_[index];
  ExchangeTimes times;
  if (flight.shadow > 0) {
    ExchangeTimes aside;
    uint64_t word = 0;
    __builtin_memcpy(&word, words.shadow.bytes, sizeof word);
    const bool read = flight.shadow_marks.read(&aside).ok();
    record_shadow(index, flight.shadow, aside, read && word == 0);
    stats_.gate_s += aside.encode_s + aside.transfer_s + aside.decode_s;
  }
  if (flight.watched && words.watched > 0) skip_step_ = true;
  if (flight.guarded) {
    gate::GuardReading reading;
    reading.error1 = words.guard.error1;
    reading.norm1 = words.guard.norm1;
    reading.error2 = words.guard.error2;
    reading.norm2 = words.guard.norm2;
    reading.gradient = words.guard.gradient;
    reading.residual = words.guard.error1 + words.guard.error2;
    reading.non_finite_in = static_cast<double>(words.guard.non_finite_in);
    reading.non_finite_out = static_cast<double>(words.guard.non_finite_out);
    reading.hash = static_cast<double>(words.guard.hash >> 12);
    gate_.record_guard(index, reading);
  }
  const bool timed = flight.marks.read(&times).ok();
  count_exchange(index, flight.turn, flight.args.shape, times, timed);
  double ready = 0;
  const bool known = index == 0 || place_.cuda().elapsed(flights_[0].ready, flight.ready, &ready) == 0;
  gate_.record_ready(index, known ? std::max(ready, 0.0) : std::numeric_limits<double>::quiet_NaN());
}

Status SessionImpl::wait_for_exchanges() noexcept {
  const Deadline deadline = Deadline::after(options_.timeout_s);
  Message where;
  where.format("step %llu, waiting for its exchanges: ", static_cast<unsigned long long>(step_));
  Status status;
  // Bucket by bucket, so that an error can say where the stream stands; afterwards an aborted communicator lets it run.
  for (size_t b = 0; b < flights_.size() && status.ok(); ++b) {
    auto part = DeviceMarks::Part::encode;
    status = flights_[b].marks.wait(comm_, place_.idle(), deadline, &part);
    if (!status.ok())
      where.format("bucket %zu step %llu, waiting for its %s: ", b, static_cast<unsigned long long>(step_),
                   part_name(part));
  }
  if (status.ok()) status = comm_.wait(place_.stream(), deadline);
  if (status.ok()) return status;
  // Collectives of a node that will not end would keep the stream.
  for (Communicator* tier : {tiers_.node.get(), tiers_.between.get()}) {
    if (tier != nullptr) tier->abort();
  }
  Message text;
  text.format("%s%s", where.text, comm_.last_error()[0] ? comm_.last_error() : status.message());
  return fail(status, text);
}

// Closes the books of a step that was enqueued as a whole.
Status SessionImpl::settle() noexcept {
  if (!unsettled_) return {};
  unsettled_ = false;
  GRADGATE_TRY(wait_for_exchanges());
  for (uint32_t b = 0; b < buckets_.size(); ++b) {
    Message why;
    const Status status = exchange_record_status(flights_[b].args, host_words_[b].exchange, &stats_.non_finite, &why);
    if (status.ok()) continue;
    Message full;
    full.format("bucket %u step %llu: %s", b, static_cast<unsigned long long>(step_), why.text);
    return fail(status, full);
  }
  for (uint32_t b = 0; b < buckets_.size(); ++b) settle_bucket(b);
  double seconds = std::numeric_limits<double>::quiet_NaN();
  if (timed_step_ && !step_end_.since(step_end_before_, &seconds).ok())
    seconds = std::numeric_limits<double>::quiet_NaN();
  std::swap(step_end_, step_end_before_);
  return end_step(comm_.now(), seconds);
}

Status SessionImpl::synchronize() noexcept {
  if (failed_) return refuse(StatusCode::bad_state, "this session failed before: %s", error_.text);
  if (!place_.on_device()) return {};
  return next_bucket_ == 0 ? settle() : wait_for_exchanges();
}

Status SessionImpl::join(Stream stream) noexcept {
  if (failed_) return refuse(StatusCode::bad_state, "this session failed before: %s", error_.text);
  if (!place_.on_device() || joined_ == nullptr) return {};
  const auto& cuda = place_.cuda();
  int error = cuda.record(joined_, place_.stream().handle);
  if (error == 0) error = cuda.wait_event(stream.handle, joined_);
  if (error == 0) return {};
  Message full;
  full.format("join at step %llu: %s", static_cast<unsigned long long>(step_), cuda.error_text(error));
  return fail({StatusCode::internal, error}, full);
}

Status SessionImpl::enqueue_dense(Vec gradient, Stream stream, const Message& where) noexcept {
  GRADGATE_TRY(settle());
  Message why;
  if (flights_.empty()) GRADGATE_TRY(allocate_flights(0));  // before the first layout
  const auto& cuda = place_.cuda();
  Flight& flight = flights_.back();
  int error = cuda.record(flight.ready, stream.handle);
  if (error == 0) error = cuda.wait_event(place_.stream().handle, flight.ready);
  const DevicePlace place{place_.stream(), &device_words(flights_.size() - 1)->exchange, nullptr};
  ExchangeArgs args;
  args.shape = {dense_candidate(), gradient.count, gradient.dtype, comm_.rank(), comm_.size()};
  args.shape.device = true;
  args.gradient = gradient;
  args.divide = divide_;
  args.device = &place;
  const Status status = error != 0 ? Status{StatusCode::internal, error}
                                   : enqueue_exchange(comm_, args, options_.timeout_s, nullptr, &why);
  if (!status.ok()) return fail_dense(status, where, why);
  unplanned_ = true;
  timed_step_ = false;
  count_dense(gradient);
  return {};
}

Status probe_device_link(Communicator& comm, Communicator& control, const Place& place, double timeout_s,
                         gate::LinkModel* link, Message* why) noexcept {
  using gate::ProbeCollective;
  *link = {};
  const size_t ranks = static_cast<size_t>(comm.size());
  if (ranks == 1) return {};
  try {
    size_t largest = 0;
    for (const gate::ProbePoint& point : gate::kProbe) largest = std::max<size_t>(largest, point.bytes);
    const size_t bytes = largest + ranks * 4 * sizeof(float);
    Memory send, recv;
    DeviceMarks marks;
    GRADGATE_TRY(place.allocate(bytes, &send));
    GRADGATE_TRY(place.allocate(bytes + ranks * 4 * sizeof(float), &recv));
    GRADGATE_TRY(place.zero(send.data(), send.size()));
    GRADGATE_TRY(marks.create());
    const Stream stream = place.stream();
    std::vector<double> mine;
    for (const gate::ProbePoint& point : gate::kProbe) {
      const size_t per_rank = (point.bytes / sizeof(float) + ranks - 1) / ranks;
      for (int i = 0; i < point.warmups + point.repetitions; ++i) {
        const Deadline deadline = Deadline::after(timeout_s);
        // The barrier on the stream lets the clock start where all ranks are.
        Status s = comm.barrier(stream, deadline);
        marks.begin(stream);
        if (s.ok()) {
          switch (point.collective) {
            case ProbeCollective::all_reduce:
              s = comm.all_reduce_sum(send.data(), recv.data(), per_rank * ranks, DType::f32, stream, deadline);
              break;
            case ProbeCollective::all_gather:
              s = comm.all_gather(send.data(), recv.data(), per_rank, DType::f32, stream, deadline);
              break;
            case ProbeCollective::all_to_all:
              s = comm.all_to_all(send.data(), recv.data(), per_rank, DType::f32, stream, deadline);
              break;
          }
        }
        marks.mark(DeviceMarks::Part::transfer, stream);
        if (s.ok()) s = comm.wait(stream, deadline);
        ExchangeTimes times;
        if (s.ok()) s = marks.read(&times);
        if (!s.ok()) {
          why->format("probing the link: %s", comm.last_error()[0] ? comm.last_error() : s.message());
          return s;
        }
        if (i >= point.warmups) mine.push_back(times.transfer_s);
      }
    }
    std::vector<double> all(mine.size() * ranks);
    if (const Status s =
            control.all_gather(mine.data(), all.data(), mine.size(), DType::f64, {}, Deadline::after(timeout_s));
        !s.ok()) {
      why->format("probing the link: %s", control.last_error());
      return s;
    }
    if (!gate::fit_probe(all, static_cast<uint32_t>(ranks), link).ok()) *link = {};  // the gate stays dense and says so
    return {};
  } catch (const std::bad_alloc&) {
    why->format("out of memory while probing the link");
    return StatusCode::out_of_memory;
  }
}

}  // namespace gradgate
