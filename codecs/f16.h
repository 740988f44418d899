// f16 (IEEE binary16): exact widening, and the rounding of docs/format.md §2, rule 7.
#pragma once

#include <cstdint>

#include "codecs/exact_math.h"

namespace gradgate::codecs {

/// The bits of an f16, as a type of its own: a bare uint16_t is a bf16 in the loops.
struct F16 {
  uint16_t bits;
};

GRADGATE_HD float widen_f16(uint16_t h) {
#if defined(__CUDA_ARCH__)
  float x;  // the same values in one instruction; a NaN stays one
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, m = h & 0x7fffu;
  const uint32_t small = exact::below_mask(m, 0x400u), finite = exact::below_mask(m, 0x7c00u);
  // A subnormal is what its mantissa adds to the least normal number, 2^-14: exact, and no f32 subnormal is involved.
  const uint32_t base = exact::choose(small, 113u << 23, exact::choose(finite, 112u << 23, 224u << 23));
  const float size = exact::sub(exact::from_bits((m << 13) + base), exact::from_bits(small & (113u << 23)));
  return exact::from_bits(sign | exact::bits(size));
#endif
}

/// To nearest even; a finite value never becomes Inf (it saturates at 0x7bff), every NaN becomes 0x7e00.
GRADGATE_HD uint16_t round_f16(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  if ((h & 0x7c00u) != 0x7c00u) return h;
  const uint32_t of = exact::mag(x);
  return of > exact::kInfBits ? uint16_t{0x7e00} : static_cast<uint16_t>(of < exact::kInfBits ? h - 1 : h);
#else
  const uint32_t b = exact::bits(x), m = b & exact::kMagMask, sign = (b >> 16) & 0x8000u;
  const uint32_t small = exact::below_mask(m, 0x38800000u), in_range = exact::below_mask(m, 0x477fe000u);
  // Below 2^-14 results are multiples of 2^-24, the spacing of floats from 0.5 on: the addition rounds to them.
  const uint32_t sum = exact::bits(exact::add(exact::from_bits(m), exact::from_bits(small & 0x3f000000u)));
  const uint32_t normal = (m - (112u << 23) + 0xfffu + ((m >> 13) & 1u)) >> 13;
  // From 0x477fe000, the greatest f16, on: saturated.
  const uint32_t finite = exact::choose(small, sum - 0x3f000000u, exact::choose(in_range, normal, 0x7bffu));
  const uint32_t special = exact::choose(exact::below_mask(exact::kInfBits, m), 0x7e00u, sign | 0x7c00u);
  return static_cast<uint16_t>(exact::choose(exact::below_mask(m, exact::kInfBits), sign | finite, special));
#endif
}

}  // namespace gradgate::codecs
