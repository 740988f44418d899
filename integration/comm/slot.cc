// Slots: what stands in the collectives of an exchange for one rank. A payload, an error payload in its place, and the
// look at what a peer sent.
#include "integration/comm/slot.h"

#include <cstring>

#include "codecs/header.h"

namespace gradgate {
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

Bytes payload_in(const ExchangeShape& shape, size_t count, Bytes slot) noexcept {
  return slot.first(payload_bytes(shape.candidate.codec, shape.dtype, count));
}

void zero_rest(const ExchangeShape& shape, size_t count, Bytes slot) noexcept {
  const size_t used = payload_bytes(shape.candidate.codec, shape.dtype, count);
  std::memset(slot.data() + used, 0, slot.size() - used);
}

void put_error(const ExchangeArgs& args, size_t count, StatusCode code, Bytes slot) noexcept {
  // Cannot fail: shape and size were checked by begin().
  (void)encode_error(args.shape.candidate.codec, args.shape.dtype, count, args.seed, code,
                     payload_in(args.shape, count, slot));
  zero_rest(args.shape, count, slot);
}

}  // namespace comm

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
  const char* exchange = exchange_name(shape.candidate.exchange);
  if (stage == 0) {
    text.format("%s over %s: %s", codec, exchange, why.text);
  } else {
    text.format("%s over %s, stage %d: %s", codec, exchange, stage, why.text);
  }
  blame(status, text.text);
  return false;
}

}  // namespace gradgate
