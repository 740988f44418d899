// Slots of the collectives: the place of one rank's payload, and what an exchange does with what stands there, in host
// memory at once, or enqueued where the memory is a device's.
#pragma once

#include "codecs/header.h"
#include "gradgate/device_exchange.h"

namespace gradgate::comm {

/// One slot per rank, at a stride. `views`: room for ranks × ConstBytes in host memory; not used on a device.
struct Slots {
  std::byte* base = nullptr;
  size_t stride = 0;
  int ranks = 0;
  std::byte* views = nullptr;

  Bytes operator[](int rank) const noexcept { return {base + static_cast<size_t>(rank) * stride, stride}; }
};

/// The payload for `count` elements at the beginning of a slot; what a shorter shard leaves of the slot is zero.
Bytes payload_in(const ExchangeShape& shape, size_t count, Bytes slot) noexcept;
Status zero_rest(const ExchangeArgs& args, size_t count, Bytes slot) noexcept;
Status zero(const ExchangeArgs& args, Bytes memory) noexcept;
/// Fills a slot with an error payload.
void put_error(const ExchangeArgs& args, size_t count, StatusCode code, Bytes slot) noexcept;

/// What a look at a peer's payload means for the exchange: `status` is the codec's verdict, `got` the header. Where it
/// is not ok, `text` names stage, peer and both values.
Status judge_payload(const ExchangeArgs& args, int stage, int peer, size_t count, Status status,
                     const codecs::WireHeader& got, Message* text) noexcept;

/// Scratch for the codec calls below on `count` elements, at most ranks payloads to a sum.
size_t codec_work_bytes(const ExchangeShape& shape, size_t count) noexcept;
size_t decode_sum_work_bytes(const ExchangeShape& shape, size_t count) noexcept;

/// Encodes a part of the vector, its rest of the slot zero. Adds to *non_finite on the host.
Status encode_part(const ExchangeArgs& args, ConstVec part, float* residual, const Seed& seed, Bytes slot, Bytes work,
                   uint64_t* non_finite) noexcept;
/// The owner's sum of a two_shot: of what stands in `incoming` and the own part.
Status encode_sum(const ExchangeArgs& args, const Slots& incoming, ConstVec own, float* residual, const Seed& seed,
                  Bytes slot, Bytes work, uint64_t* non_finite) noexcept;
/// The average of a part from its sum.
Status decode_part(const ExchangeArgs& args, Bytes slot, Vec out, float scale, Bytes work) noexcept;
/// The average of the vector from everybody's payload.
Status decode_slots(const ExchangeArgs& args, const Slots& slots, float scale, Bytes work) noexcept;
/// Adds the residual (a flush), then scales by the number of ranks.
Status fold_part(const ExchangeArgs& args) noexcept;
Status scale_vector(const ExchangeArgs& args, int divisor) noexcept;

/// The device's versions of these; unsupported where there is none.
namespace on_device {
bool takes(const ExchangeShape& shape) noexcept;
size_t codec_work_bytes(const ExchangeShape& shape, size_t count) noexcept;
Status zero(const ExchangeArgs& args, Bytes memory) noexcept;
void put_error(const ExchangeArgs& args, size_t count, StatusCode code, Bytes payload) noexcept;
Status encode_part(const ExchangeArgs& args, ConstVec part, float* residual, const Seed& seed, Bytes payload,
                   Bytes work) noexcept;
Status encode_sum(const ExchangeArgs& args, const Slots& incoming, ConstVec own, float* residual, const Seed& seed,
                  Bytes payload, Bytes work) noexcept;
Status decode_part(const ExchangeArgs& args, Bytes payload, Vec out, float scale, Bytes work) noexcept;
Status decode_slots(const ExchangeArgs& args, const Slots& slots, float scale, Bytes work) noexcept;
Status fold_part(const ExchangeArgs& args) noexcept;
Status scale_vector(const ExchangeArgs& args, int divisor) noexcept;
/// Enqueues the look at payloads of `count` elements in slots first … first + ranks − 1.
Status inspect(const ExchangeArgs& args, int stage, const Slots& slots, int first, int ranks, int skip, size_t count,
               Bytes work) noexcept;
Status record_status(const ExchangeArgs& args, const ExchangeRecord& record, uint64_t* non_finite,
                     Message* why) noexcept;
}  // namespace on_device

}  // namespace gradgate::comm
