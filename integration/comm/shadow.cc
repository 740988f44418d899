// The codec work of an exchange without the exchange: what the gate measures before it opens.
#include <cstring>
#include <new>

#include "gradgate/exchange.h"
#include "integration/comm/all_gather_layout.h"
#include "integration/comm/all_reduce_layout.h"
#include "integration/comm/codec_time.h"
#include "integration/comm/hierarchical_layout.h"
#include "integration/comm/two_shot_layout.h"

namespace gradgate {
namespace {

using comm::charge;
using comm::Lap;
using comm::Shard;
using comm::Shards;

// A copy of the residual for the exchange that is shadowed; a null one stands for zeros. Null without feedback.
float* shadow_residual(const ExchangeArgs& args, std::byte* room) noexcept {
  if (args.feedback != Feedback::apply) return nullptr;
  const size_t bytes = args.shape.count * sizeof(float);
  if (args.residual == nullptr) {
    std::memset(room, 0, bytes);
  } else {
    std::memcpy(room, args.residual, bytes);
  }
  return reinterpret_cast<float*>(room);
}

/// Scratch of a shadow of one stage: the exchange's own workspace, and copies of what it would change.
template <class ExchangeBuffers>
struct CopyBuffers {
  ExchangeBuffers exchange;
  std::byte *residual, *out;
  size_t bytes;

  CopyBuffers(const ExchangeShape& shape, std::byte* base) noexcept : exchange(shape, nullptr) {
    comm::WorkspaceCarver carver(base);
    exchange = ExchangeBuffers(shape, carver.take(exchange.bytes, 1));
    residual = carver.take(shape.count, sizeof(float));
    out = carver.take(shape.count, dtype_bytes(shape.dtype));
    bytes = carver.bytes();
  }
};
using GatherShadowBuffers = CopyBuffers<comm::AllGatherBuffers>;
using ReduceShadowBuffers = CopyBuffers<comm::AllReduceBuffers>;

/// Scratch of a shadow: a slot per rank (payloads of the foreign shards, the sum in the own slot), a slot for the
/// payload that stands in where a foreign shard has another length than the own one, copies of what an exchange would
/// change, and the codec's workspace.
struct ShadowBuffers {
  std::byte *slots, *stand_in, *views, *residual, *out;
  Bytes codec;
  size_t bytes;

  ShadowBuffers(const ExchangeShape& shape, const Shards& shards, std::byte* base) noexcept {
    const auto ranks = static_cast<size_t>(shape.ranks);
    const size_t codec_bytes = workspace_bytes(shape.candidate.codec, shape.dtype, shards.elements, shape.width);
    comm::WorkspaceCarver carver(base);
    slots = carver.take(ranks, shards.slot_bytes);
    stand_in = carver.take(1, shards.slot_bytes);
    views = carver.take(ranks, sizeof(ConstBytes));
    residual = carver.take(shape.count, sizeof(float));
    out = carver.take(shape.count, dtype_bytes(shape.dtype));
    codec = {carver.take(codec_bytes, 1), codec_bytes};
    bytes = carver.bytes();
  }
};

Status shadow_two_shot(Communicator& clock, const ExchangeArgs& args, const ShadowBuffers& buffers,
                       const Shards& shards, const CodecRates& rates, ExchangeTimes* times) noexcept {
  const ExchangeShape& shape = args.shape;
  const CodecSpec& spec = shape.candidate.codec;
  const size_t element = dtype_bytes(shape.dtype);
  auto* views = reinterpret_cast<ConstBytes*>(buffers.views);
  const auto part = [&](Shard shard) {
    return ConstVec(static_cast<const std::byte*>(args.gradient.data) + shard.first * element, shard.count,
                    shape.dtype);
  };
  const auto payload = [&](std::byte* slot, Shard shard) {
    return Bytes{slot, payload_bytes(spec, shape.dtype, shard.count)};
  };
  const auto slot = [&](int rank) { return buffers.slots + static_cast<size_t>(rank) * shards.slot_bytes; };
  Seed seed = args.seed;
  seed.stream = static_cast<uint32_t>(shape.rank);
  seed.first = shards[shape.rank].first;

  // Untimed: the copies, and the payload that stands in for peers whose shards have another length than the own one.
  const Shard own = shards[shape.rank];
  float* const residual = shadow_residual(args, buffers.residual);
  GRADGATE_TRY(encode(spec, {.gradient = part(own),
                             .payload = payload(buffers.stand_in, own),
                             .workspace = buffers.codec,
                             .seed = seed,
                             .executor = args.executor}));

  Lap lap(clock);
  for (int peer = 0; peer < shape.ranks; ++peer) {
    const Shard shard = shards[peer];
    const bool fits = shard.count == own.count && peer != shape.rank;
    new (&views[peer]) ConstBytes(fits ? payload(slot(peer), shard) : payload(buffers.stand_in, own));
    if (peer == shape.rank) continue;
    seed.first = shard.first;
    GRADGATE_TRY(encode(spec, {.gradient = part(shard),
                               .residual = residual == nullptr ? nullptr : residual + shard.first,
                               .payload = payload(slot(peer), shard),
                               .workspace = buffers.codec,
                               .seed = seed,
                               .executor = args.executor}));
  }
  seed.stream = static_cast<uint32_t>(shape.ranks + shape.rank);
  seed.first = own.first;
  GRADGATE_TRY(reduce_encode(spec, {.payloads = {views, static_cast<size_t>(shape.ranks)},
                                    .self = static_cast<size_t>(shape.rank),
                                    .gradient = part(own),
                                    .residual = residual == nullptr ? nullptr : residual + own.first,
                                    .payload = payload(slot(shape.rank), own),
                                    .workspace = buffers.codec,
                                    .seed = seed,
                                    .executor = args.executor}));
  charge(clock, shape, rates.encode_bytes_per_s);
  lap.add_to(&times->encode_s);
  for (int owner = 0; owner < shape.ranks; ++owner) {
    const Shard shard = shards[owner];
    GRADGATE_TRY(decode(spec, {.payload = payload(slot(owner), shard),
                               .gradient = shape.dtype,
                               .out = {buffers.out + shard.first * element, shard.count, shape.dtype},
                               .scale = static_cast<float>(1.0 / shape.ranks),
                               .executor = args.executor}));
  }
  charge(clock, shape, rates.decode_bytes_per_s);
  lap.add_to(&times->decode_s);
  return {};
}

Status shadow_all_gather(Communicator& clock, const ExchangeArgs& args, const GatherShadowBuffers& buffers,
                         const CodecRates& rates, ExchangeTimes* times) noexcept {
  const ExchangeShape& shape = args.shape;
  const CodecSpec& spec = shape.candidate.codec;
  float* const residual = shadow_residual(args, buffers.residual);
  auto* views = reinterpret_cast<ConstBytes*>(buffers.exchange.views);
  Seed seed = args.seed;
  seed.stream = static_cast<uint32_t>(shape.rank);

  Lap lap(clock);
  const Bytes own = buffers.exchange.slot(shape.rank);
  GRADGATE_TRY(encode(spec, {.gradient = args.gradient,
                             .residual = residual,
                             .payload = own,
                             .workspace = buffers.exchange.codec,
                             .seed = seed,
                             .executor = args.executor}));
  charge(clock, shape, rates.encode_bytes_per_s);
  lap.add_to(&times->encode_s);
  // Untimed: a copy for every peer, so that as many different payloads are read as in the exchange.
  for (int peer = 0; peer < shape.ranks; ++peer) {
    const Bytes slot = buffers.exchange.slot(peer);
    if (peer != shape.rank) std::memcpy(slot.data(), own.data(), own.size());
    new (&views[peer]) ConstBytes(slot);
  }
  Lap decoding(clock);
  GRADGATE_TRY(decode_sum(spec, {.payloads = {views, static_cast<size_t>(shape.ranks)},
                                 .gradient = shape.dtype,
                                 .out = {buffers.out, shape.count, shape.dtype},
                                 .scale = static_cast<float>(1.0 / shape.ranks),
                                 .workspace = buffers.exchange.codec,
                                 .executor = args.executor}));
  charge(clock, shape, rates.decode_bytes_per_s);
  decoding.add_to(&times->decode_s);
  return {};
}

Status shadow_all_reduce(Communicator& clock, const ExchangeArgs& args, const ReduceShadowBuffers& buffers,
                         const CodecRates& rates, ExchangeTimes* times) noexcept {
  const ExchangeShape& shape = args.shape;
  const CodecSpec& spec = shape.candidate.codec;
  float* const residual = shadow_residual(args, buffers.residual);
  Seed seed = args.seed;
  seed.stream = 0xffffffffu;
  Lap lap(clock);
  GRADGATE_TRY(encode(spec, {.gradient = args.gradient,
                             .residual = residual,
                             .payload = buffers.exchange.payload,
                             .workspace = buffers.exchange.codec,
                             .seed = seed,
                             .executor = args.executor}));
  charge(clock, shape, rates.encode_bytes_per_s);
  lap.add_to(&times->encode_s);
  GRADGATE_TRY(decode(spec, {.payload = buffers.exchange.payload,
                             .gradient = shape.dtype,
                             .out = {buffers.out, shape.count, shape.dtype},
                             .scale = static_cast<float>(1.0 / shape.ranks),
                             .executor = args.executor}));
  charge(clock, shape, rates.decode_bytes_per_s);
  lap.add_to(&times->decode_s);
  return {};
}

}  // namespace

size_t exchange_shadow_bytes(const ExchangeShape& shape) noexcept {
  if (exchange_workspace_bytes(shape) == 0) return 0;  // nothing would be encoded, or the shape is not valid
  if (shape.candidate.exchange == Exchange::hierarchical) {
    ExchangeShape first = comm::NodeShard(shape).between();
    first.count = comm::NodeShard(shape).count_of(0);
    return exchange_shadow_bytes(first) + comm::WorkspaceCarver::kAlign + first.count * sizeof(float);
  }
  if (shape.candidate.exchange == Exchange::all_gather) return GatherShadowBuffers(shape, nullptr).bytes;
  if (shape.candidate.exchange == Exchange::all_reduce) return ReduceShadowBuffers(shape, nullptr).bytes;
  return ShadowBuffers(shape, Shards(shape), nullptr).bytes;
}

Status shadow_exchange(Communicator& clock, const ExchangeArgs& args, Bytes scratch, const CodecRates& rates,
                       ExchangeTimes* times) noexcept {
  if (times == nullptr) return StatusCode::invalid_argument;
  *times = {};
  const ExchangeShape& shape = args.shape;
  if (args.gradient.count != shape.count || args.gradient.dtype != shape.dtype) return StatusCode::invalid_argument;
  if (args.gradient.data == nullptr && shape.count != 0) return StatusCode::invalid_argument;
  if (exchange_wire_bytes(shape) == 0 && shape.count != 0) return StatusCode::unsupported;
  if (!comm::has_codec_work(shape)) return {};
  const size_t needed = exchange_shadow_bytes(shape);
  if (scratch.size() < needed) return {StatusCode::workspace_too_small, static_cast<int64_t>(needed)};
  if (shape.candidate.exchange == Exchange::hierarchical) {
    // The codec sees one shard of the node's sum: the first elements of this rank's gradient stand in for it.
    ExchangeArgs part = args;
    part.shape = comm::NodeShard(shape).between();
    part.shape.count = comm::NodeShard(shape).count_of(0);
    comm::WorkspaceCarver carver(scratch.data());
    auto* x = reinterpret_cast<float*>(carver.take(part.shape.count, sizeof(float)));
    GRADGATE_TRY(comm::widen_vector(args, {args.gradient.data, part.shape.count, shape.dtype}, x));
    part.gradient = {x, part.shape.count, DType::f32};
    const size_t used =
        static_cast<size_t>(reinterpret_cast<std::byte*>(x) - scratch.data()) + part.shape.count * sizeof(float);
    return shadow_exchange(clock, part, scratch.subspan(used), rates, times);
  }
  if (shape.candidate.exchange == Exchange::all_gather)
    return shadow_all_gather(clock, args, GatherShadowBuffers(shape, scratch.data()), rates, times);
  if (shape.candidate.exchange == Exchange::all_reduce)
    return shadow_all_reduce(clock, args, ReduceShadowBuffers(shape, scratch.data()), rates, times);
  const Shards shards(shape);
  return shadow_two_shot(clock, args, ShadowBuffers(shape, shards, scratch.data()), shards, rates, times);
}

}  // namespace gradgate
