// The only arithmetic that element code may use: one correctly rounded operation at a time, on host and device alike.
// The payload format depends on it (docs/format.md §2, rule 8), so a build that lets the compiler reorder or contract
// floating point is refused here.
#pragma once

#include <cstdint>

#if defined(__FAST_MATH__)
#error "gradgate's payloads are exact to the bit: build without -ffast-math and -Ofast"
#endif

// Element code is always inlined: the same lines are compiled for several instruction sets, and a shared out-of-line
// copy of one of them could end up on a machine that lacks it.
#if defined(__CUDACC__)
#define GRADGATE_HD __host__ __device__ __forceinline__
#else
#define GRADGATE_HD inline __attribute__((always_inline))
#endif

namespace gradgate::exact {

inline constexpr uint32_t kMagMask = 0x7fffffffu;
inline constexpr uint32_t kInfBits = 0x7f800000u;
inline constexpr uint32_t kNanBits = 0x7fc00000u;  // the one NaN that gradgate writes

GRADGATE_HD uint32_t bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  return __builtin_bit_cast(uint32_t, x);
#endif
}

GRADGATE_HD float from_bits(uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(b);
#else
  return __builtin_bit_cast(float, b);
#endif
}

/// Magnitude as an integer: orders as |x| does, Inf above every finite value and NaN above Inf.
GRADGATE_HD uint32_t mag(float x) { return bits(x) & kMagMask; }
GRADGATE_HD bool is_finite(float x) { return mag(x) < kInfBits; }
GRADGATE_HD bool is_nan(float x) { return mag(x) > kInfBits; }
/// x, with any NaN replaced by the one that is written.
GRADGATE_HD float canonical(float x) { return from_bits(is_nan(x) ? kNanBits : bits(x)); }

GRADGATE_HD float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
GRADGATE_HD float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
GRADGATE_HD float sub(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}
GRADGATE_HD float div(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

/// All ones where a < b, else zero, of numbers below 2^31. Choices made with masks stay straight-line code, which
/// compilers vectorise; with ?: an operation on floats may end up in a branch.
GRADGATE_HD uint32_t below_mask(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<int32_t>(a - b) >> 31);
}
GRADGATE_HD uint32_t choose(uint32_t mask, uint32_t yes, uint32_t no) { return (yes & mask) | (no & ~mask); }

/// Nearest integer, half to even, of |x| <= 2^22. Adding 1.5 * 2^23 leaves the integer in the low bits of the sum: one
/// addition in place of a conversion, whose rounding and range differ between machines.
GRADGATE_HD int32_t round_even(float x) { return static_cast<int32_t>(bits(add(x, 12582912.0f)) - 0x4b400000u); }

}  // namespace gradgate::exact
