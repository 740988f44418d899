// Host side of every launch: sizes of grids, and the one call that starts a kernel.
#pragma once

#include <cuda_runtime.h>

#include "codecs/f16.h"
#include "codecs/layout.h"
#include "kernels/cuda/entries.cuh"
#include "kernels/cuda/group.cuh"

namespace gradgate::kernels::cuda {
namespace {

inline cudaStream_t stream_of(device::Stream stream) { return static_cast<cudaStream_t>(stream); }
inline unsigned padding(size_t bytes) {
  return static_cast<unsigned>((codecs::kSectionAlign - bytes % codecs::kSectionAlign) % codecs::kSectionAlign);
}
inline size_t groups_of(size_t count) { return count / codecs::kGroup + (count % codecs::kGroup != 0); }
inline size_t ceil_div(size_t n, size_t by) { return n / by + (n % by != 0); }

// Calls f with a value of the output's element type.
template <class F>
int with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(uint16_t{});
    case DType::f16:
      return f(codecs::F16{});
    default:
      return cudaErrorNotSupported;
  }
}

template <auto kKernel, class Job>
int launch(const Job& job, unsigned threads, size_t shared, size_t ctas, cudaStream_t stream) {
  if (ctas == 0) return cudaSuccess;
  kKernel<<<grid_for<kKernel>(threads, shared, ctas), threads, shared, stream>>>(job);
  return cudaGetLastError();
}

// The second step of int8 values.
inline int launch_quantize(QuantizeJob* job, size_t entries, cudaStream_t stream) {
  job->entries = entries;
  job->codes_at = codecs::codes_offset(entries);
  const size_t ctas = ceil_div(ceil_div(entries, codecs::kScaleRun), 8);
  return job->residual != nullptr ? launch<quantize_entries<true>>(*job, 256, 0, ctas, stream)
                                  : launch<quantize_entries<false>>(*job, 256, 0, ctas, stream);
}

}  // namespace
}  // namespace gradgate::kernels::cuda
