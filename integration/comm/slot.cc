// Slots: what stands in the collectives of an exchange for one rank. A payload, an error payload in its place, and the
// look at what a peer sent.
#include "integration/comm/slot.h"

#include <cstring>
#include <new>

#include "codecs/header.h"
#include "integration/comm/dense_scale.h"
#include "integration/comm/two_shot_layout.h"

namespace gradgate {

using comm::judge_payload;

namespace {

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

namespace comm {

Status judge_payload(const ExchangeArgs& args, int stage, int peer, size_t count, Status status,
                     const codecs::WireHeader& got, Message* text) noexcept {
  const ExchangeShape& shape = args.shape;
  const CodecSpec& codec = shape.candidate.codec;
  Message why;
  if (status.code() == StatusCode::bad_payload) {
    const codecs::WireHeader expected = codecs::make_header(codec, shape.dtype, count, args.seed.step);
    if (describe_mismatch(got, expected, peer, shape.rank, &why)) {
      status = StatusCode::peer_mismatch;
    } else {
      why.format("damaged payload from rank %d: %s", peer,
                 payload_fault_name(static_cast<PayloadFault>(status.detail())));
    }
  } else if (got.step != args.seed.step && (status.ok() || status.code() == StatusCode::peer_failed)) {
    why.format("step: rank %d is at step %u, rank %d at step %u", peer, got.step, shape.rank, args.seed.step);
    status = StatusCode::peer_mismatch;
  } else if (status.code() == StatusCode::peer_failed) {
    const auto code = static_cast<StatusCode>(got.flags >> 4);
    why.format("rank %d failed: %s", peer, Status(code).message());
    // What a peer found to differ between ranks differs for this one too.
    if (code == StatusCode::peer_mismatch) status = StatusCode::peer_mismatch;
  } else if (!status.ok()) {
    why.format("payload from rank %d: %s", peer, status.message());
  }
  if (status.ok()) return status;
  const char *name = codec_info(codec.id).name, *exchange = exchange_name(shape.candidate.exchange);
  if (stage == 0) {
    text->format("%s over %s: %s", name, exchange, why.text);
  } else {
    text->format("%s over %s, stage %d: %s", name, exchange, stage, why.text);
  }
  return status;
}

Bytes payload_in(const ExchangeShape& shape, size_t count, Bytes slot) noexcept {
  return slot.first(payload_bytes(shape.candidate.codec, shape.dtype, count));
}

Status zero(const ExchangeArgs& args, Bytes memory) noexcept {
  if (args.device != nullptr) return on_device::zero(args, memory);
  if (!memory.empty()) std::memset(memory.data(), 0, memory.size());
  return {};
}

Status zero_rest(const ExchangeArgs& args, size_t count, Bytes slot) noexcept {
  return zero(args, slot.subspan(payload_bytes(args.shape.candidate.codec, args.shape.dtype, count)));
}

void put_error(const ExchangeArgs& args, size_t count, StatusCode code, Bytes slot) noexcept {
  const Bytes payload = payload_in(args.shape, count, slot);
  if (args.device != nullptr) return on_device::put_error(args, count, code, payload);
  // Cannot fail: shape and size were checked by begin().
  (void)encode_error(args.shape.candidate.codec, args.shape.dtype, count, args.seed, code, payload);
  (void)zero_rest(args, count, slot);
}

size_t codec_work_bytes(const ExchangeShape& shape, size_t count) noexcept {
  if (shape.device) return on_device::codec_work_bytes(shape, count);
  return workspace_bytes(shape.candidate.codec, shape.dtype, count, shape.width);
}

size_t decode_sum_work_bytes(const ExchangeShape& shape, size_t count) noexcept {
  if (shape.device) return on_device::codec_work_bytes(shape, count);
  return decode_sum_bytes(shape.candidate.codec, shape.dtype, count, static_cast<size_t>(shape.ranks), shape.width);
}

Status encode_part(const ExchangeArgs& args, ConstVec part, float* residual, const Seed& seed, Bytes slot, Bytes work,
                   uint64_t* non_finite) noexcept {
  const Bytes payload = payload_in(args.shape, part.count, slot);
  GRADGATE_TRY(zero_rest(args, part.count, slot));
  if (args.device != nullptr) return on_device::encode_part(args, part, residual, seed, payload, work);
  EncodeStats stats;
  const Status status = encode(args.shape.candidate.codec,
                               {.gradient = part,
                                .residual = residual,
                                .payload = payload,
                                .workspace = work,
                                .seed = seed,
                                .executor = args.executor,
                                .threshold = args.threshold},
                               &stats);
  *non_finite += stats.non_finite;
  return status;
}

Status encode_sum(const ExchangeArgs& args, const Slots& incoming, ConstVec own, float* residual, const Seed& seed,
                  Bytes slot, Bytes work, uint64_t* non_finite) noexcept {
  const Bytes payload = payload_in(args.shape, own.count, slot);
  GRADGATE_TRY(zero_rest(args, own.count, slot));
  if (args.device != nullptr) return on_device::encode_sum(args, incoming, own, residual, seed, payload, work);
  auto* views = reinterpret_cast<ConstBytes*>(incoming.views);
  for (int peer = 0; peer < incoming.ranks; ++peer) {
    ConstBytes view = payload_in(args.shape, own.count, incoming[peer]);
    if (peer == args.shape.rank) view = {};
    new (&views[peer]) ConstBytes(view);
  }
  EncodeStats stats;
  const Status status = reduce_encode(args.shape.candidate.codec,
                                      {.payloads = {views, static_cast<size_t>(incoming.ranks)},
                                       .self = static_cast<size_t>(args.shape.rank),
                                       .gradient = own,
                                       .residual = residual,
                                       .payload = payload,
                                       .workspace = work,
                                       .seed = seed,
                                       .executor = args.executor},
                                      &stats);
  *non_finite += stats.non_finite;
  return status;
}

Status decode_part(const ExchangeArgs& args, Bytes slot, Vec out, float scale, Bytes work) noexcept {
  const Bytes payload = payload_in(args.shape, out.count, slot);
  if (args.device != nullptr) return on_device::decode_part(args, payload, out, scale, work);
  return decode(
      args.shape.candidate.codec,
      {.payload = payload, .gradient = args.shape.dtype, .out = out, .scale = scale, .executor = args.executor});
}

Status decode_slots(const ExchangeArgs& args, const Slots& slots, float scale, Bytes work) noexcept {
  if (args.device != nullptr) return on_device::decode_slots(args, slots, scale, work);
  auto* views = reinterpret_cast<ConstBytes*>(slots.views);
  for (int peer = 0; peer < slots.ranks; ++peer)
    new (&views[peer]) ConstBytes(payload_in(args.shape, args.shape.count, slots[peer]));
  return decode_sum(args.shape.candidate.codec, {.payloads = {views, static_cast<size_t>(slots.ranks)},
                                                 .gradient = args.shape.dtype,
                                                 .out = args.gradient,
                                                 .scale = scale,
                                                 .workspace = work,
                                                 .executor = args.executor});
}

Status fold_part(const ExchangeArgs& args) noexcept {
  if (args.device != nullptr) return on_device::fold_part(args);
  return fold_residual(args.gradient, args.residual, args.executor);
}

Status scale_vector(const ExchangeArgs& args, int divisor) noexcept {
  if (args.device != nullptr) return on_device::scale_vector(args, divisor);
  scale_dense(args.gradient, divisor, args.divide, args.executor);
  return {};
}

}  // namespace comm

// Exchanges of one stage encode the whole vector at once.
void ExchangeMachine::encode_whole(uint32_t stream, Bytes slot, Bytes work) noexcept {
  Seed seed = args_.seed;
  seed.stream = stream;
  float* residual = args_.feedback == Feedback::apply ? args_.residual : nullptr;
  const Status status = comm::encode_part(args_, args_.gradient, residual, seed, slot, work, &non_finite_);
  if (status.ok()) return;
  Message text;
  text.format("%s: rank %d could not encode its gradient: %s", exchange_name(args_.shape.candidate.exchange),
              args_.shape.rank, status.message());
  blame(status, text.text);
}

// Looks at a payload that `peer` made. False, and this rank blamed or the peer's failure noted, unless it is good.
bool ExchangeMachine::inspect(int stage, int peer, size_t count, ConstBytes payload) noexcept {
  const CodecSpec& codec = args_.shape.candidate.codec;
  Status status = check_payload(codec, args_.shape.dtype, count, payload, nullptr);
  codecs::WireHeader got;
  std::memcpy(&got, payload.data(), sizeof got);
  Message text;
  status = judge_payload(args_, stage, peer, count, status, got, &text);
  if (!status.ok()) blame(status, text.text);
  return status.ok();
}

void ExchangeMachine::inspect_slots(int stage, const comm::Slots& slots, int skip, const comm::Shards* shards,
                                    size_t count, Bytes work) noexcept {
  const auto count_of = [&](int rank) { return shards == nullptr ? count : (*shards)[rank].count; };
  for (int peer = 0; peer < slots.ranks && failed_.ok(); ++peer) {
    const size_t elements = count_of(peer);
    if (args_.device == nullptr) {
      if (peer != skip) inspect(stage, peer, elements, comm::payload_in(args_.shape, elements, slots[peer]));
      continue;
    }
    // Enqueued, for neighbours with payloads of one size together.
    int last = peer;
    while (last + 1 < slots.ranks && count_of(last + 1) == elements) ++last;
    const Status status = comm::on_device::inspect(args_, stage, slots, peer, last - peer + 1, skip, elements, work);
    if (!status.ok()) blame(status, "the look at what arrived could not be enqueued");
    peer = last;
  }
}

Status exchange_record_status(const ExchangeArgs& args, const ExchangeRecord& record, uint64_t* non_finite,
                              Message* why) noexcept {
  return comm::on_device::record_status(args, record, non_finite, why);
}

}  // namespace gradgate
