// The two_shot exchange: encode the foreign shards, all-to-all, sum and re-encode the own shard at its owner,
// all-gather, decode. Both collectives are always performed; a rank that cannot go on sends error payloads, and every
// rank looks before it writes.
#include <cstring>
#include <new>

#include "codecs/header.h"
#include "gradgate/exchange.h"
#include "integration/comm/two_shot_layout.h"

namespace gradgate {
namespace {

using comm::Shard;
using comm::Shards;
using comm::TwoShotBuffers;

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

// The payload of a shard at the beginning of a slot; what a shorter shard leaves of the slot is zero.
Bytes payload_in(const ExchangeShape& shape, size_t count, Bytes whole) noexcept {
  return whole.first(payload_bytes(shape.candidate.codec, shape.dtype, count));
}

void zero_rest(const ExchangeShape& shape, size_t count, Bytes whole) noexcept {
  const size_t used = payload_bytes(shape.candidate.codec, shape.dtype, count);
  std::memset(whole.data() + used, 0, whole.size() - used);
}

// A slot with an error payload. Cannot fail: shape and size were checked by begin().
void put_error(const ExchangeArgs& args, size_t count, StatusCode code, Bytes whole) noexcept {
  (void)encode_error(args.shape.candidate.codec, args.shape.dtype, count, args.seed, code,
                     payload_in(args.shape, count, whole));
  zero_rest(args.shape, count, whole);
}

const char* codec_name(uint8_t id) noexcept {
  for (const CodecInfo& info : codec_infos()) {
    if (static_cast<uint8_t>(info.id) == id) return info.name;
  }
  return "an unknown codec";
}

// A header that is intact but was made for something else: which field, and both values. False for a damaged header.
bool describe_mismatch(const codecs::WireHeader& got, const codecs::WireHeader& expected, int peer, int self,
                       Message* why) noexcept {
  if (got.magic != expected.magic || codecs::header_check(got) != got.check) return false;
  const auto say = [&](const char* field, uint64_t theirs, uint64_t ours) {
    why->format("%s: rank %d sent %llu, rank %d has %llu", field, peer, static_cast<unsigned long long>(theirs), self,
                static_cast<unsigned long long>(ours));
    return true;
  };
  if (got.version != expected.version) return say("payload version", got.version, expected.version);
  if (got.codec != expected.codec) {
    why->format("codec: rank %d sent %s, rank %d has %s", peer, codec_name(got.codec), self,
                codec_name(expected.codec));
    return true;
  }
  if (got.value != expected.value) {
    why->format("value dtype: rank %d sent %s, rank %d has %s", peer, dtype_name(static_cast<DType>(got.value)), self,
                dtype_name(static_cast<DType>(expected.value)));
    return true;
  }
  if (got.count != expected.count) return say("count of the shard", got.count, expected.count);
  if (got.param0 != expected.param0) return say("parameter 0", got.param0, expected.param0);
  if (got.param1 != expected.param1) return say("parameter 1", got.param1, expected.param1);
  return false;
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
    seed.first = shard.first;
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

// Looks at a payload that `peer` made. False, and this rank blamed or the peer's failure noted, unless it is good.
bool ExchangeMachine::inspect(int stage, int peer, size_t count, ConstBytes payload) noexcept {
  const ExchangeShape& shape = args_.shape;
  const char* codec = codec_info(shape.candidate.codec.id).name;
  PayloadInfo info{};
  Status status = check_payload(shape.candidate.codec, shape.dtype, count, payload, &info);
  Message why, text;
  if (status.code() == StatusCode::bad_payload) {
    codecs::WireHeader got;
    std::memcpy(&got, payload.data(), sizeof got);
    const codecs::WireHeader expected = codecs::make_header(shape.candidate.codec, shape.dtype, count, args_.seed.step);
    if (describe_mismatch(got, expected, peer, shape.rank, &why)) {
      status = StatusCode::peer_mismatch;
    } else {
      why.format("damaged payload from rank %d: %s", peer,
                 payload_fault_name(static_cast<PayloadFault>(status.detail())));
    }
  } else if (info.step != args_.seed.step && (status.ok() || status.code() == StatusCode::peer_failed)) {
    why.format("step: rank %d is at step %u, rank %d at step %u", peer, info.step, shape.rank, args_.seed.step);
    status = StatusCode::peer_mismatch;
  } else if (status.code() == StatusCode::peer_failed) {
    why.format("rank %d failed: %s", peer, Status(info.code).message());
    // What a peer found to differ between ranks differs for this one too.
    if (info.code == StatusCode::peer_mismatch) status = StatusCode::peer_mismatch;
  } else if (!status.ok()) {
    why.format("payload from rank %d: %s", peer, status.message());
  }
  if (status.ok()) return true;
  text.format("%s over two_shot, stage %d: %s", codec, stage, why.text);
  blame(status, text.text);
  return false;
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
    seed.first = own.first;
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
  const float scale = static_cast<float>(1.0 / shape.ranks);
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
