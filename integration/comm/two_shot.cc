// The two_shot exchange: encode the foreign shards, all-to-all, sum and re-encode the own shard at its owner,
// all-gather, decode. Both collectives are always performed; a rank that cannot go on sends error payloads, and every
// rank looks before it writes.
#include <cstring>
#include <new>

#include "gradgate/exchange.h"
#include "integration/comm/slot.h"
#include "integration/comm/two_shot_layout.h"

namespace gradgate {
namespace {

using comm::payload_in;
using comm::put_error;
using comm::Shard;
using comm::Shards;
using comm::TwoShotBuffers;
using comm::zero_rest;

ConstVec part(const ExchangeArgs& args, Shard shard) noexcept {
  const size_t element = dtype_bytes(args.shape.dtype);
  return {static_cast<const std::byte*>(args.gradient.data) + shard.first * element, shard.count, args.shape.dtype};
}

float* residual_of(const ExchangeArgs& args, Shard shard) noexcept {
  return args.feedback == Feedback::apply ? args.residual + shard.first : nullptr;
}

Bytes slot(std::byte* slots, const Shards& shards, int rank) noexcept {
  return {slots + static_cast<size_t>(rank) * shards.slot_bytes, shards.slot_bytes};
}

}  // namespace

void ExchangeMachine::begin_two_shot() noexcept {
  const ExchangeShape& shape = args_.shape;
  const Shards shards(shape);
  const TwoShotBuffers buffers(shape, shards, args_.workspace.data());
  for (int peer = 0; peer < shape.ranks; ++peer) {
    const Bytes out = slot(buffers.outgoing, shards, peer);
    if (peer == shape.rank) {
      std::memset(out.data(), 0, out.size());
      continue;
    }
    const Shard shard = shards[peer];
    Seed seed = args_.seed;
    seed.stream = static_cast<uint32_t>(shape.rank);
    seed.first = args_.seed.first + shard.first;
    EncodeStats stats;
    const Status status = encode(shape.candidate.codec,
                                 {.gradient = part(args_, shard),
                                  .residual = residual_of(args_, shard),
                                  .payload = payload_in(shape, shard.count, out),
                                  .workspace = buffers.codec,
                                  .seed = seed,
                                  .executor = args_.executor},
                                 &stats);
    non_finite_ += stats.non_finite;
    zero_rest(shape, shard.count, out);
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
  for (int peer = 0; peer < shape.ranks && !failed_.ok(); ++peer) {
    if (peer != shape.rank) put_error(args_, shards[peer].count, failed_.code(), slot(buffers.outgoing, shards, peer));
  }
  *call = {Collective::all_to_all, buffers.outgoing, buffers.incoming, shards.slot_bytes, DType::u8};
}

void ExchangeMachine::send_sum(CollectiveCall* call) noexcept {
  const ExchangeShape& shape = args_.shape;
  const Shards shards(shape);
  const TwoShotBuffers buffers(shape, shards, args_.workspace.data());
  const Shard own = shards[shape.rank];
  const Bytes sum = slot(buffers.outgoing, shards, shape.rank);
  auto* views = reinterpret_cast<ConstBytes*>(buffers.views);
  for (int peer = 0; peer < shape.ranks; ++peer) {
    ConstBytes payload = payload_in(shape, own.count, slot(buffers.incoming, shards, peer));
    if (peer == shape.rank) payload = {};
    new (&views[peer]) ConstBytes(payload);
    if (peer != shape.rank && failed_.ok()) inspect(1, peer, own.count, payload);
  }
  if (failed_.ok()) {
    Seed seed = args_.seed;
    seed.stream = static_cast<uint32_t>(shape.ranks + shape.rank);
    seed.first = args_.seed.first + own.first;
    EncodeStats stats;
    const Status status = reduce_encode(shape.candidate.codec,
                                        {.payloads = {views, static_cast<size_t>(shape.ranks)},
                                         .self = static_cast<size_t>(shape.rank),
                                         .gradient = part(args_, own),
                                         .residual = residual_of(args_, own),
                                         .payload = payload_in(shape, own.count, sum),
                                         .workspace = buffers.codec,
                                         .seed = seed,
                                         .executor = args_.executor},
                                        &stats);
    non_finite_ += stats.non_finite;
    zero_rest(shape, own.count, sum);
    if (!status.ok()) {
      Message text;
      text.format("two_shot, stage 2: rank %d could not encode its sum: %s", shape.rank, status.message());
      blame(status, text.text);
    }
  }
  if (!failed_.ok()) put_error(args_, own.count, failed_.code(), sum);
  *call = {Collective::all_gather, sum.data(), buffers.outgoing, shards.slot_bytes, DType::u8};
}

Status ExchangeMachine::receive_sums() noexcept {
  const ExchangeShape& shape = args_.shape;
  const Shards shards(shape);
  const TwoShotBuffers buffers(shape, shards, args_.workspace.data());
  // All payloads are good before the first is decoded: the gradient changes as a whole or not at all.
  for (int owner = 0; owner < shape.ranks && failed_.ok(); ++owner) {
    inspect(2, owner, shards[owner].count,
            payload_in(shape, shards[owner].count, slot(buffers.outgoing, shards, owner)));
  }
  const float scale = static_cast<float>(1.0 / divisor_);
  for (int owner = 0; owner < shape.ranks && failed_.ok(); ++owner) {
    const Shard shard = shards[owner];
    const ConstVec out = part(args_, shard);
    const Status status =
        decode(shape.candidate.codec, {.payload = payload_in(shape, shard.count, slot(buffers.outgoing, shards, owner)),
                                       .gradient = shape.dtype,
                                       .out = {const_cast<void*>(out.data), out.count, out.dtype},
                                       .scale = scale,
                                       .executor = args_.executor});
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
