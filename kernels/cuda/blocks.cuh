// Codecs that treat each group of 256 on its own (none, bf16, int8): a warp a group, the grid sized to fill the device.
// Per element read and written, with f32 gradients: encode 4 + p bytes, with feedback 12 + p (p: payload bytes an
// element), decode p + 4. Equal to kernels/cpu/loops/blocks.h byte for byte.
#pragma once

#include "codecs/codecs.h"
#include "kernels/cuda/group.cuh"

namespace gradgate::kernels::cuda {
namespace {

inline constexpr unsigned kBlockThreads = 256, kBlockWarps = kBlockThreads / 32;

// A codec with a scale per block of 256 and a byte per element: C is its BlockFormat (codecs/scaled.h).
template <class C>
struct ScaledBlock {
  using Code = typename C::Code;
  static_assert(C::kBlock == codecs::kGroup && C::kBits == 8 && !C::kStochastic);

  /// Writes the group's part of the payload. With feedback x becomes the new residual; false: the residual stays.
  template <bool kFeedback>
  static __device__ __forceinline__ bool encode(const EncodeJob& job, size_t group, unsigned n, uint32_t max_bits,
                                                float* x) {
    const typename C::Encoder encoder = C::Encoder::of(max_bits);
    if (lane_id() == 0) reinterpret_cast<uint32_t*>(job.first)[group] = encoder.stored;
    int32_t code[kPerLane];
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) code[j] = encoder.finite ? encoder.code(x[j]) : 0;
    Code* out = reinterpret_cast<Code*>(job.second) + group * codecs::kGroup;
    const unsigned lane = lane_id();
    if (n == codecs::kGroup) {
      store4_bytes(out + lane * 4, code);
      store4_bytes(out + 128 + lane * 4, code + 4);
    } else {
#pragma unroll
      for (unsigned j = 0; j < kPerLane; ++j) {
        if (element(lane, j) < n) out[element(lane, j)] = static_cast<Code>(code[j]);
      }
    }
    if constexpr (kFeedback) {
      const typename C::Decoder decoder = C::Decoder::of(encoder.stored);
#pragma unroll
      for (unsigned j = 0; j < kPerLane; ++j) x[j] = exact::sub(x[j], decoder.value(code[j]));
      return encoder.finite;  // else every d is NaN
    }
    return false;
  }

  /// The lane's eight values of a group in the sections of a payload.
  static __device__ __forceinline__ void decode(const std::byte* first, const std::byte* second, size_t group,
                                                unsigned n, float* v) {
    const typename C::Decoder decoder = C::Decoder::of(reinterpret_cast<const uint32_t*>(first)[group]);
    const Code* in = reinterpret_cast<const Code*>(second) + group * codecs::kGroup;
    const unsigned lane = lane_id();
    if (n == codecs::kGroup) {
      const uint32_t words[2] = {*reinterpret_cast<const uint32_t*>(in + lane * 4),
                                 *reinterpret_cast<const uint32_t*>(in + 128 + lane * 4)};
#pragma unroll
      for (unsigned j = 0; j < kPerLane; ++j) v[j] = decoder.value(static_cast<Code>(words[j >> 2] >> (8 * (j & 3))));
    } else {
#pragma unroll
      for (unsigned j = 0; j < kPerLane; ++j) v[j] = element(lane, j) < n ? decoder.value(in[element(lane, j)]) : 0.0f;
    }
  }
};

// Values of two bytes, each on its own.
struct CastBlock {
  template <bool kFeedback>
  static __device__ __forceinline__ bool encode(const EncodeJob& job, size_t group, unsigned n, uint32_t, float* x) {
    uint16_t code[kPerLane];
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) code[j] = codecs::round_bf16(x[j]);
    store_lane(reinterpret_cast<uint16_t*>(job.first) + group * codecs::kGroup, n, true, code);
    if constexpr (kFeedback) {
#pragma unroll
      for (unsigned j = 0; j < kPerLane; ++j) {
        if (exact::is_finite(x[j])) x[j] = exact::sub(x[j], codecs::widen_bf16(code[j]));
      }
    }
    return kFeedback;  // a non-finite x is told by its value
  }
  static __device__ __forceinline__ void decode(const std::byte* first, const std::byte*, size_t group, unsigned n,
                                                float* v) {
    load_lane(reinterpret_cast<const uint16_t*>(first) + group * codecs::kGroup, n, true, v);
  }
};

// none: the gradient's own values; a sum is rounded to the gradient's dtype, its NaN made canonical.
template <class G>
struct NoneBlock {
  template <bool kFeedback>
  static __device__ __forceinline__ bool encode(const EncodeJob& job, size_t group, unsigned n, uint32_t, float* x) {
    static_assert(!kFeedback);
    G value[kPerLane];
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) narrow(x[j], value + j);
    store_lane(reinterpret_cast<G*>(job.first) + group * codecs::kGroup, n, true, value);
    return false;
  }
  static __device__ __forceinline__ void decode(const std::byte* first, const std::byte*, size_t group, unsigned n,
                                                float* v) {
    load_lane(reinterpret_cast<const G*>(first) + group * codecs::kGroup, n, true, v);
  }
};

__device__ __forceinline__ unsigned group_length(size_t group, size_t count) {
  const size_t left = count - group * codecs::kGroup;
  return left < codecs::kGroup ? static_cast<unsigned>(left) : static_cast<unsigned>(codecs::kGroup);
}

// Encodes the gradient (kSum: the sum of all ranks' shards, own one unencoded), with feedback in the same pass.
template <class Block, class G, bool kFeedback, bool kSum>
__global__ void __launch_bounds__(kBlockThreads) encode_blocks(EncodeJob job) {
  if constexpr (kSum) {
    if (!may_encode(job)) return;
  }
  const G* const gradient = static_cast<const G*>(job.gradient);
  const bool fast_g = four_aligned(gradient), fast_e = four_aligned(job.residual);
  const size_t groups = job.count / codecs::kGroup + (job.count % codecs::kGroup != 0);
  const size_t step = size_t{gridDim.x} * kBlockWarps;
  for (size_t group = size_t{blockIdx.x} * kBlockWarps + threadIdx.x / 32; group < groups; group += step) {
    const size_t begin = group * codecs::kGroup;
    const unsigned n = group_length(group, job.count);
    float x[kPerLane];
    if constexpr (!kSum) {
      load_lane(gradient + begin, n, fast_g, x);
    } else {
      const size_t first = job.first - job.payload, second = job.second - job.payload;
      for (unsigned rank = 0; rank < job.ranks; ++rank) {
        float v[kPerLane];
        if (rank == job.self) {
          load_lane(gradient + begin, n, fast_g, v);
        } else {
          const std::byte* term = job.terms + rank * job.stride;
          Block::decode(term + first, term + second, group, n, v);
        }
#pragma unroll
        for (unsigned j = 0; j < kPerLane; ++j) x[j] = rank == 0 ? v[j] : exact::add(x[j], v[j]);
      }
    }
    float* const e = job.residual + begin;
    const bool kept = form_x<kFeedback>(e, n, fast_e, job.flush, x);
    const uint32_t max_bits = warp_max(max_mag(x));
    if (max_bits >= exact::kInfBits) note_non_finite(x, job.payload, job.non_finite);
    const bool changed = Block::template encode<kFeedback>(job, group, n, max_bits, x);
    if constexpr (kFeedback) {
      if (kept || !changed) continue;
      if (max_bits < exact::kInfBits) {
        store_lane(e, n, fast_e, x);
      } else {
#pragma unroll
        for (unsigned j = 0; j < kPerLane; ++j) {
          const unsigned i = element(lane_id(), j);
          if (i < n && exact::is_finite(x[j])) e[i] = x[j];
        }
      }
    }
  }
}

struct DecodeJob {
  codecs::WireHeader header;
  const std::byte* payload;
  const std::byte *first, *second;
  void* out;
  size_t count;
  float scale;
  const uint64_t* verdict;
  uint64_t* fault;
};

template <class Block, class O, bool kAdd>
__global__ void __launch_bounds__(kBlockThreads) decode_blocks(DecodeJob job) {
  if (!headers_ok(job.payload, 0, 1, 1, job.header, job.fault)) return;
  O* const out = static_cast<O*>(job.out);
  const bool fast = four_aligned(out);
  const size_t groups = job.count / codecs::kGroup + (job.count % codecs::kGroup != 0);
  const size_t step = size_t{gridDim.x} * kBlockWarps;
  for (size_t group = size_t{blockIdx.x} * kBlockWarps + threadIdx.x / 32; group < groups; group += step) {
    const unsigned n = group_length(group, job.count);
    O* const to = out + group * codecs::kGroup;
    float v[kPerLane];
    Block::decode(job.first, job.second, group, n, v);
    float old[kPerLane];
    if constexpr (kAdd) load_lane(to, n, fast, old);
    O result[kPerLane];
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) {
      float w = exact::mul(v[j], job.scale);
      if constexpr (kAdd) w = exact::add(old[j], w);
      narrow(w, result + j);
    }
    store_lane(to, n, fast, result);
  }
}

// none, copied: bits as they are, Inf and NaN counted by their exponents (encode) or not looked at (decode).
template <class T, T kExponent>
__global__ void __launch_bounds__(kBlockThreads) copy_counting(EncodeJob job) {
  const T* const from = static_cast<const T*>(job.gradient);
  T* const to = reinterpret_cast<T*>(job.first);
  constexpr unsigned kRun = 16 / sizeof(T);
  const bool fast = reinterpret_cast<uintptr_t>(from) % 16 == 0;
  const size_t runs = fast ? job.count / kRun : 0;
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
  if (lane_id() == 0 && odd != 0) {
    atomicOr(reinterpret_cast<unsigned*>(job.payload + 4), static_cast<unsigned>(codecs::kFlagNonFinite) << 24);
    if (job.non_finite != nullptr)
      atomicAdd(reinterpret_cast<unsigned long long*>(job.non_finite), static_cast<unsigned long long>(odd));
  }
}

template <class T>
__global__ void __launch_bounds__(kBlockThreads) copy_none(DecodeJob job) {
  if (!headers_ok(job.payload, 0, 1, 1, job.header, job.fault)) return;
  const T* const from = reinterpret_cast<const T*>(job.first);
  T* const to = static_cast<T*>(job.out);
  constexpr unsigned kRun = 16 / sizeof(T);
  const size_t runs = reinterpret_cast<uintptr_t>(to) % 16 == 0 ? job.count / kRun : 0;
  const size_t stride = size_t{gridDim.x} * blockDim.x, start = size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (size_t i = start; i < runs; i += stride)
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  for (size_t i = runs * kRun + start; i < job.count; i += stride) to[i] = from[i];
}

// fold_residual: a dense cast that sends everything.
template <class G>
__global__ void __launch_bounds__(kBlockThreads) fold_groups(G* gradient, float* residual, size_t count) {
  const bool fast_g = four_aligned(gradient), fast_e = four_aligned(residual);
  const size_t groups = count / codecs::kGroup + (count % codecs::kGroup != 0);
  const size_t step = size_t{gridDim.x} * kBlockWarps;
  for (size_t group = size_t{blockIdx.x} * kBlockWarps + threadIdx.x / 32; group < groups; group += step) {
    const size_t begin = group * codecs::kGroup;
    const unsigned n = group_length(group, count);
    float x[kPerLane], e[kPerLane];
    load_lane(gradient + begin, n, fast_g, x);
    load_lane(residual + begin, n, fast_e, e);
    G sent[kPerLane];
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) {
      if (exact::is_finite(x[j])) x[j] = exact::add(x[j], e[j]);
      narrow(x[j], sent + j);
      if (exact::is_finite(x[j])) e[j] = exact::sub(x[j], widen(sent[j]));
    }
    store_lane(gradient + begin, n, fast_g, sent);
    store_lane(residual + begin, n, fast_e, e);
  }
}

}  // namespace
}  // namespace gradgate::kernels::cuda
