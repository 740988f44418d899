// Codecs that treat each group of 256 on its own: a warp a group, the grid sized to fill the device. Here the kernels,
// and the codecs without a scale (none, bf16) or with one for all (fp16); scaled blocks are in scaled.cuh. Per element
// read and written, with f32 gradients: encode 4 + p bytes, with feedback 12 + p (p: payload bytes an element), decode
// p + 4. Equal to kernels/cpu/loops/blocks.h byte for byte.
//
// A block codec here has
//   Memory(step)             what a thread keeps from group to group; made by all threads of a CTA
//   encode<kFeedback>(job, seed, memory, group, n, max, x)  writes the part of the payload of the lane's eight x; with
//   feedback
//   x
//       becomes the new residual, or stays or becomes non-finite where the old one is kept
//   decode(payload, first, second, memory, group, n, v)  the lane's eight values; first and second: where the sections
//   begin
#pragma once

#include "codecs/cast_fp16.h"
#include "codecs/codecs.h"
#include "kernels/cuda/group.cuh"

namespace gradgate::kernels::cuda {
namespace {

inline constexpr unsigned kBlockThreads = 256, kBlockWarps = kBlockThreads / 32;

struct NoMemory {
  __device__ explicit NoMemory(uint32_t /*step*/) {}
};

// Values of two bytes, each on its own.
struct CastBlock {
  using Memory = NoMemory;
  template <bool kFeedback>
  static __device__ __forceinline__ void encode(const EncodeJob& job, const Seed&, Memory&, size_t group, unsigned n,
                                                uint32_t, float* x) {
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
  }
  static __device__ __forceinline__ void decode(const std::byte* payload, size_t first, size_t, Memory&, size_t group,
                                                unsigned n, float* v) {
    load_lane(reinterpret_cast<const uint16_t*>(payload + first) + group * codecs::kGroup, n, true, v);
  }
};

// f16 under the power of two of the whole vector, which a kernel before has found.
struct Fp16Block {
  using Memory = NoMemory;
  // `scale` may be a guess. Where the greatest element rounds to less than 2^15, as in nearly every group, nothing is
  // limited, and one conversion of the device's makes two elements.
  template <bool kFeedback>
  static __device__ __forceinline__ void encode_by(const codecs::Fp16Scale& scale, const EncodeJob& job, size_t group,
                                                   unsigned n, uint32_t max, float* x) {
    codecs::F16* const out = reinterpret_cast<codecs::F16*>(job.second) + group * codecs::kGroup;
    const float step = exact::from_bits(scale.stored);
    if (n == codecs::kGroup && exact::mul(exact::from_bits(max), scale.in) < 32760.0f) {
#pragma unroll
      for (unsigned j = 0; j < kPerLane; j += 4) {
        const uint32_t low = round_two_f16(exact::mul(x[j], scale.in), exact::mul(x[j + 1], scale.in));
        const uint32_t high = round_two_f16(exact::mul(x[j + 2], scale.in), exact::mul(x[j + 3], scale.in));
        __stwb(reinterpret_cast<uint2*>(out + element(lane_id(), j)), make_uint2(low, high));
        if constexpr (kFeedback) {
          x[j] = exact::sub(x[j], codecs::fp16_value(static_cast<uint16_t>(low), step));
          x[j + 1] = exact::sub(x[j + 1], codecs::fp16_value(static_cast<uint16_t>(low >> 16), step));
          x[j + 2] = exact::sub(x[j + 2], codecs::fp16_value(static_cast<uint16_t>(high), step));
          x[j + 3] = exact::sub(x[j + 3], codecs::fp16_value(static_cast<uint16_t>(high >> 16), step));
        }
      }
      return;
    }
    codecs::F16 code[kPerLane];
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) {
      code[j].bits = scale.element(x[j]);
      if (kFeedback && exact::is_finite(x[j])) x[j] = exact::sub(x[j], codecs::fp16_value(code[j].bits, step));
    }
    store_lane(out, n, true, code);
  }
  template <bool kFeedback>
  static __device__ __forceinline__ void encode(const EncodeJob& job, const Seed&, Memory&, size_t group, unsigned n,
                                                uint32_t max, float* x) {
    const codecs::Fp16Scale scale = codecs::Fp16Scale::of(*job.greatest);
    if (group == 0 && lane_id() == 0) *reinterpret_cast<uint32_t*>(job.first) = scale.stored;
    encode_by<kFeedback>(scale, job, group, n, max, x);
  }
  static __device__ __forceinline__ void decode(const std::byte* payload, size_t first, size_t second, Memory&,
                                                size_t group, unsigned n, float* v) {
    const float step = *reinterpret_cast<const float*>(payload + first);
    load_lane(reinterpret_cast<const codecs::F16*>(payload + second) + group * codecs::kGroup, n, true, v);
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) v[j] = exact::mul(v[j], step);
  }
};

// none: the gradient's own values; a sum is rounded to the gradient's dtype, its NaN made canonical.
struct NoneBlock {
  using Memory = NoMemory;
  template <bool kFeedback>
  static __device__ __forceinline__ void encode(const EncodeJob& job, const Seed&, Memory&, size_t group, unsigned n,
                                                uint32_t, float* x) {
    static_assert(!kFeedback);
    Vector(job.first, job.dtype).store(group * codecs::kGroup, n, x);
  }
  static __device__ __forceinline__ void decode(const std::byte* payload, size_t first, size_t, Memory&, size_t group,
                                                unsigned n, float* v, DType dtype) {
    Vector(payload + first, dtype).load(group * codecs::kGroup, n, v);
  }
};

template <class Block>
__device__ __forceinline__ void decode_group(const std::byte* payload, size_t first, size_t second,
                                             typename Block::Memory& memory, size_t group, unsigned n, DType gradient,
                                             float* v) {
  if constexpr (std::is_same_v<Block, NoneBlock>) {
    Block::decode(payload, first, second, memory, group, n, v, gradient);
  } else {
    Block::decode(payload, first, second, memory, group, n, v);
  }
}

__device__ __forceinline__ uint32_t step_of(const std::byte* payload) {
  return reinterpret_cast<const codecs::WireHeader*>(payload)->step;
}

__device__ __forceinline__ size_t groups_in(size_t count) {
  return count / codecs::kGroup + (count % codecs::kGroup != 0);
}
__device__ __forceinline__ unsigned group_length(size_t group, size_t count) {
  const size_t left = count - group * codecs::kGroup;
  return left < codecs::kGroup ? static_cast<unsigned>(left) : static_cast<unsigned>(codecs::kGroup);
}

// The lane's g of a group: the gradient, or the sum over ranks in rank order.
template <class Block, bool kSum>
__device__ __forceinline__ void gather_group(const EncodeJob& job, const Vector& gradient,
                                             typename Block::Memory& memory, size_t group, unsigned n, float* x) {
  if constexpr (!kSum) {
    gradient.load(group * codecs::kGroup, n, x);
  } else {
    const size_t first = job.first - job.payload, second = job.second - job.payload;
    for (unsigned rank = 0; rank < job.ranks; ++rank) {
      float v[kPerLane];
      if (rank == job.self) {
        gradient.load(group * codecs::kGroup, n, v);
      } else {
        decode_group<Block>(job.terms + rank * job.stride, first, second, memory, group, n, job.dtype, v);
      }
#pragma unroll
      for (unsigned j = 0; j < kPerLane; ++j) x[j] = rank == 0 ? v[j] : exact::add(x[j], v[j]);
    }
    if (n == codecs::kGroup) return;
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) {  // signs and rotations decode to something behind the end, too
      if (element(lane_id(), j) >= n) x[j] = 0.0f;
    }
  }
}

// Residuals of a group that is not kept: those where the new one is finite.
__device__ __forceinline__ void store_residual(float* e, unsigned n, bool fast, const float* x) {
  if (warp_max(max_mag(x)) < exact::kInfBits) {
    store_lane(e, n, fast, x);
  } else {
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) {
      const unsigned i = element(lane_id(), j);
      if (i < n && exact::is_finite(x[j])) e[i] = x[j];
    }
  }
}

// Encodes the gradient (kSum: the sum of all ranks' shards, own one unencoded), with feedback in the same pass.
template <class Block, bool kFeedback, bool kSum>
__global__ void __launch_bounds__(kBlockThreads) encode_blocks(EncodeJob job) {
  if constexpr (kSum) {
    if (!may_encode(job)) return;
  }
  const Seed seed = seed_of(job);
  typename Block::Memory memory(seed.step);
  const Vector gradient(job.gradient, job.dtype);
  const bool fast_e = four_aligned(job.residual);
  const size_t groups = groups_in(job.count), step = size_t{gridDim.x} * kBlockWarps;
  for (size_t group = size_t{blockIdx.x} * kBlockWarps + threadIdx.x / 32; group < groups; group += step) {
    const unsigned n = group_length(group, job.count);
    float x[kPerLane];
    gather_group<Block, kSum>(job, gradient, memory, group, n, x);
    float* const e = job.residual + group * codecs::kGroup;
    const bool kept = form_x<kFeedback>(e, n, fast_e, job.flush, x);
    const uint32_t max = warp_max(max_mag(x));
    if (max >= exact::kInfBits) note_non_finite(x, job.payload, job.non_finite);
    Block::template encode<kFeedback>(job, seed, memory, group, n, max, x);
    if (kFeedback && !kept) store_residual(e, n, fast_e, x);
  }
}

// The greatest finite magnitude of x, into *job.greatest (0 before).
template <class Block, bool kFeedback, bool kSum>
__global__ void __launch_bounds__(kBlockThreads) find_greatest(EncodeJob job) {
  if constexpr (kSum) {
    if (!may_encode(job)) return;
  }
  const Vector gradient(job.gradient, job.dtype);
  const bool fast_e = four_aligned(job.residual);
  const size_t groups = groups_in(job.count), step = size_t{gridDim.x} * kBlockWarps;
  uint32_t greatest = 0;
  typename Block::Memory memory(0);
  for (size_t group = size_t{blockIdx.x} * kBlockWarps + threadIdx.x / 32; group < groups; group += step) {
    const unsigned n = group_length(group, job.count);
    float x[kPerLane];
    gather_group<Block, kSum>(job, gradient, memory, group, n, x);
    form_x<kFeedback>(job.residual + group * codecs::kGroup, n, fast_e, job.flush, x);
    const uint32_t max = max_mag(x);
    greatest = ::max(greatest, max < exact::kInfBits ? max : max_finite_mag(x));
  }
  greatest = warp_max(greatest);
  if (lane_id() == 0 && greatest > 0) atomicMax(job.greatest, greatest);
}

// fp16 in one read, where the scale of the step before still holds: the power of two that a vector needs seldom
// changes. Encodes by *guess and finds the greatest; kAgain: encodes by that, if the scale was another one.
template <bool kAgain>
__global__ void __launch_bounds__(kBlockThreads) encode_guessed(EncodeJob job, const uint32_t* guess) {
  const auto scale = codecs::Fp16Scale::of(kAgain ? *job.greatest : *guess);
  if (kAgain && scale.stored == codecs::Fp16Scale::of(*guess).stored) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) *reinterpret_cast<uint32_t*>(job.first) = scale.stored;
  const Vector gradient(job.gradient, job.dtype);
  const size_t groups = groups_in(job.count), step = size_t{gridDim.x} * kBlockWarps;
  uint32_t greatest = 0;
  for (size_t group = size_t{blockIdx.x} * kBlockWarps + threadIdx.x / 32; group < groups; group += step) {
    const unsigned n = group_length(group, job.count);
    float x[kPerLane];
    gradient.load(group * codecs::kGroup, n, x);
    const uint32_t max = warp_max(max_mag(x));
    if constexpr (!kAgain) {
      if (max >= exact::kInfBits) note_non_finite(x, job.payload, job.non_finite);
      greatest = ::max(greatest, max < exact::kInfBits ? max : max_finite_mag(x));
    }
    Fp16Block::encode_by<false>(scale, job, group, n, max, x);
  }
  if constexpr (!kAgain) {
    greatest = warp_max(greatest);
    if (lane_id() == 0 && greatest > 0) atomicMax(job.greatest, greatest);
  }
}

struct DecodeJob {
  codecs::WireHeader header;
  const std::byte* payload;
  size_t first, second;  ///< where the sections begin
  DType gradient, dtype;
  void* out;
  size_t count;
  float scale;
  const uint64_t* verdict;
  uint64_t* fault;
  size_t stride;  ///< of a sum's payloads: rank r's stands at payload + r * stride
  unsigned ranks;
};

template <class Block, bool kAdd>
__global__ void __launch_bounds__(kBlockThreads) decode_blocks(DecodeJob job) {
  if (!headers_ok(job.payload, 0, 1, 1, job.header, job.fault)) return;
  typename Block::Memory memory(step_of(job.payload));
  const Vector out(job.out, job.dtype);
  const size_t groups = groups_in(job.count), step = size_t{gridDim.x} * kBlockWarps;
  for (size_t group = size_t{blockIdx.x} * kBlockWarps + threadIdx.x / 32; group < groups; group += step) {
    const unsigned n = group_length(group, job.count);
    float v[kPerLane];
    decode_group<Block>(job.payload, job.first, job.second, memory, group, n, job.gradient, v);
    float old[kPerLane];
    if constexpr (kAdd) out.load(group * codecs::kGroup, n, old);
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) {
      v[j] = exact::mul(v[j], job.scale);
      if constexpr (kAdd) v[j] = exact::add(old[j], v[j]);
    }
    out.store(group * codecs::kGroup, n, v);
  }
}

// The sum of all ranks' payloads in rank order: every payload is read once, the output written once.
template <class Block>
__global__ void __launch_bounds__(kBlockThreads) sum_blocks(DecodeJob job) {
  if (!headers_ok(job.payload, job.stride, job.ranks, job.ranks, job.header, job.fault)) return;
  typename Block::Memory memory(step_of(job.payload));
  const Vector out(job.out, job.dtype);
  const size_t groups = groups_in(job.count), step = size_t{gridDim.x} * kBlockWarps;
  for (size_t group = size_t{blockIdx.x} * kBlockWarps + threadIdx.x / 32; group < groups; group += step) {
    const unsigned n = group_length(group, job.count);
    float sum[kPerLane];
    decode_group<Block>(job.payload, job.first, job.second, memory, group, n, job.gradient, sum);
    for (unsigned rank = 1; rank < job.ranks; ++rank) {
      float v[kPerLane];
      decode_group<Block>(job.payload + rank * job.stride, job.first, job.second, memory, group, n, job.gradient, v);
#pragma unroll
      for (unsigned j = 0; j < kPerLane; ++j) sum[j] = exact::add(sum[j], v[j]);
    }
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) sum[j] = exact::mul(sum[j], job.scale);
    out.store(group * codecs::kGroup, n, sum);
  }
}

// none, copied: bits as they are, Inf and NaN counted by their exponents.
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

// fold_residual: a dense cast that sends everything.
__global__ void __launch_bounds__(kBlockThreads) fold_groups(void* data, DType dtype, float* residual, size_t count) {
  const Vector gradient(data, dtype);
  const bool fast_e = four_aligned(residual);
  const size_t groups = groups_in(count), step = size_t{gridDim.x} * kBlockWarps;
  for (size_t group = size_t{blockIdx.x} * kBlockWarps + threadIdx.x / 32; group < groups; group += step) {
    const size_t begin = group * codecs::kGroup;
    const unsigned n = group_length(group, count);
    float x[kPerLane], e[kPerLane];
    gradient.load(begin, n, x);
    load_lane(residual + begin, n, fast_e, e);
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) {
      if (!exact::is_finite(x[j])) continue;
      x[j] = exact::add(x[j], e[j]);
      if (exact::is_finite(x[j])) e[j] = exact::sub(x[j], rounded_to(x[j], dtype));
    }
    gradient.store(begin, n, x);
    store_lane(residual + begin, n, fast_e, e);
  }
}

}  // namespace
}  // namespace gradgate::kernels::cuda
