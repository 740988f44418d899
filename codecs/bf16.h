// bf16 as the upper half of an f32: exact widening, and the rounding of docs/format.md §2, rule 7.
#pragma once

#include <cstdint>

#include "codecs/exact_math.h"

namespace gradgate::codecs {

GRADGATE_HD float widen_bf16(uint16_t b) { return exact::from_bits(static_cast<uint32_t>(b) << 16); }

/// Bits of x rounded to bf16 and widened again. To nearest even; a finite value never becomes Inf (it saturates at
/// 0x7f7f0000), every NaN becomes 0x7fc00000.
GRADGATE_HD uint32_t rounded_bf16_bits(float x) {
  const uint32_t b = exact::bits(x);
  const uint32_t m = b & exact::kMagMask;
  // Rounded as a magnitude: the carry then never reaches the sign. From 0x7f7f8000 on a finite value would become Inf.
  const uint32_t rounded = (m + 0x7fffu + ((m >> 16) & 1u)) & 0xffff0000u;
  const uint32_t finite = rounded > 0x7f7f0000u ? 0x7f7f0000u : rounded;
  const uint32_t signed_value = (b & 0x80000000u) | (m < exact::kInfBits ? finite : exact::kInfBits);
  return m > exact::kInfBits ? exact::kNanBits : signed_value;
}

GRADGATE_HD uint16_t round_bf16(float x) { return static_cast<uint16_t>(rounded_bf16_bits(x) >> 16); }

}  // namespace gradgate::codecs
