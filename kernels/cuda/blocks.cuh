// Codecs that treat each group of 256 on its own: a warp a group, or four where kGroups says so, the grid sized to fill
// the device. Here the kernels, and the codecs without a scale (none, bf16) or with one for all (fp16); scaled blocks
// are in scaled.cuh and rotated.cuh. Per element read and written, with f32 gradients: encode 4 + p bytes, with
// feedback 12 + p (p: payload bytes an element), decode p + 4. Equal to kernels/cpu/loops/blocks.h byte for byte.
//
// A block codec here has
//   kGroups                  groups that a warp takes at once; a lane has eight elements of each, one group after the
//       other in x and v
//   Memory(step)             what a thread keeps from one take to the next; made by all threads of a CTA
//   encode<kFeedback>(job, seed, memory, group, n, max, x)  writes the part of the payload of the n elements from
//       `group` on, whose greatest magnitude is max; with feedback the lane's x become the new residual, or stay or
//       become non-finite where the old one is kept
//   decode(payload, first, second, memory, group, n, v)  the lane's values; first and second: where the sections begin
#pragma once

#include "codecs/cast_fp16.h"
#include "codecs/codecs.h"
#include "kernels/cuda/encode_job.cuh"

namespace gradgate::kernels::cuda {
namespace {

inline constexpr unsigned kBlockThreads = 256, kBlockWarps = kBlockThreads / 32;

struct NoMemory {
  __device__ explicit NoMemory(uint32_t /*step*/) {}
};

// Values of two bytes, each on its own.
struct CastBlock {
  static constexpr unsigned kGroups = 1;
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
  static constexpr unsigned kGroups = 1;
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
  static constexpr unsigned kGroups = 1;
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
__device__ __forceinline__ void decode_turn(const std::byte* payload, size_t first, size_t second,
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

// What the warps of a grid take in turn: kGroups groups, fewer at the end of the vector.
template <unsigned kGroups>
struct Turns {
  static constexpr unsigned kElements = kGroups * codecs::kGroup, kHeld = kGroups * kPerLane;  // kHeld: by a lane

  /// Calls f(first group, elements) for each turn of this warp.
  template <class F>
  static __device__ __forceinline__ void each(size_t count, const F& f) {
    const size_t turns = count / kElements + (count % kElements != 0), step = size_t{gridDim.x} * kBlockWarps;
    for (size_t turn = size_t{blockIdx.x} * kBlockWarps + threadIdx.x / 32; turn < turns; turn += step) {
      const size_t left = count - turn * kElements;
      f(turn * kGroups, left < kElements ? static_cast<unsigned>(left) : kElements);
    }
  }
  /// Calls f(g, elements of group g, the lane's eight of it) for each group of a turn of n elements.
  template <class F>
  static __device__ __forceinline__ void groups(unsigned n, float* x, const F& f) {
    if constexpr (kGroups == 1) {
      f(0u, n, x);
    } else {
#pragma unroll
      for (unsigned g = 0; g < kGroups; ++g) f(g, group_length(n, g), x + g * kPerLane);
    }
  }
  static __device__ __forceinline__ void load(const Vector& from, size_t group, unsigned n, float* v) {
    groups(n, v,
           [&](unsigned g, unsigned length, float* eight) { from.load((group + g) * codecs::kGroup, length, eight); });
  }
  static __device__ __forceinline__ void store(const Vector& to, size_t group, unsigned n, float* v) {
    groups(n, v, [&](unsigned g, unsigned length, const float* eight) {
      to.store((group + g) * codecs::kGroup, length, eight);
    });
  }
};

// The lane's g: the gradient, or the sum over ranks in rank order.
template <class Block, bool kSum>
__device__ __forceinline__ void gather_turn(const EncodeJob& job, const Vector& gradient,
                                            typename Block::Memory& memory, size_t group, unsigned n, float* x) {
  using Turn = Turns<Block::kGroups>;
  if constexpr (!kSum) {
    Turn::load(gradient, group, n, x);
  } else {
    const size_t first = job.first - job.payload, second = job.second - job.payload;
    for (unsigned rank = 0; rank < job.ranks; ++rank) {
      float v[Turn::kHeld];
      if (rank == job.self) {
        Turn::load(gradient, group, n, v);
      } else {
        decode_turn<Block>(job.terms + rank * job.stride, first, second, memory, group, n, job.dtype, v);
      }
#pragma unroll
      for (unsigned j = 0; j < Turn::kHeld; ++j) x[j] = rank == 0 ? v[j] : exact::add(x[j], v[j]);
    }
    if (n == Turn::kElements) return;
    Turn::groups(n, x, [](unsigned, unsigned length, float* eight) {
#pragma unroll
      for (unsigned j = 0; j < kPerLane; ++j) {  // signs and rotations decode to something behind the end, too
        if (element(lane_id(), j) >= length) eight[j] = 0.0f;
      }
    });
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

// Encodes the gradient (kSum: the sum of all ranks' shards, own one unencoded), with feedback in the same pass. Two
// CTAs of a processor have enough on their way; sums of four groups at once need more registers than half of its own.
template <class Block, bool kFeedback, bool kSum>
__global__ void __launch_bounds__(kBlockThreads, kSum&& Block::kGroups > 1 ? 1 : 2) encode_blocks(EncodeJob job) {
  if constexpr (kSum) {
    if (!may_encode(job)) return;
  }
  const Seed seed = seed_of(job);
  typename Block::Memory memory(seed.step);
  const Vector gradient(job.gradient, job.dtype);
  const bool fast_e = four_aligned(job.residual);
  using Turn = Turns<Block::kGroups>;
  Turn::each(job.count, [&](size_t group, unsigned n) {
    float x[Turn::kHeld];
    gather_turn<Block, kSum>(job, gradient, memory, group, n, x);
    uint32_t max = 0, kept = 0;  // kept: a bit for each group
    Turn::groups(n, x, [&](unsigned g, unsigned length, float* eight) {
      if (form_x<kFeedback>(job.residual + (group + g) * codecs::kGroup, length, fast_e, job.flush, eight))
        kept |= 1u << g;
      max = ::max(max, max_mag(eight));
    });
    max = warp_max(max);
    if (max >= exact::kInfBits) {
      Turn::groups(
          n, x, [&](unsigned, unsigned, const float* eight) { note_non_finite(eight, job.payload, job.non_finite); });
    }
    Block::template encode<kFeedback>(job, seed, memory, group, n, max, x);
    if constexpr (kFeedback) {
      Turn::groups(n, x, [&](unsigned g, unsigned length, const float* eight) {
        if ((kept >> g & 1u) == 0) store_residual(job.residual + (group + g) * codecs::kGroup, length, fast_e, eight);
      });
    }
  });
}

// The greatest finite magnitude of x, into *job.greatest (0 before).
template <class Block, bool kFeedback, bool kSum>
__global__ void __launch_bounds__(kBlockThreads) find_greatest(EncodeJob job) {
  if constexpr (kSum) {
    if (!may_encode(job)) return;
  }
  const Vector gradient(job.gradient, job.dtype);
  const bool fast_e = four_aligned(job.residual);
  uint32_t greatest = 0;
  typename Block::Memory memory(0);
  static_assert(Block::kGroups == 1);
  Turns<1>::each(job.count, [&](size_t group, unsigned n) {
    float x[kPerLane];
    gather_turn<Block, kSum>(job, gradient, memory, group, n, x);
    form_x<kFeedback>(job.residual + group * codecs::kGroup, n, fast_e, job.flush, x);
    const uint32_t max = max_mag(x);
    greatest = ::max(greatest, max < exact::kInfBits ? max : max_finite_mag(x));
  });
  greatest = warp_max(greatest);
  if (lane_id() == 0 && greatest > 0) atomicMax(job.greatest, greatest);
}

// fp16 in one read, where the scale of the step before still holds: the power of two that a vector needs seldom
// changes. Encodes by *guess and finds the greatest; kAgain: encodes by that, if the scale was another one.
template <bool kAgain>
__global__ void __launch_bounds__(kBlockThreads, 2) encode_guessed(EncodeJob job, const uint32_t* guess) {
  const auto scale = codecs::Fp16Scale::of(kAgain ? *job.greatest : *guess);
  if (kAgain && scale.stored == codecs::Fp16Scale::of(*guess).stored) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) *reinterpret_cast<uint32_t*>(job.first) = scale.stored;
  const Vector gradient(job.gradient, job.dtype);
  uint32_t greatest = 0;
  Turns<1>::each(job.count, [&](size_t group, unsigned n) {
    float x[kPerLane];
    gradient.load(group * codecs::kGroup, n, x);
    const uint32_t max = warp_max(max_mag(x));
    if constexpr (!kAgain) {
      if (max >= exact::kInfBits) note_non_finite(x, job.payload, job.non_finite);
      greatest = ::max(greatest, max < exact::kInfBits ? max : max_finite_mag(x));
    }
    Fp16Block::encode_by<false>(scale, job, group, n, max, x);
  });
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
  using Turn = Turns<Block::kGroups>;
  Turn::each(job.count, [&](size_t group, unsigned n) {
    float v[Turn::kHeld];
    decode_turn<Block>(job.payload, job.first, job.second, memory, group, n, job.gradient, v);
    float old[Turn::kHeld];
    if constexpr (kAdd) Turn::load(out, group, n, old);
#pragma unroll
    for (unsigned j = 0; j < Turn::kHeld; ++j) {
      v[j] = exact::mul(v[j], job.scale);
      if constexpr (kAdd) v[j] = exact::add(old[j], v[j]);
    }
    Turn::store(out, group, n, v);
  });
}

// The sum of all ranks' payloads in rank order: every payload is read once, the output written once.
template <class Block>
__global__ void __launch_bounds__(kBlockThreads) sum_blocks(DecodeJob job) {
  if (!headers_ok(job.payload, job.stride, job.ranks, job.ranks, job.header, job.fault)) return;
  typename Block::Memory memory(step_of(job.payload));
  const Vector out(job.out, job.dtype);
  using Turn = Turns<Block::kGroups>;
  Turn::each(job.count, [&](size_t group, unsigned n) {
    float sum[Turn::kHeld];
    decode_turn<Block>(job.payload, job.first, job.second, memory, group, n, job.gradient, sum);
    for (unsigned rank = 1; rank < job.ranks; ++rank) {
      float v[Turn::kHeld];
      decode_turn<Block>(job.payload + rank * job.stride, job.first, job.second, memory, group, n, job.gradient, v);
#pragma unroll
      for (unsigned j = 0; j < Turn::kHeld; ++j) sum[j] = exact::add(sum[j], v[j]);
    }
#pragma unroll
    for (unsigned j = 0; j < Turn::kHeld; ++j) sum[j] = exact::mul(sum[j], job.scale);
    Turn::store(out, group, n, sum);
  });
}

// fold_residual: a dense cast that sends everything.
__global__ void __launch_bounds__(kBlockThreads) fold_groups(void* data, DType dtype, float* residual, size_t count) {
  const Vector gradient(data, dtype);
  const bool fast_e = four_aligned(residual);
  Turns<1>::each(count, [&](size_t group, unsigned n) {
    const size_t begin = group * codecs::kGroup;
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
  });
}

}  // namespace
}  // namespace gradgate::kernels::cuda
