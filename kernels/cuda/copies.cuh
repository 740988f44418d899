// none on a device: values copied as they are, 16 bytes a thread.
#pragma once

#include "kernels/cuda/blocks.cuh"

namespace gradgate::kernels::cuda {
namespace {

// Inf and NaN are counted by their exponents.
template <class T, T kExponent>
__global__ void __launch_bounds__(kBlockThreads) copy_counting(EncodeJob job) {
  const T* const from = static_cast<const T*>(job.gradient);
  T* const to = reinterpret_cast<T*>(job.first);
  constexpr unsigned kRun = 16 / sizeof(T);
  const size_t runs = reinterpret_cast<uintptr_t>(from) % 16 == 0 ? job.count / kRun : 0;
  const size_t stride = size_t{gridDim.x} * blockDim.x, start = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  uint32_t odd = 0;
  for (size_t i = start; i < runs; i += stride) {
    union {
      uint4 all;
      T each[kRun];
    } v;
    v.all = reinterpret_cast<const uint4*>(from)[i];
    T exponent = 0;
#pragma unroll
    for (unsigned j = 0; j < kRun; ++j) exponent = ::max(exponent, static_cast<T>(v.each[j] & kExponent));
    if (exponent == kExponent) {  // rare
      for (unsigned j = 0; j < kRun; ++j) odd += (v.each[j] & kExponent) == kExponent;
    }
    reinterpret_cast<uint4*>(to)[i] = v.all;
  }
  for (size_t i = runs * kRun + start; i < job.count; i += stride) {
    const T v = from[i];
    odd += (v & kExponent) == kExponent;
    to[i] = v;
  }
  odd = warp_sum(odd);
  if (lane_id() == 0 && odd != 0) add_non_finite(odd, job.payload, job.non_finite);
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads) copy_none(DecodeJob job) {
  if (!headers_ok(job.payload, 0, 1, 1, job.header, job.fault)) return;
  const T* const from = reinterpret_cast<const T*>(job.payload + job.first);
  T* const to = static_cast<T*>(job.out);
  constexpr unsigned kRun = 16 / sizeof(T);
  const size_t runs = reinterpret_cast<uintptr_t>(to) % 16 == 0 ? job.count / kRun : 0;
  const size_t stride = size_t{gridDim.x} * blockDim.x, start = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (size_t i = start; i < runs; i += stride)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  for (size_t i = runs * kRun + start; i < job.count; i += stride) to[i] = from[i];
}

}  // namespace
}  // namespace gradgate::kernels::cuda
