// The all_gather exchange: encode the whole vector, gather everybody's payload, decode and add them in rank order. One
// collective; a rank that cannot encode sends an error payload, and every rank looks at all payloads before it writes.
#include <new>

#include "gradgate/exchange.h"
#include "integration/comm/all_gather_layout.h"
#include "integration/comm/slot.h"

namespace gradgate {

using comm::AllGatherBuffers;

void ExchangeMachine::begin_all_gather() noexcept {
  const ExchangeShape& shape = args_.shape;
  const AllGatherBuffers buffers(shape, args_.workspace.data());
  Seed seed = args_.seed;
  seed.stream = static_cast<uint32_t>(shape.rank);
  EncodeStats stats;
  const Status status = encode(shape.candidate.codec,
                               {.gradient = args_.gradient,
                                .residual = args_.feedback == Feedback::apply ? args_.residual : nullptr,
                                .payload = buffers.slot(shape.rank),
                                .workspace = buffers.codec,
                                .seed = seed,
                                .executor = args_.executor,
                                .threshold = args_.threshold},
                               &stats);
  non_finite_ = stats.non_finite;
  if (status.ok()) return;
  Message text;
  text.format("all_gather: rank %d could not encode its gradient: %s", shape.rank, status.message());
  blame(status, text.text);
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
  auto* views = reinterpret_cast<ConstBytes*>(buffers.views);
  for (int peer = 0; peer < shape.ranks; ++peer) {
    new (&views[peer]) ConstBytes(buffers.slot(peer));
    if (failed_.ok()) inspect(0, peer, shape.count, views[peer]);
  }
  if (!failed_.ok()) return failed_;
  const Status status = decode_sum(shape.candidate.codec, {.payloads = {views, static_cast<size_t>(shape.ranks)},
                                                           .gradient = shape.dtype,
                                                           .out = args_.gradient,
                                                           .scale = static_cast<float>(1.0 / divisor_),
                                                           .workspace = buffers.codec,
                                                           .executor = args_.executor});
  if (!status.ok()) {
    Message text;
    text.format("all_gather: rank %d could not decode the payloads: %s", shape.rank, status.message());
    blame(status, text.text);
  }
  return failed_;
}

}  // namespace gradgate
