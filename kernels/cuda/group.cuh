// One group of 256 elements per warp: eight elements a lane, loaded 16 bytes at a time (docs/format.md §2, rules 1-3).
#pragma once

#include <cstdint>

#include "codecs/bf16.h"
#include "codecs/exact_math.h"
#include "codecs/f16.h"
#include "codecs/traits.h"
#include "kernels/cuda/plugin.h"

namespace gradgate::kernels::cuda {
namespace {

inline constexpr unsigned kFull = 0xffffffffu;
inline constexpr unsigned kLanes = 32, kPerLane = 8;
static_assert(kLanes * kPerLane == codecs::kGroup);

__device__ __forceinline__ unsigned lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ unsigned lanes_below() { return (1u << lane_id()) - 1; }

/// Element of the group that lane's j-th value is: two runs of 128, four neighbours a lane, so that every access of a
/// warp is one run of bytes.
__device__ __forceinline__ unsigned element(unsigned lane, unsigned j) { return (j >> 2) * 128 + lane * 4 + (j & 3); }

/// Elements of group g of n.
__device__ __forceinline__ unsigned group_length(uint32_t n, unsigned g) {
  const uint32_t at = g * static_cast<uint32_t>(codecs::kGroup), left = n > at ? n - at : 0;
  return left < codecs::kGroup ? left : static_cast<unsigned>(codecs::kGroup);
}

// Over the lanes of a warp, which all get the result. Before sm_80 there is no instruction for it.
template <class Combine>
__device__ __forceinline__ uint32_t by_shuffles(uint32_t v, const Combine& combine) {
  for (int step = 16; step > 0; step >>= 1) v = combine(v, __shfl_xor_sync(kFull, v, step));
  return v;
}
__device__ __forceinline__ uint32_t warp_max(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kFull, v);
#else
  return by_shuffles(v, [](uint32_t a, uint32_t b) { return max(a, b); });
#endif
}
__device__ __forceinline__ uint32_t warp_min(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(kFull, v);
#else
  return by_shuffles(v, [](uint32_t a, uint32_t b) { return min(a, b); });
#endif
}
__device__ __forceinline__ uint32_t warp_sum(uint32_t v) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(kFull, v);
#else
  return by_shuffles(v, [](uint32_t a, uint32_t b) { return a + b; });
#endif
}

/// Sum over the lanes up to this one.
__device__ __forceinline__ uint32_t sum_up_to(uint32_t v) {
  // A shuffle tells whether there is such a lane.
  asm volatile(
      "{\n .reg .u32 lower;\n .reg .pred there;\n"
      " shfl.sync.up.b32 lower|there, %0, 1, 0, 0xffffffff;\n @there add.u32 %0, %0, lower;\n"
      " shfl.sync.up.b32 lower|there, %0, 2, 0, 0xffffffff;\n @there add.u32 %0, %0, lower;\n"
      " shfl.sync.up.b32 lower|there, %0, 4, 0, 0xffffffff;\n @there add.u32 %0, %0, lower;\n"
      " shfl.sync.up.b32 lower|there, %0, 8, 0, 0xffffffff;\n @there add.u32 %0, %0, lower;\n"
      " shfl.sync.up.b32 lower|there, %0, 16, 0, 0xffffffff;\n @there add.u32 %0, %0, lower;\n}"
      : "+r"(v));
  return v;
}

/// v, in a register from here on: made before a loop, the compiler would rather make it anew in every round.
__device__ __forceinline__ uint32_t held(uint32_t v) {
  asm volatile("" : "+r"(v));
  return v;
}
__device__ __forceinline__ size_t held(size_t v) {
  asm volatile("" : "+l"(v));
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
/// The low bytes of four codes, the first lowest.
__device__ __forceinline__ uint32_t low_bytes(const int32_t* code) {
  const uint32_t low = __byte_perm(code[0], code[1], 0x0040), high = __byte_perm(code[2], code[3], 0x0040);
  return __byte_perm(low, high, 0x5410);
}
template <class C>
__device__ __forceinline__ void store4_bytes(C* p, const int32_t* code) {
  __stwb(reinterpret_cast<uint32_t*>(p), low_bytes(code));
}

/// Whether runs of four elements at p can be moved at once.
template <class T>
__device__ bool four_aligned(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (4 * sizeof(T)) == 0;
}

/// The lane's eight values of p[begin …], +0 beyond n. `fast`: four_aligned(p).
template <class T>
__device__ __forceinline__ void load_lane(const T* p, unsigned n, bool fast, float* v, unsigned lane = lane_id()) {
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
  __device__ __forceinline__ void load(size_t begin, unsigned n, float* v, unsigned lane = lane_id()) const {
    if (dtype == DType::f32) {
      load_lane(at<float>(begin), n, fast, v, lane);
    } else if (dtype == DType::bf16) {
      load_lane(at<uint16_t>(begin), n, fast, v, lane);
    } else {
      load_lane(at<codecs::F16>(begin), n, fast, v, lane);
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

/// The lane's eight values of a group's room in shared memory.
__device__ __forceinline__ void store_room(float* room, const float* v) {
  float4* const to = reinterpret_cast<float4*>(room) + lane_id();
  to[0] = make_float4(v[0], v[1], v[2], v[3]);
  to[32] = make_float4(v[4], v[5], v[6], v[7]);
}
__device__ __forceinline__ void load_room(const float* room, float* v) {
  load4(room + lane_id() * 4, v);
  load4(room + 128 + lane_id() * 4, v + 4);
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

}  // namespace
}  // namespace gradgate::kernels::cuda
