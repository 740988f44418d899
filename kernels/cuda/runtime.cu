// The CUDA runtime as libgradgate sees it (runtime.h), and the kernels over plain vectors that exchanges and sessions
// need between codec calls. A translation unit of its own: it compiles beside plugin.cu.
#include <cuda_runtime.h>

#include <cstdio>
#include <mutex>
#include <new>
#include <vector>

#include "kernels/cuda/runtime_exchange.cuh"

namespace gradgate::kernels::cuda {
namespace {

// Adds a value of every lane to memory. All lanes of the warp must come here.
__device__ inline void add_all(double* into, double v) {
  for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
  if (threadIdx.x % 32 == 0 && v != 0) atomicAdd(into, v);
}
__device__ inline void add_all(uint64_t* into, uint64_t v) {
  for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
  if (threadIdx.x % 32 == 0 && v != 0)
    atomicAdd(reinterpret_cast<unsigned long long*>(into), static_cast<unsigned long long>(v));
}

// ---- vectors
// ---------------------------------------------------------------------------------------------------------

struct ScaleF32 {
  using Element = float;
  static __device__ float of(float x, float factor, float ranks, bool divide, double, double) {
    return divide ? __fdiv_rn(x, ranks) : __fmul_rn(x, factor);
  }
};
struct ScaleF64 {
  using Element = double;
  static __device__ double of(double x, float, float, bool divide, double factor, double ranks) {
    return divide ? __ddiv_rn(x, ranks) : __dmul_rn(x, factor);
  }
};
struct ScaleBf16 {
  using Element = uint16_t;
  static __device__ uint16_t of(uint16_t x, float factor, float ranks, bool divide, double, double) {
    const float wide = codecs::widen_bf16(x);
    return to_bf16(divide ? __fdiv_rn(wide, ranks) : __fmul_rn(wide, factor));
  }
};
struct ScaleF16 {
  using Element = uint16_t;
  static __device__ uint16_t of(uint16_t x, float factor, float ranks, bool divide, double, double) {
    const float wide = codecs::widen_f16(x);
    return to_f16(divide ? __fdiv_rn(wide, ranks) : __fmul_rn(wide, factor));
  }
};

template <class Scale>
__global__ void scale_vector(typename Scale::Element* data, size_t count, int ranks, bool divide) {
  const double inverse = __ddiv_rn(1.0, static_cast<double>(ranks));
  const float factor = __double2float_rn(inverse), n = static_cast<float>(ranks);
  for (size_t i = first_element(); i < count; i += element_step())
    data[i] = Scale::of(data[i], factor, n, divide, inverse, static_cast<double>(ranks));
}

template <class Scale>
int scale_as(void* data, size_t count, int ranks, bool divide, StreamHandle stream) {
  scale_vector<Scale><<<grid(count), kThreads, 0, stream_of(stream)>>>(static_cast<typename Scale::Element*>(data),
                                                                       count, ranks, divide);
  return cudaGetLastError();
}

int scale_dense(void* data, size_t count, DType dtype, int ranks, bool divide, StreamHandle stream) noexcept {
  if (count == 0) return cudaSuccess;
  switch (dtype) {
    case DType::f32:
      return scale_as<ScaleF32>(data, count, ranks, divide, stream);
    case DType::f64:
      return scale_as<ScaleF64>(data, count, ranks, divide, stream);
    case DType::bf16:
      return scale_as<ScaleBf16>(data, count, ranks, divide, stream);
    case DType::f16:
      return scale_as<ScaleF16>(data, count, ranks, divide, stream);
    default:
      return cudaErrorNotSupported;
  }
}

__global__ void scale_floats(float* e, size_t count, double ratio) {
  for (size_t i = first_element(); i < count; i += element_step())
    e[i] = __double2float_rn(__dmul_rn(static_cast<double>(e[i]), ratio));
}

int scale_residual(float* residual, size_t count, double ratio, StreamHandle stream) noexcept {
  if (count == 0) return cudaSuccess;
  scale_floats<<<grid(count), kThreads, 0, stream_of(stream)>>>(residual, count, ratio);
  return cudaGetLastError();
}

// Elements whose exponent bits are all set.
template <class Word>
__global__ void count_exponents(const Word* data, size_t count, Word exponent, uint64_t* into) {
  uint64_t found = 0;
  for (size_t i = first_element(); i < count; i += element_step())
    found += static_cast<Word>(data[i] & exponent) == exponent;
  add_all(into, found);
}

template <class Word>
int count_as(const void* data, size_t count, Word exponent, uint64_t* into, StreamHandle stream) {
  count_exponents<Word>
      <<<grid(count), kThreads, 0, stream_of(stream)>>>(static_cast<const Word*>(data), count, exponent, into);
  return cudaGetLastError();
}

int count_non_finite(const void* data, size_t count, DType dtype, uint64_t* into, StreamHandle stream) noexcept {
  if (count == 0) return cudaSuccess;
  switch (dtype) {
    case DType::f32:
      return count_as<uint32_t>(data, count, 0x7f800000u, into, stream);
    case DType::bf16:
      return count_as<uint16_t>(data, count, 0x7f80u, into, stream);
    case DType::f16:
      return count_as<uint16_t>(data, count, 0x7c00u, into, stream);
    case DType::f64:
      return count_as<uint64_t>(data, count, 0x7ff0000000000000ull, into, stream);
    default:
      return cudaErrorNotSupported;
  }
}

// ---- guard
// -----------------------------------------------------------------------------------------------------------

__device__ inline float value_at(const GuardCall& call, size_t i, uint32_t* bits) {
  if (call.dtype == DType::f32) {
    const float x = static_cast<const float*>(call.gradient)[i];
    *bits = __float_as_uint(x);
    return x;
  }
  const uint16_t half = static_cast<const uint16_t*>(call.gradient)[i];
  *bits = half;
  return call.dtype == DType::bf16 ? codecs::widen_bf16(half) : codecs::widen_f16(half);
}

// The hash is a sum of mixed (place, bits): the same in whatever order the elements come.
__device__ inline uint64_t mixed(uint64_t place, uint32_t bits) {
  uint64_t h = (place + 1) * 0x9e3779b97f4a7c15ull ^ bits;
  h = (h ^ h >> 30) * 0xbf58476d1ce4e5b9ull;
  h = (h ^ h >> 27) * 0x94d049bb133111ebull;
  return h ^ h >> 31;
}

__global__ void guard_sums(GuardCall call) {
  double gradient = 0, norm1 = 0, error1 = 0, error2 = 0, norm2 = 0;
  uint64_t odd = 0, hash = 0;
  for (size_t i = first_element(); i < call.count; i += element_step()) {
    uint32_t bits;
    const double value = value_at(call, i, &bits), e = call.residual[i];
    const bool owned = i - call.own_first < call.own_count;
    if (call.after) hash += mixed(i, bits);
    if (!isfinite(value)) {
      ++odd;
    } else if (!call.after) {
      gradient += value * value;
      if (!owned) norm1 += (value + e) * (value + e);
    } else if (!owned) {
      error1 += e * e;
    } else {
      error2 += e * e;
      norm2 += (value * call.ranks + e) * (value * call.ranks + e);
    }
  }
  GuardSums* const sums = call.sums;
  if (call.after) {
    add_all(&sums->error1, error1);
    add_all(&sums->error2, error2);
    add_all(&sums->norm2, norm2);
    add_all(&sums->non_finite_out, odd);
    add_all(&sums->hash, hash);
  } else {
    add_all(&sums->gradient, gradient);
    add_all(&sums->norm1, norm1);
    add_all(&sums->non_finite_in, odd);
  }
}

int guard(const GuardCall& call, StreamHandle stream) noexcept {
  if (call.count == 0) return cudaSuccess;
  guard_sums<<<grid(call.count), kThreads, 0, stream_of(stream)>>>(call);
  return cudaGetLastError();
}

// ---- memory, streams, events
// -----------------------------------------------------------------------------------------

// An error of the call itself must not be found by a later cudaGetLastError().
int cleared(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

const char* error_text(int error) noexcept { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
int versions(int* driver, int* runtime) noexcept {
  const cudaError_t error = cudaDriverGetVersion(driver);
  return cleared(error != cudaSuccess ? error : cudaRuntimeGetVersion(runtime));
}
int set_device(int device) noexcept { return cleared(cudaSetDevice(device)); }
int device_name(char* text, size_t size) noexcept {
  int device = 0;
  cudaDeviceProp properties;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return cleared(error);
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, device); error != cudaSuccess)
    return cleared(error);
  std::snprintf(text, size, "%s", properties.name);
  return cudaSuccess;
}

// cudaFree() and cudaFreeHost() wait for the whole device: with ranks that share one, for a peer's collective, which
// may be waiting for this rank. Stream-ordered memory is given back without; pinned memory is kept for the next one who
// asks.
int allocate(void** memory, size_t bytes) noexcept {
  cudaError_t error = cudaMallocAsync(memory, bytes, cudaStreamPerThread);
  if (error == cudaSuccess) return cleared(cudaStreamSynchronize(cudaStreamPerThread));
  if (error == cudaErrorNotSupported) error = cudaMalloc(memory, bytes);
  return cleared(error);
}
int release(void* memory) noexcept {
  if (cudaFreeAsync(memory, cudaStreamPerThread) == cudaSuccess) return cudaSuccess;
  cudaGetLastError();
  return cleared(cudaFree(memory));
}

struct PinnedBlock {
  void* memory;
  size_t bytes;
  bool free;
};
std::mutex pinned_mutex;
std::vector<PinnedBlock>& pinned_blocks() {
  static auto* const blocks = new std::vector<PinnedBlock>;  // outlives every static that may still release
  return *blocks;
}

int allocate_pinned(void** memory, size_t bytes) noexcept try {
  const std::lock_guard lock(pinned_mutex);
  for (PinnedBlock& block : pinned_blocks()) {
    if (!block.free || block.bytes < bytes || block.bytes / 2 > bytes) continue;
    block.free = false;
    *memory = block.memory;
    return cudaSuccess;
  }
  pinned_blocks().reserve(pinned_blocks().size() + 1);
  const cudaError_t error = cudaHostAlloc(memory, bytes, cudaHostAllocPortable);
  if (error == cudaSuccess) pinned_blocks().push_back({*memory, bytes, false});
  return cleared(error);
} catch (const std::bad_alloc&) {
  return cudaErrorMemoryAllocation;
}
int release_pinned(void* memory) noexcept {
  const std::lock_guard lock(pinned_mutex);
  for (PinnedBlock& block : pinned_blocks()) {
    if (block.memory != memory) continue;
    block.free = true;
    return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}
int copy(void* to, const void* from, size_t bytes, StreamHandle stream) noexcept {
  return bytes == 0 ? 0 : cleared(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)));
}
int fill(void* memory, int byte, size_t bytes, StreamHandle stream) noexcept {
  return bytes == 0 ? 0 : cleared(cudaMemsetAsync(memory, byte, bytes, stream_of(stream)));
}

int create_stream(StreamHandle* stream) noexcept {
  int least = 0, greatest = 0;
  if (const cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest); error != cudaSuccess)
    return cleared(error);
  return cleared(
      cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking, greatest));
}
int destroy_stream(StreamHandle stream) noexcept { return cleared(cudaStreamDestroy(stream_of(stream))); }
int create_event(Event* event) noexcept { return cleared(cudaEventCreate(reinterpret_cast<cudaEvent_t*>(event))); }
int destroy_event(Event event) noexcept { return cleared(cudaEventDestroy(static_cast<cudaEvent_t>(event))); }
int record(Event event, StreamHandle stream) noexcept {
  return cleared(cudaEventRecord(static_cast<cudaEvent_t>(event), stream_of(stream)));
}
int wait_event(StreamHandle stream, Event event) noexcept {
  return cleared(cudaStreamWaitEvent(stream_of(stream), static_cast<cudaEvent_t>(event), 0));
}
int query(Event event, bool* complete) noexcept {
  const cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(event));
  *complete = error == cudaSuccess;
  return cleared(error == cudaErrorNotReady ? (cudaGetLastError(), cudaSuccess) : error);
}
int elapsed(Event from, Event to, double* seconds) noexcept {
  float milliseconds = 0;
  const cudaError_t error =
      cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(from), static_cast<cudaEvent_t>(to));
  *seconds = static_cast<double>(milliseconds) * 1e-3;
  return cleared(error);
}

constexpr Runtime kRuntime = {
    kRuntimeVersion,  error_text,     versions,   set_device,  device_name,   allocate,       release,
    allocate_pinned,  release_pinned, copy,       fill,        create_stream, destroy_stream, create_event,
    destroy_event,    record,         wait_event, query,       elapsed,       check,          mark_failed,
    seal_sums,        open_sums,      widen,      close_block, open_blocks,   scale_dense,    scale_residual,
    count_non_finite, guard};

}  // namespace
}  // namespace gradgate::kernels::cuda

extern "C" __attribute__((visibility("default"))) const gradgate::kernels::cuda::Runtime* gradgate_cuda_runtime() {
  return &gradgate::kernels::cuda::kRuntime;
}
