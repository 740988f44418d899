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

/// What stays of a finite x when it is sent. int8 values come later, by quantize_entries: until then all of it.
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

// int8 values, once all entries are known: of x, a scale for every run of 256 and a code for each. With feedback what a
// code leaves of x; a zero leaves itself, or stands for a residual that is kept.
struct QuantizeJob : EncodeJob {
  const float* x;
  size_t entries, codes_at;
  std::byte* section;
  const uint16_t* index;
  const uint32_t* chunk_of;  ///< topk: of each entry
  uint32_t c, chunk;         ///< chunk-topk
};

template <bool kFeedback>
__global__ void __launch_bounds__(256) quantize_entries(QuantizeJob job) {
  if (!may_encode(job)) return;
  constexpr unsigned kEach = codecs::kScaleRun / 32;
  const size_t runs = job.entries / codecs::kScaleRun + (job.entries % codecs::kScaleRun != 0);
  if (blockIdx.x == 0 && threadIdx.x < job.codes_at - runs * 4) job.section[runs * 4 + threadIdx.x] = std::byte{0};
  int8_t* const codes = reinterpret_cast<int8_t*>(job.section + job.codes_at);
  for (size_t run = size_t{blockIdx.x} * 8 + threadIdx.x / 32; run < runs; run += size_t{gridDim.x} * 8) {
    const size_t begin = run * codecs::kScaleRun + lane_id();
    float x[kEach];
    uint32_t greatest = 0;
#pragma unroll
    for (unsigned j = 0; j < kEach; ++j) {
      x[j] = begin + 32 * j < job.entries ? job.x[begin + 32 * j] : 0.0f;
      greatest = ::max(greatest, exact::is_finite(x[j]) ? exact::mag(x[j]) : 0u);
    }
    const auto encoder = codecs::EntryEncoder::of(warp_max(greatest));
    if (lane_id() == 0) reinterpret_cast<uint32_t*>(job.section)[run] = encoder.stored;
#pragma unroll
    for (unsigned j = 0; j < kEach; ++j) {
      const size_t i = begin + 32 * j;
      if (i >= job.entries) break;
      const int32_t code = encoder.entry(x[j]);
      codes[i] = static_cast<int8_t>(code);
      if (kFeedback && exact::mag(x[j]) != 0 && exact::is_finite(x[j])) {
        const size_t at = job.chunk_of != nullptr ? size_t{job.chunk_of[i]} * job.chunk : i / job.c * job.chunk;
        job.residual[at + job.index[i]] = exact::sub(x[j], codecs::entry_value(encoder.stored, code));
      }
    }
  }
}

}  // namespace
}  // namespace gradgate::kernels::cuda
