// One group of 256 elements per warp: eight elements a lane, loaded 16 bytes at a time (docs/format.md §2, rules 1-3).
#pragma once

#include <cstdint>

#include "codecs/bf16.h"
#include "codecs/exact_math.h"
#include "codecs/f16.h"
#include "codecs/header.h"
#include "codecs/traits.h"
#include "kernels/cuda/plugin.h"

namespace gradgate::kernels::cuda {
namespace {

inline constexpr unsigned kFull = 0xffffffffu;
inline constexpr unsigned kLanes = 32, kPerLane = 8;
static_assert(kLanes * kPerLane == codecs::kGroup);

__device__ __forceinline__ unsigned lane_id() { return threadIdx.x & 31; }

/// Element of the group that lane's j-th value is: two runs of 128, four neighbours a lane, so that every access of a
/// warp is one run of bytes.
__device__ __forceinline__ unsigned element(unsigned lane, unsigned j) { return (j >> 2) * 128 + lane * 4 + (j & 3); }

/// Elements of group g of n.
__device__ __forceinline__ unsigned group_length(uint32_t n, unsigned g) {
  const uint32_t at = g * static_cast<uint32_t>(codecs::kGroup), left = n > at ? n - at : 0;
  return left < codecs::kGroup ? left : static_cast<unsigned>(codecs::kGroup);
}

__device__ __forceinline__ uint32_t warp_max(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kFull, v);
#else
  for (int step = 16; step > 0; step >>= 1) v = max(v, __shfl_xor_sync(kFull, v, step));
  return v;
#endif
}
__device__ __forceinline__ uint32_t warp_sum(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kFull, v);
#else
  for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(kFull, v, step);
  return v;
#endif
}

/// The value of lane ^ mask. As a float from end to end: __shfl_xor_sync moves it through an integer register and back.
__device__ __forceinline__ float shuffle_xor(float v, unsigned mask) {
  float other;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(other) : "f"(v), "r"(mask));
  return other;
}

/// v, in a register from here on: made before a loop, the compiler would rather make it anew in every round.
__device__ __forceinline__ uint32_t held(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(uint16_t v) { return codecs::widen_bf16(v); }
__device__ __forceinline__ float widen(codecs::F16 v) { return codecs::widen_f16(v.bits); }
__device__ __forceinline__ void narrow(float v, float* out) { *out = exact::canonical(v); }
__device__ __forceinline__ void narrow(float v, uint16_t* out) { *out = codecs::round_bf16(v); }
__device__ __forceinline__ void narrow(float v, codecs::F16* out) { out->bits = codecs::round_f16(v); }

/// Two values that become neither Inf nor NaN as f16, to nearest even: the first in the lower half.
__device__ __forceinline__ uint32_t round_two_f16(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t two;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
#else
  return codecs::round_f16(low) | static_cast<uint32_t>(codecs::round_f16(high)) << 16;
#endif
}

/// Two neighbouring f16, the first in the lower half.
__device__ __forceinline__ void widen_two_f16(uint32_t two, float* v) {
  asm("{\n .reg .f16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;\n}"
      : "=f"(v[0]), "=f"(v[1])
      : "r"(two));
}

// Four neighbouring values in one access. The caller knows that `p` is aligned to all four.
__device__ __forceinline__ void load4(const float* p, float* v) {
  const float4 w = *reinterpret_cast<const float4*>(p);
  v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
}
__device__ __forceinline__ void load4(const uint16_t* p, float* v) {
  const uint2 w = *reinterpret_cast<const uint2*>(p);
  v[0] = exact::from_bits(w.x << 16), v[1] = exact::from_bits(w.x & 0xffff0000u);
  v[2] = exact::from_bits(w.y << 16), v[3] = exact::from_bits(w.y & 0xffff0000u);
}
__device__ __forceinline__ void load4(const codecs::F16* p, float* v) {
  const uint2 w = *reinterpret_cast<const uint2*>(p);
  widen_two_f16(w.x, v), widen_two_f16(w.y, v + 2);
}
// To global memory, by an instruction of their own: next to a branch that stores the same values one at a time, the
// compiler would take a plain vector store apart.
__device__ __forceinline__ void store4(float* p, const float* v) {
  __stwb(reinterpret_cast<float4*>(p), make_float4(v[0], v[1], v[2], v[3]));
}
__device__ __forceinline__ void store4(uint16_t* p, const uint16_t* v) {
  __stwb(reinterpret_cast<uint2*>(p),
         make_uint2(v[0] | static_cast<uint32_t>(v[1]) << 16, v[2] | static_cast<uint32_t>(v[3]) << 16));
}
__device__ __forceinline__ void store4(codecs::F16* p, const codecs::F16* v) {
  __stwb(reinterpret_cast<uint2*>(p), make_uint2(v[0].bits | static_cast<uint32_t>(v[1].bits) << 16,
                                                 v[2].bits | static_cast<uint32_t>(v[3].bits) << 16));
}
template <class C>
__device__ __forceinline__ void store4_bytes(C* p, const int32_t* code) {
  __stwb(reinterpret_cast<uint32_t*>(p),
         (code[0] & 0xffu) | (code[1] & 0xffu) << 8 | (code[2] & 0xffu) << 16 | static_cast<uint32_t>(code[3]) << 24);
}

/// Whether runs of four elements at p can be moved at once.
template <class T>
__device__ bool four_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (4 * sizeof(T)) == 0;
}

/// The lane's eight values of p[begin …], +0 beyond n. `fast`: four_aligned(p).
template <class T>
__device__ __forceinline__ void load_lane(const T* p, unsigned n, bool fast, float* v) {
  const unsigned lane = lane_id();
  if (fast && n == codecs::kGroup) {
    load4(p + lane * 4, v);
    load4(p + 128 + lane * 4, v + 4);
  } else {
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) {
      const unsigned i = element(lane, j);
      v[j] = i < n ? widen(p[i]) : 0.0f;
    }
  }
}
template <class T>
__device__ __forceinline__ void store_lane(T* p, unsigned n, bool fast, const T* v) {
  const unsigned lane = lane_id();
  if (fast && n == codecs::kGroup) {
    store4(p + lane * 4, v);
    store4(p + 128 + lane * 4, v + 4);
  } else {
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) {
      const unsigned i = element(lane, j);
      if (i < n) p[i] = v[j];
    }
  }
}

/// A gradient or an output in global memory. Its dtype is looked at where values are moved, once for eight of a lane:
/// kernels for each dtype would take as many times as long to compile.
struct Vector {
  std::byte* data;
  DType dtype;
  bool fast;  ///< runs of four elements can be moved at once

  __device__ Vector(const void* p, DType t)
      : data(static_cast<std::byte*>(const_cast<void*>(p))),
        dtype(t),
        fast(reinterpret_cast<uintptr_t>(p) % (t == DType::f32 ? 16 : 8) == 0) {}

  template <class T>
  __device__ __forceinline__ T* at(size_t i) const {
    return reinterpret_cast<T*>(data) + i;
  }
  /// The lane's eight values of the group at `begin`, +0 from n on.
  __device__ __forceinline__ void load(size_t begin, unsigned n, float* v) const {
    if (dtype == DType::f32) {
      load_lane(at<float>(begin), n, fast, v);
    } else if (dtype == DType::bf16) {
      load_lane(at<uint16_t>(begin), n, fast, v);
    } else {
      load_lane(at<codecs::F16>(begin), n, fast, v);
    }
  }
  /// Writes them, rounded to the dtype.
  __device__ __forceinline__ void store(size_t begin, unsigned n, const float* v) const {
    if (dtype == DType::f32) {
      store_as<float>(begin, n, v);
    } else if (dtype == DType::bf16) {
      store_as<uint16_t>(begin, n, v);
    } else {
      store_as<codecs::F16>(begin, n, v);
    }
  }
  /// Value i, and its new value.
  __device__ __forceinline__ float get(size_t i) const {
    return dtype == DType::f32    ? *at<float>(i)
           : dtype == DType::bf16 ? widen(*at<uint16_t>(i))
                                  : widen(*at<codecs::F16>(i));
  }
  __device__ __forceinline__ void put(size_t i, float v) const {
    if (dtype == DType::f32) {
      narrow(v, at<float>(i));
    } else if (dtype == DType::bf16) {
      narrow(v, at<uint16_t>(i));
    } else {
      narrow(v, at<codecs::F16>(i));
    }
  }

 private:
  template <class T>
  __device__ __forceinline__ void store_as(size_t begin, unsigned n, const float* v) const {
    T w[kPerLane];
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) narrow(v[j], w + j);
    store_lane(at<T>(begin), n, fast, w);
  }
};

/// What a value becomes when it is stored as `dtype`.
__device__ __forceinline__ float rounded_to(float v, DType dtype) {
  return dtype == DType::f32    ? v
         : dtype == DType::bf16 ? codecs::widen_bf16(codecs::round_bf16(v))
                                : codecs::widen_f16(codecs::round_f16(v));
}

/// All eight values into a group's room in shared memory (or where chunks are spilled).
__device__ __forceinline__ void store_room(float* room, const float* v) {
  float4* const to = reinterpret_cast<float4*>(room) + lane_id();
  to[0] = make_float4(v[0], v[1], v[2], v[3]);
  to[32] = make_float4(v[4], v[5], v[6], v[7]);
}

/// Of the four neighbours of a lane, and of its eight elements of a group.
__device__ __forceinline__ uint32_t max_mag_of_four(const float* v) {
  return max(max(max(exact::mag(v[0]), exact::mag(v[1])), exact::mag(v[2])), exact::mag(v[3]));
}
__device__ __forceinline__ uint32_t max_mag(const float* v) { return max(max_mag_of_four(v), max_mag_of_four(v + 4)); }

/// The one of two numbers that is greater in magnitude, under some sign.
__device__ __forceinline__ float greater_mag(float a, float b) {
#if __CUDA_ARCH__ >= 860
  float greater;
  asm("max.xorsign.abs.f32 %0, %1, %2;" : "=f"(greater) : "f"(a), "f"(b));
  return greater;
#else
  return fmaxf(fabsf(a), fabsf(b));
#endif
}

/// The same of those that are finite.
__device__ __forceinline__ uint32_t max_finite_mag(const float* v) {
  uint32_t max_of = 0;
#pragma unroll
  for (unsigned j = 0; j < kPerLane; ++j) max_of = max(max_of, exact::is_finite(v[j]) ? exact::mag(v[j]) : 0u);
  return max_of;
}

/// x of a group from its g (in x on entry) and residual: returns whether it is a zero group, whose e is kept.
template <bool kFeedback>
__device__ __forceinline__ bool form_x(const float* e, unsigned n, bool fast, bool flush, float* x) {
  if constexpr (kFeedback) {
    const bool zero = warp_max(max_mag(x)) == 0;
    if (zero && !flush) {
#pragma unroll
      for (unsigned j = 0; j < kPerLane; ++j) x[j] = 0.0f;
      return true;
    }
    float r[kPerLane];
    load_lane(e, n, fast, r);
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) x[j] = exact::is_finite(x[j]) ? exact::add(x[j], r[j]) : x[j];
  }
  return false;
}

/// What non-finite x leave behind: a flag in the payload's header, and the caller's count.
__device__ inline void add_non_finite(uint32_t count, std::byte* payload, uint64_t* counter) {
  atomicOr(reinterpret_cast<unsigned*>(payload + 4), static_cast<unsigned>(codecs::kFlagNonFinite) << 24);
  if (counter != nullptr)
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(count));
}

/// A group with a non-finite x: counted, and noted in the payload's header. `max_bits`: the greatest mag(x) of the
/// group.
__device__ __forceinline__ void note_non_finite(const float* x, std::byte* payload, uint64_t* counter) {
  uint32_t odd = 0;
#pragma unroll
  for (unsigned j = 0; j < kPerLane; ++j) odd += !exact::is_finite(x[j]);
  odd = warp_sum(odd);
  if (lane_id() == 0) add_non_finite(odd, payload, counter);
}

/// The fault of one header as a fault word, 0 for none.
__device__ inline uint64_t header_fault(const std::byte* payload, const codecs::WireHeader& expected, unsigned rank) {
  codecs::WireHeader got;
  const uint4* from = reinterpret_cast<const uint4*>(payload);
  reinterpret_cast<uint4*>(&got)[0] = from[0];
  reinterpret_cast<uint4*>(&got)[1] = from[1];
  const PayloadFault fault = codecs::check_header(got, expected);
  const uint64_t place = kFaultSet | static_cast<uint64_t>(rank) << 16;
  if (fault != PayloadFault::none) return place | static_cast<uint64_t>(fault) << 8;
  if ((got.flags & codecs::kFlagError) != 0) return place | kFaultPeer << 8 | got.flags >> 4;
  return 0;
}

/// Keeps the first fault that a caller has not yet cleared.
__device__ inline void report(uint64_t* word, uint64_t fault) {
  atomicCAS(reinterpret_cast<unsigned long long*>(word), 0ull, static_cast<unsigned long long>(fault));
}

/// Every CTA looks at the headers itself: 32 bytes a rank are cheaper than a launch. True: none is at fault, and no
/// fault was there before. All threads of the CTA must come here.
__device__ inline bool headers_ok(const std::byte* payloads, size_t stride, unsigned ranks, unsigned skip,
                                  const codecs::WireHeader& expected, uint64_t* word) {
  __shared__ unsigned long long first;
  // One thread looks at the word: another CTA may be setting it.
  if (threadIdx.x == 0) first = *word == 0 ? ~0ull : *word;
  __syncthreads();
  for (unsigned rank = threadIdx.x; rank < ranks; rank += blockDim.x) {
    if (rank == skip) continue;
    const uint64_t fault = header_fault(payloads + rank * stride, expected, rank);
    if (fault != 0) atomicMin(&first, static_cast<unsigned long long>(fault));
  }
  __syncthreads();
  if (first == ~0ull) return true;
  if (threadIdx.x == 0 && blockIdx.x == 0) report(word, first);
  return false;
}

/// Validation of one payload into a verdict (~0 before), which becomes the first fault in rank order.
struct Verdict {
  uint64_t* first;
  unsigned rank;

  __device__ __forceinline__ void keep(uint64_t fault) const {
    atomicMin(reinterpret_cast<unsigned long long*>(first), static_cast<unsigned long long>(fault));
  }
  /// By one thread of the CTAs of a payload.
  __device__ __forceinline__ void header(const std::byte* payload, const codecs::WireHeader& due) const {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const uint64_t fault = header_fault(payload, due, rank);
    if (fault != 0) keep(fault);
  }
  /// All threads of the CTA must come here.
  __device__ __forceinline__ void indices(bool wrong) const {
    if (__syncthreads_or(wrong) && threadIdx.x == 0)
      keep(kFaultSet | static_cast<uint64_t>(rank) << 16 | static_cast<uint64_t>(PayloadFault::index) << 8);
  }
};

/// Whether the kernel that validated the payloads found nothing, and no fault was there before; else its verdict is
/// kept.
__device__ inline bool no_fault(const uint64_t* verdict, uint64_t* word) {
  const uint64_t found = *verdict;
  if (found == ~0ull) return *word == 0;  // then nobody sets it while this kernel runs
  if (threadIdx.x == 0 && blockIdx.x == 0) report(word, found);
  return false;
}

/// What all encoders take. Sections are those of the whole payload.
struct EncodeJob {
  codecs::WireHeader header;
  const void* gradient;
  DType dtype;
  float* residual;
  size_t count;
  std::byte* payload;
  std::byte *first, *second, *third;
  std::byte *first_end, *second_end, *third_end;  ///< where their padding starts
  unsigned first_pad, second_pad, third_pad;      ///< its bytes
  Seed seed;
  const uint32_t* step;  ///< where set, takes the place of seed.step
  uint64_t* non_finite;
  bool flush;
  uint32_t empty;      ///< what section 0 holds for no elements, where it holds anything
  uint32_t* greatest;  ///< the greatest finite mag(x) of the vector, for codecs that need it first
  // A sum (ranks > 0): rank r's payload stands at terms + r * stride, and its sections as far into it as ours.
  const std::byte* terms;
  size_t stride;
  unsigned ranks, self;
  const uint64_t* verdict;  ///< null, or ~0 where a kernel before this one found no fault
  uint64_t* fault;
};

/// The seed of a call, with the step that holds when it runs.
__device__ __forceinline__ Seed seed_of(const EncodeJob& job) {
  Seed seed = job.seed;
  if (job.step != nullptr) seed.step = *job.step;
  return seed;
}

/// Whether a sum may go ahead; always for a plain encode. All threads of the CTA must come here.
__device__ inline bool may_encode(const EncodeJob& job) {
  if (job.ranks == 0) return true;
  if (job.verdict != nullptr) return no_fault(job.verdict, job.fault);
  return headers_ok(job.terms, job.stride, job.ranks, job.self, job.header, job.fault);
}

/// Header and padding of a payload. By the first warp of a CTA, before anything that may set the header's flag.
__device__ inline void write_frame(EncodeJob& job) {
  const unsigned i = threadIdx.x;
  if (i == 0) {
    if (job.step != nullptr) job.header.step = *job.step;  // outside the header's check: it changes from step to step
    reinterpret_cast<uint4*>(job.payload)[0] = reinterpret_cast<const uint4*>(&job.header)[0];
    reinterpret_cast<uint4*>(job.payload)[1] = reinterpret_cast<const uint4*>(&job.header)[1];
  }
  if (i == 0 && job.count == 0 && job.first != job.first_end) *reinterpret_cast<uint32_t*>(job.first) = job.empty;
  if (i < job.first_pad) job.first_end[i] = std::byte{0};
  if (i < job.second_pad) job.second_end[i] = std::byte{0};
  if (i < job.third_pad) job.third_end[i] = std::byte{0};
}
__global__ void begin_payload(EncodeJob job) {
  if (may_encode(job)) write_frame(job);
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

}  // namespace
}  // namespace gradgate::kernels::cuda
