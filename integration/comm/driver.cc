// Drives an exchange over a Communicator.
#include "gradgate/device_exchange.h"
#include "gradgate/exchange.h"
#include "integration/comm/codec_time.h"

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

Status run_exchange(Communicator& comm, const ExchangeArgs& args, double timeout_s, const CodecRates& rates,
                    ExchangeTimes* times, Message* why, const NodeTiers* tiers) noexcept {
  const ExchangeShape& shape = args.shape;
  const auto explain = [&](const char* operation, const char* text) { explain_failure(shape, operation, text, why); };
  ExchangeTimes spent;
  GRADGATE_TRY(check_rank(comm, shape, why));
  GRADGATE_TRY(check_tiers(tiers, shape, why));
  const bool coded = has_codec_work(shape);
  Lap lap(comm);
  ExchangeMachine machine;
  Status status = machine.begin(args);
  if (!status.ok()) {
    explain("", machine.last_error());
    return status;
  }
  charge(comm, shape, rates.encode_bytes_per_s);
  lap.add_to(coded ? &spent.encode_s : &spent.transfer_s);
  for (;;) {
    CollectiveCall call;
    status = machine.next(&call);
    if (!status.ok()) {
      spent.told = machine.told();
      if (times != nullptr) *times = spent;
      explain("", machine.last_error());
      return status;
    }
    const bool complete = call.kind == Collective::none;
    if (complete) charge(comm, shape, rates.decode_bytes_per_s);
    lap.add_to(!coded ? &spent.transfer_s : complete ? &spent.decode_s : &spent.encode_s);
    if (complete) break;
    Communicator& on = of_tier(call.tier, comm, tiers);
    status = perform(on, call, {}, deadline_after(timeout_s));
    lap.add_to(&spent.transfer_s);
    if (!status.ok()) {
      explain(collective_name(call.kind), on.last_error());
      return status;
    }
  }
  spent.non_finite = machine.non_finite();
  if (times != nullptr) *times = spent;
  return {};
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
