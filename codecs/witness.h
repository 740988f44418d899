// The witness: what travels in front of the values of payloads that are summed, in the place of a header
// (docs/format.md §4). Element code, for host and device.
#pragma once

#include <cstring>

#include "codecs/header.h"
#include "gradgate/types.h"

namespace gradgate::codecs {

/// Bits of a witness, each sent as a value that is 0 or 1: two for every bit of the hash, one for every status code. As
/// values they are a whole number of cache lines in every dtype that is summed.
inline constexpr uint32_t kHashBits = 24, kWitnessCodes = 16, kWitnessValues = 2 * kHashBits + kWitnessCodes;
static_assert(kWitnessValues == 64, "a witness is a word");

/// FNV-1a of what must be the same on all ranks, in the head of a payload: the header but its flags, and the sample.
GRADGATE_HD uint32_t agreement_hash(const std::byte* head, size_t head_bytes) noexcept {
  constexpr size_t kCheck = offsetof(WireHeader, check);
  uint32_t hash = 0x811c9dc5u;
  for (size_t i = offsetof(WireHeader, version); i < head_bytes; ++i) {
    if (i == offsetof(WireHeader, flags) || (i >= kCheck && i < sizeof(WireHeader))) continue;
    hash = (hash ^ static_cast<uint32_t>(head[i])) * 0x01000193u;
  }
  return hash;
}

/// What a rank sends: the hash, or, where it could not encode, nothing but the code of its status.
GRADGATE_HD uint64_t witness_of(uint32_t hash, uint32_t code) noexcept {
  if (code != 0) return uint64_t{1} << (2 * kHashBits + code % kWitnessCodes);
  uint64_t witness = 0;
  for (uint32_t b = 0; b < kHashBits; ++b) witness |= uint64_t{(hash >> b & 1u) != 0 ? 1u : 2u} << 2 * b;
  return witness;
}

/// What the witnesses of all ranks say together: bit i is set where the sum of value i is not zero.
struct WitnessVerdict {
  uint32_t code = 0;    ///< the least of those ranks that could not encode, 0 where all could
  bool differ = false;  ///< ranks encoded with another spec, count, step or sample

  GRADGATE_HD static WitnessVerdict of(uint64_t seen) noexcept {
    WitnessVerdict verdict;
    for (uint32_t c = kWitnessCodes; c-- > 1;)
      verdict.code = (seen >> (2 * kHashBits + c) & 1u) != 0 ? c : verdict.code;
    constexpr uint64_t kFirstOfTwo = 0x555555555555ull;
    verdict.differ = (seen & seen >> 1 & kFirstOfTwo) != 0;
    return verdict;
  }
};

/// Value i in front of the payload's values, f32 or, of two bytes, bf16.
GRADGATE_HD void put_witness_value(std::byte* values, uint32_t i, bool one, size_t width) noexcept {
  const uint32_t f32 = one ? 0x3f800000u : 0;
  const uint16_t bf16 = one ? 0x3f80 : 0;
  memcpy(values + width * i, width == sizeof f32 ? static_cast<const void*>(&f32) : &bf16, width);
}
/// Whether any rank sent a one. What is neither, damage, counts as one.
GRADGATE_HD bool any_witness_value(const std::byte* values, uint32_t i, size_t width) noexcept {
  uint32_t bits = 0;
  memcpy(&bits, values + width * i, width);
  return bits != 0;
}

}  // namespace gradgate::codecs
