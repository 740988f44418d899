// The butterflies of int4:hadamard (docs/format.md §3) on whole registers.
#pragma once

#include "codecs/int4.h"
#include "kernels/cpu/loops/lanes.h"

namespace gradgate::kernels::cpu {
namespace {

inline constexpr size_t kRotated = codecs::Rotation::kBlock;
typedef float FloatLanes __attribute__((vector_size(kLanes * 4)));

// Butterflies inside a register: a - b is b's negative added to a, bit for bit.
template <size_t kDistance>
GRADGATE_INLINE FloatLanes butterflies_within(FloatLanes v) {
  Lanes partner = {}, sign = {};
  for (size_t i = 0; i < kLanes; ++i) {
    partner[i] = static_cast<int32_t>(i ^ kDistance);
    sign[i] = (i & kDistance) != 0 ? INT32_MIN : 0;
  }
#if defined(__clang__)
  FloatLanes other;
  for (size_t i = 0; i < kLanes; ++i) other[i] = v[i ^ kDistance];
#else
  const FloatLanes other = __builtin_shuffle(v, partner);
#endif
  return other + __builtin_bit_cast(FloatLanes, __builtin_bit_cast(Lanes, v) ^ sign);
}

// All seven steps over the 128 elements of a block.
__attribute__((noinline)) void butterflies(float* y) {
  constexpr size_t kRegisters = kRotated / kLanes;
  FloatLanes v[kRegisters];
  __builtin_memcpy(v, y, sizeof v);
#pragma GCC unroll 8
  for (size_t distance = kRegisters / 2; distance >= 1; distance /= 2) {
#pragma GCC unroll 32
    for (size_t i = 0; i < kRegisters; ++i) {
      if ((i & distance) != 0) continue;
      const FloatLanes a = v[i], b = v[i + distance];
      v[i] = a + b;
      v[i + distance] = a - b;
    }
  }
#pragma GCC unroll 32
  for (size_t i = 0; i < kRegisters; ++i) {
    if constexpr (kLanes >= 16) v[i] = butterflies_within<8>(v[i]);
    if constexpr (kLanes >= 8) v[i] = butterflies_within<4>(v[i]);
    v[i] = butterflies_within<1>(butterflies_within<2>(v[i]));
  }
  __builtin_memcpy(y, v, sizeof v);
}

// Signs of the rotations of a payload, one sign bit for each element of a block.
struct RotationSigns {
  alignas(64) uint32_t sign[kRotated];

  explicit RotationSigns(uint32_t step) {
    const codecs::PhiloxBlock signs = codecs::rotation_signs(step);
    for (uint32_t j = 0; j < kRotated; ++j) sign[j] = codecs::rotation_sign(signs, j);
  }
};
struct NoSigns {
  explicit NoSigns(uint32_t) {}
};

}  // namespace
}  // namespace gradgate::kernels::cpu
