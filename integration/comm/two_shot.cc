// The two_shot exchange: encode the foreign shards, all-to-all, sum and re-encode the own shard at its owner,
// all-gather, decode. Both collectives are always performed; a rank that cannot go on sends error payloads, and every
// rank looks before it writes.
#include "gradgate/exchange.h"
#include "integration/comm/slot.h"
#include "integration/comm/two_shot_layout.h"

namespace gradgate {
namespace {

using comm::Shard;
using comm::Shards;
using comm::Slots;
using comm::TwoShotBuffers;

Vec part(const ExchangeArgs& args, Shard shard) noexcept {
  const size_t element = dtype_bytes(args.shape.dtype);
  return {static_cast<std::byte*>(args.gradient.data) + shard.first * element, shard.count, args.shape.dtype};
}

float* residual_of(const ExchangeArgs& args, Shard shard) noexcept {
  return args.feedback == Feedback::apply ? args.residual + shard.first : nullptr;
}

Slots outgoing(const ExchangeArgs& args, const Shards& shards, const TwoShotBuffers& buffers) noexcept {
  return {buffers.outgoing, shards.slot_bytes, args.shape.ranks, buffers.views};
}
Slots incoming(const ExchangeArgs& args, const Shards& shards, const TwoShotBuffers& buffers) noexcept {
  return {buffers.incoming, shards.slot_bytes, args.shape.ranks, buffers.views};
}

}  // namespace

void ExchangeMachine::begin_two_shot() noexcept {
  const ExchangeShape& shape = args_.shape;
  const Shards shards(shape);
  const TwoShotBuffers buffers(shape, shards, args_.workspace.data());
  const Slots out = outgoing(args_, shards, buffers);
  for (int peer = 0; peer < shape.ranks; ++peer) {
    const Shard shard = shards[peer];
    Seed seed = args_.seed;
    seed.stream = static_cast<uint32_t>(shape.rank);
    seed.first = args_.seed.first + shard.first;
    const Status status = peer == shape.rank ? comm::zero(args_, out[peer])
                                             : comm::encode_part(args_, part(args_, shard), residual_of(args_, shard),
                                                                 seed, out[peer], buffers.codec, &non_finite_);
    if (!status.ok()) {
      Message text;
      text.format("two_shot, stage 1: rank %d could not encode the shard of rank %d: %s", shape.rank, peer,
                  status.message());
      blame(status, text.text);
      return;
    }
  }
}

Status ExchangeMachine::next_two_shot(CollectiveCall* call) noexcept {
  switch (phase_) {
    case Phase::ready:
      phase_ = Phase::stage1;
      send_shards(call);
      return {};
    case Phase::stage1:
      phase_ = Phase::stage2;
      send_sum(call);
      return {};
    default:
      phase_ = Phase::done;
      return receive_sums();
  }
}

void ExchangeMachine::send_shards(CollectiveCall* call) noexcept {
  const ExchangeShape& shape = args_.shape;
  const Shards shards(shape);
  const TwoShotBuffers buffers(shape, shards, args_.workspace.data());
  const Slots out = outgoing(args_, shards, buffers);
  for (int peer = 0; peer < shape.ranks && !failed_.ok(); ++peer) {
    if (peer != shape.rank) comm::put_error(args_, shards[peer].count, failed_.code(), out[peer]);
  }
  *call = {Collective::all_to_all, buffers.outgoing, buffers.incoming, shards.slot_bytes, DType::u8};
}

void ExchangeMachine::send_sum(CollectiveCall* call) noexcept {
  const ExchangeShape& shape = args_.shape;
  const Shards shards(shape);
  const TwoShotBuffers buffers(shape, shards, args_.workspace.data());
  const Shard own = shards[shape.rank];
  const Bytes sum = outgoing(args_, shards, buffers)[shape.rank];
  const Slots in = incoming(args_, shards, buffers);
  inspect_slots(1, in, shape.rank, nullptr, own.count, buffers.codec);
  if (failed_.ok()) {
    Seed seed = args_.seed;
    seed.stream = static_cast<uint32_t>(shape.ranks + shape.rank);
    seed.first = args_.seed.first + own.first;
    const Status status =
        comm::encode_sum(args_, in, part(args_, own), residual_of(args_, own), seed, sum, buffers.codec, &non_finite_);
    if (!status.ok()) {
      Message text;
      text.format("two_shot, stage 2: rank %d could not encode its sum: %s", shape.rank, status.message());
      blame(status, text.text);
    }
  }
  if (!failed_.ok()) comm::put_error(args_, own.count, failed_.code(), sum);
  *call = {Collective::all_gather, sum.data(), buffers.outgoing, shards.slot_bytes, DType::u8};
}

Status ExchangeMachine::receive_sums() noexcept {
  const ExchangeShape& shape = args_.shape;
  const Shards shards(shape);
  const TwoShotBuffers buffers(shape, shards, args_.workspace.data());
  const Slots sums = outgoing(args_, shards, buffers);
  // All payloads are good before the first is decoded: the gradient changes as a whole or not at all.
  inspect_slots(2, sums, -1, &shards, 0, buffers.codec);
  const float scale = static_cast<float>(1.0 / divisor_);
  for (int owner = 0; owner < shape.ranks && failed_.ok(); ++owner) {
    const Status status = comm::decode_part(args_, sums[owner], part(args_, shards[owner]), scale, buffers.codec);
    if (!status.ok()) {
      Message text;
      text.format("two_shot, stage 2: rank %d could not decode the sum of rank %d: %s", shape.rank, owner,
                  status.message());
      blame(status, text.text);
    }
  }
  return failed_;
}

}  // namespace gradgate
