// Scaled blocks: codes of 8, 4 or 1 bits under a scale per block (codecs/scaled.h), for any BlockFormat. A group of 256
// is two blocks of 128, one of 256, or a quarter of one of 1024; a lane has four neighbours of each half of it.
#pragma once

#include "codecs/codecs.h"
#include "codecs/philox.h"
#include "kernels/cuda/blocks.cuh"

namespace gradgate::kernels::cuda {
namespace {

// Dithers of the lane's eight elements of a group: each lane makes one of the group's 32 blocks of random numbers, and
// takes its elements' from the lanes that have them (docs/format.md §5).
__device__ __forceinline__ void group_dither(const Seed& seed, size_t group, float* u) {
  const uint64_t first = seed.first + group * codecs::kGroup;
  const unsigned lane = lane_id();
  const codecs::PhiloxBlock mine = codecs::random_block(seed, codecs::element_block(first) + lane);
#pragma unroll
  for (unsigned j = 0; j < 4; ++j) {
    const unsigned from = (lane * 4 + j) % codecs::kGroupBlocks, word = lane / 8;
    uint32_t bits = 0;
#pragma unroll
    for (unsigned w = 0; w < 4; ++w) {
      const uint32_t theirs = __shfl_sync(kFull, mine.word[w], static_cast<int>(from));
      bits = word == w ? theirs : bits;
    }
    u[j] = codecs::dither(bits & 0xffffu);
    u[4 + j] = codecs::dither(bits >> 16);
  }
}

template <class F>
struct ScaledBlock {
  static constexpr unsigned kGroups = 1;
  using Memory = NoMemory;
  static_assert(!F::kRotated);
  static_assert(F::kBlock == 128 || F::kBlock == 256 || (F::kBlock == 1024 && F::kBits == 1));
  static constexpr unsigned kHalves = F::kBlock == 128 ? 2 : 1, kEach = kPerLane / kHalves;  // blocks; a lane's of each

  static constexpr size_t kCodeBytes = codecs::kGroup * F::kBits / 8;  // of a group

  template <bool kFeedback>
  static __device__ __forceinline__ void encode(const EncodeJob& job, const Seed& seed, Memory&, size_t group,
                                                unsigned n, uint32_t max, float* x) {
    static_assert(!F::kMean);
    float u[F::kStochastic ? kPerLane : 1];
    if constexpr (F::kStochastic) group_dither(seed, group, u);
    int32_t code[kPerLane];
#pragma unroll
    for (unsigned half = 0; half < kHalves; ++half) {
      float* const xs = x + half * kEach;
      if constexpr (kHalves == 2) max = warp_max(max_mag_of_four(xs));
      const uint32_t stored = block<kFeedback>(max, u + (F::kStochastic ? half * kEach : 0), xs, code + half * kEach);
      if (lane_id() == 0 && half * F::kBlock < n)
        reinterpret_cast<uint32_t*>(job.first)[group * kHalves + half] = stored;
    }
    put_codes(reinterpret_cast<uint8_t*>(job.second) + group * kCodeBytes, n, code);
  }

  static __device__ __forceinline__ void decode(const std::byte* payload, size_t first, size_t second, Memory&,
                                                size_t group, unsigned n, float* v) {
    const uint8_t* const in = reinterpret_cast<const uint8_t*>(payload + second) + group * kCodeBytes;
    const uint32_t* const scales = reinterpret_cast<const uint32_t*>(payload + first);
    int32_t code[kPerLane];
    get_codes(in, n, code);
    if constexpr (F::kBits == 1) {
      constexpr size_t kParts = F::kBlock / codecs::kGroup;
      const auto decoder = F::Decoder::of(scales[group / kParts], static_cast<uint32_t>(group % kParts));
#pragma unroll
      for (unsigned j = 0; j < kPerLane; ++j) v[j] = decoder.value(code[j]);
    } else {
#pragma unroll
      for (unsigned half = 0; half < kHalves; ++half) {
        const uint32_t stored = half * F::kBlock < n ? scales[group * kHalves + half] : 0;
        const auto decoder = F::Decoder::of(stored);
#pragma unroll
        for (unsigned j = 0; j < kEach; ++j) v[half * kEach + j] = decoder.value(code[half * kEach + j]);
      }
    }
  }

 private:
  /// Codes of a block, its scale returned; with feedback x becomes the residual, NaN where the old one stays.
  template <bool kFeedback>
  static __device__ __forceinline__ uint32_t block(uint32_t max, const float* u, float* x, int32_t* code) {
    using Encoder = typename F::Encoder;
    if (max == 0 || max >= exact::kInfBits) {
#pragma unroll
      for (unsigned j = 0; j < kEach; ++j) {
        code[j] = 0;
        if (kFeedback && max != 0) x[j] = exact::from_bits(exact::kNanBits);
      }
      return Encoder::of(max).stored;  // every d is +0, or NaN
    }
    const Encoder encoder = Encoder::of(max);
    const auto decoder = F::Decoder::of(encoder.stored);
#pragma unroll
    for (unsigned j = 0; j < kEach; ++j) {
      if constexpr (F::kStochastic) {
        code[j] = encoder.code(x[j], u[j]);
      } else {
        code[j] = encoder.code(x[j]);
      }
      if constexpr (kFeedback) x[j] = exact::sub(x[j], decoder.value(code[j]));
    }
    return encoder.stored;
  }

  // Codes of a group to and from its place in section 1, eight a lane. Nothing but codes lies between the end of a
  // vector and the next multiple of 16, so that words may be moved whole where they begin before it.
  static __device__ __forceinline__ void put_codes(uint8_t* out, unsigned n, const int32_t* code) {
    const unsigned lane = lane_id();
    if constexpr (F::kBits == 8) {
      if (n == codecs::kGroup) {
        store4_bytes(out + lane * 4, code);
        store4_bytes(out + 128 + lane * 4, code + 4);
      } else {
#pragma unroll
        for (unsigned j = 0; j < kPerLane; ++j) {
          if (element(lane, j) < n) out[element(lane, j)] = static_cast<uint8_t>(code[j]);
        }
      }
    } else {
      static_assert(F::kBits == 4);  // byte j of a block has the codes j and j + 64, which is 16 lanes further
#pragma unroll
      for (unsigned half = 0; half < 2; ++half) {
        const uint32_t word = low_bytes(code + half * 4) & 0x0f0f0f0fu;
        const uint32_t upper = __shfl_down_sync(kFull, word, 16);
        if (lane < 16 && half * F::kBlock < n)
          __stwb(reinterpret_cast<uint32_t*>(out + half * 64 + lane * 4), word | upper << 4);
      }
    }
  }
  static __device__ __forceinline__ void get_codes(const uint8_t* in, unsigned n, int32_t* code) {
    const unsigned lane = lane_id();
    if constexpr (F::kBits == 8) {
      if (n == codecs::kGroup) {
        const uint32_t words[2] = {*reinterpret_cast<const uint32_t*>(in + lane * 4),
                                   *reinterpret_cast<const uint32_t*>(in + 128 + lane * 4)};
#pragma unroll
        for (unsigned j = 0; j < kPerLane; ++j) code[j] = static_cast<typename F::Code>(words[j >> 2] >> (8 * (j & 3)));
      } else {
#pragma unroll
        for (unsigned j = 0; j < kPerLane; ++j)
          code[j] = element(lane, j) < n ? static_cast<typename F::Code>(in[element(lane, j)]) : 0;
      }
    } else if constexpr (F::kBits == 4) {
#pragma unroll
      for (unsigned half = 0; half < 2; ++half) {
        const uint32_t word =
            half * F::kBlock < n ? *reinterpret_cast<const uint32_t*>(in + half * 64 + (lane & 15) * 4) : 0u;
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) {
          const unsigned shift = 8 * j + (lane < 16 ? 0 : 4);
          code[half * 4 + j] = static_cast<int32_t>(word >> shift << 28) >> 28;
        }
      }
    } else {
      static_assert(F::kBits == 1);
#pragma unroll
      for (unsigned half = 0; half < 2; ++half) {
        const unsigned at = half * 4 + lane / 8;  // word of 32 bits
        const uint32_t word = at * 32 < n ? reinterpret_cast<const uint32_t*>(in)[at] : 0u;
#pragma unroll
        for (unsigned j = 0; j < 4; ++j) code[half * 4 + j] = static_cast<int32_t>(word >> (lane % 8 * 4 + j) & 1u);
      }
    }
  }
};

// Mean magnitudes and sign bits (onebit): a warp holds a block of 1024, 32 elements a lane.
template <class F, bool kFeedback, bool kSum>
__global__ void __launch_bounds__(kBlockThreads, kSum ? 1 : 2) encode_means(EncodeJob job) {
  static_assert(F::kMean && F::kBlock == 1024 && F::kBits == 1);
  constexpr unsigned kParts = F::kBlock / codecs::kGroup;
  if constexpr (kSum) {
    if (!may_encode(job)) return;
  }
  const Vector gradient(job.gradient, job.dtype);
  const bool fast_e = four_aligned(job.residual);
  const unsigned lane = lane_id();
  NoMemory memory(0);
  Turns<kParts>::each(job.count, [&](size_t first, unsigned length) {
    float x[kParts][kPerLane];
    uint32_t max = 0, live = 0, elements = 0, kept = 0;
#pragma unroll
    for (unsigned part = 0; part < kParts; ++part) {
      const size_t group = first + part;
      const unsigned n = group_length(length, part);
      if (n == 0) {
#pragma unroll
        for (unsigned j = 0; j < kPerLane; ++j) x[part][j] = 0.0f;
        continue;
      }
      gather_turn<ScaledBlock<F>, kSum>(job, gradient, memory, group, n, x[part]);
      if (form_x<kFeedback>(job.residual + group * codecs::kGroup, n, fast_e, job.flush, x[part])) kept |= 1u << part;
      const uint32_t greatest = warp_max(max_mag(x[part]));
      if (greatest >= exact::kInfBits) note_non_finite(x[part], job.payload, job.non_finite);
      max = ::max(max, greatest);
      live |= (greatest != 0 ? 1u : 0u) << part;
      elements += greatest != 0 ? n : 0;
    }
    // The tree of docs/format.md §3: halves added to halves, over parts, over a lane's two runs, over lanes, in a run.
    float sum = 0.0f;
    const bool finite = max < exact::kInfBits, coded = finite && max != 0;
    if (coded) {
      const auto scale = codecs::MeanScale::of(max);
      float s[4];
#pragma unroll
      for (unsigned j = 0; j < 4; ++j) {
        float runs[2];
#pragma unroll
        for (unsigned run = 0; run < 2; ++run) {
          const unsigned i = run * 4 + j;
          runs[run] = exact::add(exact::add(scale.magnitude(x[0][i]), scale.magnitude(x[2][i])),
                                 exact::add(scale.magnitude(x[1][i]), scale.magnitude(x[3][i])));
        }
        s[j] = exact::add(runs[0], runs[1]);
#pragma unroll
        for (unsigned mask = 16; mask > 0; mask >>= 1)
          s[j] = exact::add(s[j], __shfl_xor_sync(kFull, s[j], static_cast<int>(mask)));
      }
      sum = exact::add(exact::add(s[0], s[2]), exact::add(s[1], s[3]));
    }
    const auto encoder = F::Encoder::of(sum, max, live, elements);
    if (lane == 0) reinterpret_cast<uint32_t*>(job.first)[first / kParts] = encoder.stored;
#pragma unroll
    for (unsigned part = 0; part < kParts; ++part) {
      const size_t group = first + part;
      const unsigned n = group_length(length, part);
      if (n == 0) continue;
      const auto decoder = F::Decoder::of(encoder.stored, part);
      uint32_t* const out = reinterpret_cast<uint32_t*>(job.second) + group * (codecs::kGroup / 32);
#pragma unroll
      for (unsigned run = 0; run < 2; ++run) {
        uint32_t four = 0;
#pragma unroll
        for (int j = 3; j >= 0; --j) {
          float& v = x[part][run * 4 + j];
          four = __funnelshift_l(exact::bits(v), four, 1);  // the code of v is its sign
          if constexpr (kFeedback) v = exact::sub(v, decoder.value(coded ? encoder.code(v) : 0));
        }
        uint32_t word = coded ? four << (lane % 8 * 4) : 0;
        word |= __shfl_xor_sync(kFull, word, 1);
        word |= __shfl_xor_sync(kFull, word, 2);
        word |= __shfl_xor_sync(kFull, word, 4);
        const unsigned at = run * 4 + lane / 8;
        if (lane % 8 == 0 && at * 32 < n) out[at] = word;
      }
      if (kFeedback && finite && (kept >> part & 1u) == 0)
        store_residual(job.residual + group * codecs::kGroup, n, fast_e, x[part]);
    }
  });
}

}  // namespace
}  // namespace gradgate::kernels::cuda
