// Host side of every launch: sizes of grids, and the one call that starts a kernel.
#pragma once

#include <cuda_runtime.h>

#include "codecs/f16.h"
#include "codecs/layout.h"
#include "kernels/cuda/group.cuh"

namespace gradgate::kernels::cuda {
namespace {

inline cudaStream_t stream_of(device::Stream stream) { return static_cast<cudaStream_t>(stream); }
inline unsigned padding(size_t bytes) {
  return static_cast<unsigned>((codecs::kSectionAlign - bytes % codecs::kSectionAlign) % codecs::kSectionAlign);
}
inline size_t groups_of(size_t count) { return count / codecs::kGroup + (count % codecs::kGroup != 0); }
inline size_t ceil_div(size_t n, size_t by) { return n / by + (n % by != 0); }

inline constexpr size_t kVerdictBytes = 256;  // a verdict's room at the start of a workspace: what follows is aligned

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

/// Of the current device.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

/// CTAs of kKernel that fill the device once, or as many as there is work for.
template <auto kKernel>
unsigned grid_for(unsigned threads, size_t shared, size_t work) {
  static const unsigned resident = [=] {
    const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
    int per = 1;
    cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per, kKernel, static_cast<int>(threads), shared);
    return static_cast<unsigned>(processors * (per < 1 ? 1 : per));
  }();
  return static_cast<unsigned>(work < resident ? work : resident);
}

template <auto kKernel, class Job>
int launch(const Job& job, unsigned threads, size_t shared, size_t ctas, cudaStream_t stream) {
  if (ctas == 0) return cudaSuccess;
  kKernel<<<grid_for<kKernel>(threads, shared, ctas), threads, shared, stream>>>(job);
  return cudaGetLastError();
}

}  // namespace
}  // namespace gradgate::kernels::cuda
