// The all_reduce exchange with a codec whose payloads add: encode with the same seed on every rank, sum the values,
// decode the sums. One collective. No header travels: a witness in front of the values tells every rank whether all
// encoded, and the same thing.
#include <cstring>

#include "codecs/header.h"
#include "gradgate/exchange.h"
#include "integration/comm/all_reduce_layout.h"
#include "integration/comm/slot.h"

namespace gradgate {
namespace {

using comm::AllReduceBuffers;
using comm::kWitnessValues;

constexpr uint32_t kHashBits = 24, kCodes = 16;
static_assert(2 * kHashBits + kCodes == kWitnessValues);

// FNV-1a of what must be the same on all ranks: the header but its flags, and the sample.
uint32_t agreement_hash(const std::byte* head, size_t head_bytes) noexcept {
  constexpr size_t kCheck = offsetof(codecs::WireHeader, check);
  uint32_t hash = 0x811c9dc5u;
  for (size_t i = offsetof(codecs::WireHeader, version); i < head_bytes; ++i) {
    if (i == offsetof(codecs::WireHeader, flags) || (i >= kCheck && i < sizeof(codecs::WireHeader))) continue;
    hash = (hash ^ static_cast<uint32_t>(head[i])) * 0x01000193u;
  }
  return hash;
}

void put_value(std::byte* values, size_t i, bool one, DType dtype) noexcept {
  const uint32_t f32 = one ? 0x3f800000u : 0;
  const uint16_t bf16 = one ? 0x3f80 : 0;
  if (dtype == DType::f32) {
    std::memcpy(values + 4 * i, &f32, sizeof f32);
  } else {
    std::memcpy(values + 2 * i, &bf16, sizeof bf16);
  }
}
// Whether any rank sent a one. What is neither, damage, counts as one.
bool any(const std::byte* values, size_t i, DType dtype) noexcept {
  uint32_t bits = 0;
  const size_t width = dtype_bytes(dtype);
  std::memcpy(&bits, values + width * i, width);
  return bits != 0;
}

}  // namespace

void ExchangeMachine::begin_all_reduce() noexcept {
  const AllReduceBuffers buffers(args_.shape, args_.workspace.data());
  encode_whole(0xffffffffu, buffers.payload, buffers.codec);  // one sample for all ranks
}

Status ExchangeMachine::next_all_reduce(CollectiveCall* call) noexcept {
  const ExchangeShape& shape = args_.shape;
  const AllReduceBuffers buffers(shape, args_.workspace.data());
  if (phase_ == Phase::ready) {
    phase_ = Phase::stage1;
    const uint32_t code = static_cast<uint32_t>(failed_.code());
    if (code != 0) std::memset(buffers.payload.data(), 0, buffers.payload.size());
    std::memcpy(buffers.head, buffers.payload.data(), buffers.head_bytes);
    // A rank that could not encode has no payload; its hash says nothing then.
    const uint32_t hash = agreement_hash(buffers.head, buffers.head_bytes);
    for (uint32_t b = 0; b < kHashBits; ++b) {
      const bool one = (hash >> b & 1u) != 0;
      put_value(buffers.sums, 2 * b, code == 0 && one, buffers.dtype);
      put_value(buffers.sums, 2 * b + 1, code == 0 && !one, buffers.dtype);
    }
    for (uint32_t c = 0; c < kCodes; ++c)
      put_value(buffers.sums, 2 * kHashBits + c, code != 0 && c == code, buffers.dtype);
    *call = {Collective::all_reduce, buffers.sums, buffers.sums, buffers.sum_count(), buffers.dtype};
    return {};
  }
  phase_ = Phase::done;
  uint32_t code = 0;  // the least, where ranks failed for several reasons
  for (uint32_t c = kCodes; c-- > 0;) code = any(buffers.sums, 2 * kHashBits + c, buffers.dtype) ? c : code;
  bool differ = false;
  for (uint32_t b = 0; b < kHashBits; ++b)
    differ = differ || (any(buffers.sums, 2 * b, buffers.dtype) && any(buffers.sums, 2 * b + 1, buffers.dtype));
  Message text;
  const Message codec = format_codec(shape.candidate.codec);
  if (code != 0) {
    text.format("%s over all_reduce: a rank failed: %s", codec.text, Status(static_cast<StatusCode>(code)).message());
    blame(StatusCode::peer_failed, text.text);
  } else if (differ) {
    text.format(
        "%s over all_reduce: ranks differ in spec, count, step or seed: rank %d is at step %u with %zu x %s, "
        "seed %llu, bucket %u",
        codec.text, shape.rank, args_.seed.step, shape.count, dtype_name(shape.dtype),
        static_cast<unsigned long long>(args_.seed.key), args_.seed.tensor);
    blame(StatusCode::peer_mismatch, text.text);
  }
  return failed_.ok() ? decode_sums() : failed_;
}

Status ExchangeMachine::decode_sums() noexcept {
  const ExchangeShape& shape = args_.shape;
  const AllReduceBuffers buffers(shape, args_.workspace.data());
  std::memcpy(buffers.payload.data(), buffers.head, buffers.head_bytes);
  const Status status =
      comm::decode_part(args_, buffers.payload, args_.gradient, static_cast<float>(1.0 / divisor_), buffers.codec);
  if (!status.ok()) {
    Message text;
    text.format("all_reduce: rank %d could not decode the sums: %s", shape.rank, status.message());
    blame(status, text.text);
  }
  return failed_;
}

}  // namespace gradgate
