// bf16 as the upper half of an f32: exact widening, and the rounding of docs/format.md §2, rule 7.
#pragma once

#include <cstdint>

#include "codecs/exact_math.h"

namespace gradgate::codecs {

inline constexpr uint16_t kBf16Nan = 0x7fc0;

GRADGATE_HD float widen_bf16(uint16_t b) { return exact::from_bits(static_cast<uint32_t>(b) << 16); }

/// To nearest even; a finite value never becomes Inf (it saturates at 0x7f7f), every NaN becomes 0x7fc0.
GRADGATE_HD uint16_t round_bf16(float x) {
  const uint32_t b = exact::bits(x);
  const uint32_t m = b & exact::kMagMask;
  // From 0x7f7f8000 on a finite value would round to Inf. Computed on the magnitude: the carry then never reaches the sign.
  const uint32_t rounded = (m + 0x7fffu + ((m >> 16) & 1u)) >> 16;
  const uint32_t finite = rounded > 0x7f7fu ? 0x7f7fu : rounded;
  const uint32_t signed_value = ((b >> 16) & 0x8000u) | (m < exact::kInfBits ? finite : 0x7f80u);
  return static_cast<uint16_t>(m > exact::kInfBits ? kBf16Nan : signed_value);
}

}  // namespace gradgate::codecs
