// The codec work of an exchange on a device without the exchange, timed by marks on the stream.
#include "gradgate/device_exchange.h"
#include "integration/comm/all_gather_layout.h"
#include "integration/comm/codec_time.h"
#include "integration/comm/hierarchical_layout.h"
#include "integration/comm/slot.h"
#include "integration/comm/two_shot_layout.h"
#include "kernels/cuda/runtime.h"

namespace gradgate {
namespace {

using comm::Shard;
using comm::Shards;
using comm::Slots;
using Part = DeviceMarks::Part;

/// Slots as in the exchange (one for what is summed), the payload that stands in for all peers', and copies of what an
/// exchange would change.
struct Buffers {
  Slots outgoing, incoming;
  float* residual = nullptr;
  std::byte* out = nullptr;
  Bytes codec;
  size_t bytes = 0;

  Buffers(const ExchangeShape& shape, std::byte* base) noexcept {
    const bool two_shot = shape.candidate.exchange == Exchange::two_shot;
    const size_t stride =
        two_shot ? Shards(shape).slot_bytes : payload_bytes(shape.candidate.codec, shape.dtype, shape.count);
    const size_t elements = two_shot ? Shards(shape).elements : shape.count;
    const int slots = shape.candidate.exchange == Exchange::all_reduce ? 1 : shape.ranks;
    comm::WorkspaceCarver carver(base);
    outgoing = {carver.take(static_cast<size_t>(two_shot ? slots : 0), stride), stride, slots, nullptr};
    incoming = {carver.take(static_cast<size_t>(slots), stride), stride, slots, nullptr};
    residual = reinterpret_cast<float*>(carver.take(shape.count, sizeof(float)));
    out = carver.take(shape.count, dtype_bytes(shape.dtype));
    const size_t work = comm::codec_work_bytes(shape, elements);
    codec = {carver.take(work, 1), work};
    bytes = carver.bytes();
  }
};

/// `from`'s payload in every other slot: untimed, so that as many different payloads are read as in the exchange.
Status fill_slots(const ExchangeArgs& args, const Slots& slots, int from) noexcept {
  for (int peer = 0; peer < slots.ranks; ++peer) {
    if (peer == from) continue;
    const int error = kernels::cuda::runtime()->copy(slots[peer].data(), slots[from].data(), slots.stride,
                                                     args.device->stream.handle);
    if (error != 0) return {StatusCode::internal, error};
  }
  return {};
}

Status enqueue_two_shot(const ExchangeArgs& args, const Buffers& buffers, float* residual,
                        DeviceMarks* marks) noexcept {
  const ExchangeShape& shape = args.shape;
  const Shards shards(shape);
  const Shard own = shards[shape.rank];
  const Stream stream = args.device->stream;
  const auto part = [&](void* data, Shard shard) {
    return Vec{static_cast<std::byte*>(data) + shard.first * dtype_bytes(shape.dtype), shard.count, shape.dtype};
  };
  const auto kept = [&](Shard shard) { return residual == nullptr ? nullptr : residual + shard.first; };
  Seed seed = args.seed;
  seed.stream = static_cast<uint32_t>(shape.rank);
  seed.first = args.seed.first + own.first;
  uint64_t unused = 0;
  GRADGATE_TRY(comm::encode_part(args, part(args.gradient.data, own), nullptr, seed, buffers.incoming[shape.rank],
                                 buffers.codec, &unused));
  GRADGATE_TRY(fill_slots(args, buffers.incoming, shape.rank));

  marks->begin(stream);
  for (int peer = 0; peer < shape.ranks; ++peer) {
    if (peer == shape.rank) continue;
    const Shard shard = shards[peer];
    seed.first = args.seed.first + shard.first;
    GRADGATE_TRY(comm::encode_part(args, part(args.gradient.data, shard), kept(shard), seed, buffers.outgoing[peer],
                                   buffers.codec, &unused));
  }
  seed.stream = static_cast<uint32_t>(shape.ranks + shape.rank);
  seed.first = args.seed.first + own.first;
  GRADGATE_TRY(comm::encode_sum(args, buffers.incoming, part(args.gradient.data, own), kept(own), seed,
                                buffers.outgoing[shape.rank], buffers.codec, &unused));
  marks->mark(Part::encode, stream);
  const float scale = static_cast<float>(1.0 / shape.ranks);
  for (int owner = 0; owner < shape.ranks; ++owner)
    GRADGATE_TRY(
        comm::decode_part(args, buffers.outgoing[owner], part(buffers.out, shards[owner]), scale, buffers.codec));
  marks->mark(Part::decode, stream);
  return {};
}

Status enqueue_all_gather(const ExchangeArgs& args, const Buffers& buffers, float* residual,
                          DeviceMarks* marks) noexcept {
  const ExchangeShape& shape = args.shape;
  const Stream stream = args.device->stream;
  Seed seed = args.seed;
  seed.stream = static_cast<uint32_t>(shape.rank);
  uint64_t unused = 0;
  marks->begin(stream);
  GRADGATE_TRY(
      comm::encode_part(args, args.gradient, residual, seed, buffers.incoming[shape.rank], buffers.codec, &unused));
  marks->mark(Part::encode, stream);
  GRADGATE_TRY(fill_slots(args, buffers.incoming, shape.rank));
  marks->mark(Part::transfer, stream);
  ExchangeArgs aside = args;
  aside.gradient.data = buffers.out;
  GRADGATE_TRY(comm::decode_slots(aside, buffers.incoming, static_cast<float>(1.0 / shape.ranks), buffers.codec));
  marks->mark(Part::decode, stream);
  return {};
}

Status enqueue_all_reduce(const ExchangeArgs& args, const Buffers& buffers, float* residual,
                          DeviceMarks* marks) noexcept {
  const ExchangeShape& shape = args.shape;
  Seed seed = args.seed;
  seed.stream = 0xffffffffu;
  uint64_t unused = 0;
  marks->begin(args.device->stream);
  GRADGATE_TRY(comm::encode_part(args, args.gradient, residual, seed, buffers.incoming[0], buffers.codec, &unused));
  marks->mark(Part::encode, args.device->stream);
  GRADGATE_TRY(comm::decode_part(args, buffers.incoming[0], {buffers.out, shape.count, shape.dtype},
                                 static_cast<float>(1.0 / shape.ranks), buffers.codec));
  marks->mark(Part::decode, args.device->stream);
  return {};
}

// What the codec of a hierarchical exchange sees: the first shard, the longest.
ExchangeShape first_shard(const ExchangeShape& shape) noexcept {
  const comm::NodeShard part(shape);
  ExchangeShape first = part.between();
  first.count = part.count_of(0);
  return first;
}

}  // namespace

size_t device_shadow_bytes(const ExchangeShape& shape) noexcept {
  if (!shape.device || exchange_workspace_bytes(shape) == 0) return 0;
  if (shape.candidate.exchange == Exchange::hierarchical) {
    const ExchangeShape first = first_shard(shape);
    return device_shadow_bytes(first) + comm::WorkspaceCarver::kAlign + first.count * sizeof(float);
  }
  return Buffers(shape, nullptr).bytes;
}

Status enqueue_shadow(const ExchangeArgs& args, Bytes scratch, DeviceMarks* marks) noexcept {
  const ExchangeShape& shape = args.shape;
  if (args.device == nullptr || !shape.device || marks == nullptr || args.gradient.count != shape.count ||
      args.gradient.dtype != shape.dtype)
    return StatusCode::invalid_argument;
  if (exchange_wire_bytes(shape) == 0 && shape.count != 0) return StatusCode::unsupported;
  if (!comm::has_codec_work(shape)) {
    marks->begin(args.device->stream);
    return {};
  }
  const size_t needed = device_shadow_bytes(shape);
  if (scratch.size() < needed) return {StatusCode::workspace_too_small, static_cast<int64_t>(needed)};
  if (shape.candidate.exchange == Exchange::hierarchical) {
    // The first elements of this rank's gradient stand in for the node's sum.
    ExchangeArgs part = args;
    part.shape = first_shard(shape);
    comm::WorkspaceCarver carver(scratch.data());
    auto* x = reinterpret_cast<float*>(carver.take(part.shape.count, sizeof(float)));
    GRADGATE_TRY(comm::widen_vector(args, {args.gradient.data, part.shape.count, shape.dtype}, x));
    part.gradient = {x, part.shape.count, DType::f32};
    const auto used = static_cast<size_t>(reinterpret_cast<std::byte*>(x + part.shape.count) - scratch.data());
    return enqueue_shadow(part, scratch.subspan(used), marks);
  }
  const Buffers buffers(shape, scratch.data());
  float* residual = nullptr;
  if (args.feedback == Feedback::apply) {
    residual = buffers.residual;
    const auto* cuda = kernels::cuda::runtime();
    const size_t bytes = shape.count * sizeof(float);
    const int error = args.residual == nullptr ? cuda->fill(residual, 0, bytes, args.device->stream.handle)
                                               : cuda->copy(residual, args.residual, bytes, args.device->stream.handle);
    if (error != 0) return {StatusCode::internal, error};
  }
  if (shape.candidate.exchange == Exchange::two_shot) return enqueue_two_shot(args, buffers, residual, marks);
  if (shape.candidate.exchange == Exchange::all_reduce) return enqueue_all_reduce(args, buffers, residual, marks);
  return enqueue_all_gather(args, buffers, residual, marks);
}

}  // namespace gradgate
