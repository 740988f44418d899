// Drives an exchange over a Communicator.
#include "integration/comm/driver.h"

#include <algorithm>

#include "gradgate/device_exchange.h"

namespace gradgate {
namespace {

using comm::charge;
using comm::has_codec_work;
using comm::Lap;

Deadline deadline_after(double seconds) noexcept {
  if (!(seconds < 1e9)) return {};  // thirty years: no deadline, and no overflow of the clock
  return Deadline::after(seconds > 0 ? seconds : 0);
}

Status perform(Communicator& comm, const CollectiveCall& call, Stream stream, Deadline deadline) noexcept {
  switch (call.kind) {
    case Collective::all_reduce:
      return comm.all_reduce_sum(call.send, call.recv, call.count, call.dtype, stream, deadline);
    case Collective::all_gather:
      return comm.all_gather(call.send, call.recv, call.count, call.dtype, stream, deadline);
    case Collective::all_to_all:
      return comm.all_to_all(call.send, call.recv, call.count, call.dtype, stream, deadline);
    case Collective::reduce_scatter:
      return comm.reduce_scatter_sum(call.send, call.recv, call.count, call.dtype, stream, deadline);
    default:
      return StatusCode::internal;  // no exchange asks for more
  }
}

// What both drivers say of a failure: codec, exchange, operation.
void explain_failure(const ExchangeShape& shape, const char* operation, const char* text, Message* why) noexcept {
  if (why == nullptr) return;
  why->format("%s by %s%s%s: %s", format_codec(shape.candidate.codec).text, exchange_name(shape.candidate.exchange),
              operation[0] ? ", " : "", operation, text);
}

Status check_rank(const Communicator& comm, const ExchangeShape& shape, Message* why) noexcept {
  if (shape.rank == comm.rank() && shape.ranks == comm.size()) return {};
  Message text;
  text.format("the shape is of rank %d of %d, the communicator of rank %d of %d", shape.rank, shape.ranks, comm.rank(),
              comm.size());
  explain_failure(shape, "", text.text, why);
  return StatusCode::invalid_argument;
}

Status check_tiers(const NodeTiers* tiers, const ExchangeShape& shape, Message* why) noexcept {
  if (shape.candidate.exchange != Exchange::hierarchical ||
      (tiers != nullptr && tiers->node != nullptr && tiers->between != nullptr &&
       tiers->node->size() == shape.ranks_per_node && tiers->between->size() * tiers->node->size() == shape.ranks))
    return {};
  explain_failure(shape, "", "its two communicators are missing, or have other sizes than the shape says", why);
  return StatusCode::invalid_argument;
}

Communicator& of_tier(Tier tier, Communicator& comm, const NodeTiers* tiers) noexcept {
  return tier == Tier::node ? *tiers->node : tier == Tier::between ? *tiers->between : comm;
}

}  // namespace

Status comm::ExchangeRun::start(Communicator& comm, const ExchangeArgs& args, double timeout_s, const CodecRates& rates,
                                const NodeTiers* tiers, bool leave, Message* why) noexcept {
  comm_ = &comm;
  shape_ = args.shape, rates_ = rates, timeout_s_ = timeout_s;
  times_ = {}, under_way_ = false;
  GRADGATE_TRY(check_rank(comm, shape_, why));
  GRADGATE_TRY(check_tiers(tiers, shape_, why));
  const bool coded = has_codec_work(shape_);
  Lap lap(comm);
  if (const Status status = machine_.begin(args); !status.ok()) {
    explain_failure(shape_, "", machine_.last_error(), why);
    return status;
  }
  charge(comm, shape_, rates.encode_bytes_per_s);
  lap.add_to(coded ? &times_.encode_s : &times_.transfer_s);
  for (;;) {
    CollectiveCall call;
    GRADGATE_TRY(next(&call, &lap, why));
    if (call.kind == Collective::none) return {};
    // The gather among all ranks is the last collective of any exchange that has one.
    under_way_ = leave && call.kind == Collective::all_gather && call.tier == Tier::all && comm.can_start();
    const Deadline deadline = deadline_after(timeout_s);
    Communicator& on = of_tier(call.tier, comm, tiers);
    const Status status = under_way_ ? comm.start_all_gather(call.send, call.recv, call.count, call.dtype, deadline)
                                     : perform(on, call, {}, deadline);
    lap.add_to(&times_.transfer_s);
    started_s_ = comm.now();
    if (!status.ok()) {
      under_way_ = false;
      explain_failure(shape_, collective_name(call.kind), on.last_error(), why);
      return status;
    }
    if (under_way_) return {};
  }
}

// The next collective, or kind none after the decoding.
Status comm::ExchangeRun::next(CollectiveCall* call, Lap* lap, Message* why) noexcept {
  const Status status = machine_.next(call);
  if (!status.ok()) {
    times_.told = machine_.told();
    explain_failure(shape_, "", machine_.last_error(), why);
    return status;
  }
  const bool complete = call->kind == Collective::none;
  if (complete) charge(*comm_, shape_, rates_.decode_bytes_per_s);
  lap->add_to(!has_codec_work(shape_) ? &times_.transfer_s : complete ? &times_.decode_s : &times_.encode_s);
  if (complete) times_.non_finite = machine_.non_finite();
  return {};
}

Status comm::ExchangeRun::finish(double* wire_free_s, Message* why) noexcept {
  if (!under_way_) return {};
  under_way_ = false;
  const double asked_s = comm_->now();
  if (const Status status = comm_->finish_all_gather(deadline_after(timeout_s_)); !status.ok()) {
    explain_failure(shape_, collective_name(Collective::all_gather), comm_->last_error(), why);
    return status;
  }
  const double arrived_s = comm_->now();
  times_.transfer_s += arrived_s - std::max(started_s_, *wire_free_s);
  times_.transfer_seen = arrived_s - asked_s >= kSeenWait;
  *wire_free_s = arrived_s;
  Lap lap(*comm_);
  CollectiveCall call;
  return next(&call, &lap, why);
}

Status run_exchange(Communicator& comm, const ExchangeArgs& args, double timeout_s, const CodecRates& rates,
                    ExchangeTimes* times, Message* why, const NodeTiers* tiers) noexcept {
  comm::ExchangeRun run;
  const Status status = run.start(comm, args, timeout_s, rates, tiers, false, why);
  if (times != nullptr) *times = run.times();
  return status;
}

Status enqueue_exchange(Communicator& comm, const ExchangeArgs& args, double timeout_s, DeviceMarks* marks,
                        Message* why, const NodeTiers* tiers) noexcept {
  const ExchangeShape& shape = args.shape;
  GRADGATE_TRY(check_rank(comm, shape, why));
  GRADGATE_TRY(check_tiers(tiers, shape, why));
  if (args.device == nullptr || !comm.on_device()) {
    explain_failure(shape, "", "an exchange is enqueued with ExchangeArgs::device, over a communicator of devices",
                    why);
    return StatusCode::invalid_argument;
  }
  const Stream stream = args.device->stream;
  using Part = DeviceMarks::Part;
  const bool coded = has_codec_work(shape);
  const auto mark = [&](Part part) {
    if (marks != nullptr) marks->mark(coded ? part : Part::transfer, stream);
  };
  if (marks != nullptr) marks->begin(stream);
  ExchangeMachine machine, between;
  DevicePlace place = *args.device;
  place.between = &between;
  ExchangeArgs placed = args;
  placed.device = &place;
  Status status = machine.begin(placed);
  for (;;) {
    CollectiveCall call;
    if (status.ok()) status = machine.next(&call);
    if (!status.ok()) {
      explain_failure(shape, "", machine.last_error(), why);
      return status;
    }
    if (call.kind == Collective::none) break;
    mark(Part::encode);
    Communicator& on = of_tier(call.tier, comm, tiers);
    status = perform(on, call, stream, deadline_after(timeout_s));
    if (!status.ok()) {
      explain_failure(shape, collective_name(call.kind), on.last_error(), why);
      return status;
    }
    mark(Part::transfer);
  }
  mark(Part::decode);
  return {};
}

}  // namespace gradgate
