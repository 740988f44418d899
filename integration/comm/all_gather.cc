// The all_gather exchange: encode the whole vector, gather everybody's payload, decode and add them in rank order. One
// collective; a rank that cannot encode sends an error payload, and every rank looks at all payloads before it writes.
#include "gradgate/exchange.h"
#include "integration/comm/all_gather_layout.h"
#include "integration/comm/slot.h"

namespace gradgate {

using comm::AllGatherBuffers;

void ExchangeMachine::begin_all_gather() noexcept {
  const AllGatherBuffers buffers(args_.shape, args_.workspace.data());
  encode_whole(static_cast<uint32_t>(args_.shape.rank), buffers.slot(args_.shape.rank), buffers.codec);
}

Status ExchangeMachine::next_all_gather(CollectiveCall* call) noexcept {
  const ExchangeShape& shape = args_.shape;
  const AllGatherBuffers buffers(shape, args_.workspace.data());
  if (phase_ == Phase::ready) {
    phase_ = Phase::stage1;
    const Bytes own = buffers.slot(shape.rank);
    if (!failed_.ok()) comm::put_error(args_, shape.count, failed_.code(), own);
    *call = {Collective::all_gather, own.data(), buffers.slots, buffers.slot_bytes, DType::u8};
    return {};
  }
  phase_ = Phase::done;
  const comm::Slots slots{buffers.slots, buffers.slot_bytes, shape.ranks, buffers.views};
  inspect_slots(0, slots, -1, nullptr, shape.count, buffers.codec);
  if (!failed_.ok()) return failed_;
  const Status status = comm::decode_slots(args_, slots, static_cast<float>(1.0 / divisor_), buffers.codec);
  if (!status.ok()) {
    Message text;
    text.format("all_gather: rank %d could not decode the payloads: %s", shape.rank, status.message());
    blame(status, text.text);
  }
  return failed_;
}

}  // namespace gradgate
