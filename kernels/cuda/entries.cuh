// Values of the codecs that send some elements (chunk-topk, topk, randk), in each of their types. The type is looked at
// where a value is read or written: entries are few, and kernels for each type would be many.
#pragma once

#include "codecs/sparse.h"
#include "kernels/cuda/group.cuh"

namespace gradgate::kernels::cuda {
namespace {

/// Those of a payload, by entry.
struct EntryValues {
  const std::byte* section;
  DType type;       ///< f32, bf16, or u8: int8 codes under scales
  size_t codes_at;  ///< codecs::codes_offset

  __device__ __forceinline__ float operator[](size_t i) const {
    if (type == DType::f32) return exact::from_bits(reinterpret_cast<const uint32_t*>(section)[i]);
    if (type == DType::bf16) return codecs::widen_bf16(reinterpret_cast<const uint16_t*>(section)[i]);
    return codecs::entry_value(reinterpret_cast<const uint32_t*>(section)[i / codecs::kScaleRun],
                               reinterpret_cast<const int8_t*>(section + codes_at)[i]);
  }
};

/// What stays of a finite x when it is sent. int8 values come later, once their run is known: until then all of it.
__device__ __forceinline__ float left_of(float x, DType type) {
  if (type == DType::f32) return exact::sub(x, exact::canonical(x));
  if (type == DType::bf16) return exact::sub(x, codecs::widen_bf16(codecs::topk_value_bf16(x)));
  return x;
}
/// Writes the value of an entry, to the payload's section or, of an int8 value, x to its room in the workspace.
__device__ __forceinline__ void put_entry(std::byte* values, DType type, size_t i, float x) {
  if (type == DType::bf16) {
    reinterpret_cast<uint16_t*>(values)[i] = codecs::topk_value_bf16(x);
  } else {
    reinterpret_cast<uint32_t*>(values)[i] = codecs::topk_value_f32(x);
  }
}

/// Zeros between the scales of int8 values, one for each run, and their codes: by one CTA of a grid.
__device__ __forceinline__ void pad_scales(std::byte* section, size_t runs, size_t codes_at) {
  if (blockIdx.x == 0 && threadIdx.x < codes_at - runs * 4) section[runs * 4 + threadIdx.x] = std::byte{0};
}
/// Writes the code of an entry, and with feedback what it leaves of x to *residual(), where x is; a zero leaves itself,
/// or stands for a residual that is kept.
template <bool kFeedback, class Residual>
__device__ __forceinline__ void put_code(const codecs::EntryEncoder& encoder, float x, int8_t* to,
                                         const Residual& residual) {
  const int32_t code = encoder.entry(x);
  *to = static_cast<int8_t>(code);
  if (kFeedback && exact::mag(x) != 0 && exact::is_finite(x))
    *residual() = exact::sub(x, codecs::entry_value(encoder.stored, code));
}

}  // namespace
}  // namespace gradgate::kernels::cuda
