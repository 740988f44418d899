// Drives an exchange over a Communicator.
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

Status perform(Communicator& comm, const CollectiveCall& call, Deadline deadline) noexcept {
  switch (call.kind) {
    case Collective::all_reduce:
      return comm.all_reduce_sum(call.send, call.recv, call.count, call.dtype, {}, deadline);
    case Collective::all_gather:
      return comm.all_gather(call.send, call.recv, call.count, call.dtype, {}, deadline);
    case Collective::all_to_all:
      return comm.all_to_all(call.send, call.recv, call.count, call.dtype, {}, deadline);
    case Collective::reduce_scatter:
      return comm.reduce_scatter_sum(call.send, call.recv, call.count, call.dtype, {}, deadline);
    default:
      return StatusCode::internal;  // no exchange asks for more
  }
}

}  // namespace

Status run_exchange(Communicator& comm, const ExchangeArgs& args, double timeout_s, const CodecRates& rates,
                    ExchangeTimes* times, Message* why, const NodeTiers* tiers) noexcept {
  const ExchangeShape& shape = args.shape;
  const char* name = exchange_name(shape.candidate.exchange);
  const auto explain = [&](const char* operation, const char* text) {
    if (why != nullptr)
      why->format("%s by %s%s%s: %s", format_codec(shape.candidate.codec).text, name, operation[0] ? ", " : "",
                  operation, text);
  };
  ExchangeTimes spent;
  if (shape.rank != comm.rank() || shape.ranks != comm.size()) {
    Message text;
    text.format("the shape is of rank %d of %d, the communicator of rank %d of %d", shape.rank, shape.ranks,
                comm.rank(), comm.size());
    explain("", text.text);
    return StatusCode::invalid_argument;
  }
  const bool two_tiers = shape.candidate.exchange == Exchange::hierarchical;
  if (two_tiers &&
      (tiers == nullptr || tiers->node == nullptr || tiers->between == nullptr ||
       tiers->node->size() != shape.ranks_per_node || tiers->between->size() * tiers->node->size() != shape.ranks)) {
    explain("", "its two communicators are missing, or have other sizes than the shape says");
    return StatusCode::invalid_argument;
  }
  const auto of = [&](Tier tier) -> Communicator& {
    return tier == Tier::node ? *tiers->node : tier == Tier::between ? *tiers->between : comm;
  };
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
    status = perform(of(call.tier), call, deadline_after(timeout_s));
    lap.add_to(&spent.transfer_s);
    if (!status.ok()) {
      explain(collective_name(call.kind), of(call.tier).last_error());
      return status;
    }
  }
  spent.non_finite = machine.non_finite();
  if (times != nullptr) *times = spent;
  return {};
}

}  // namespace gradgate
