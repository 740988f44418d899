// int4:hadamard: codes of 4 bits of rotated blocks (docs/format.md §3). A warp takes four groups, which are eight
// blocks of 128, so that a lane has 32 elements and every butterfly is between two of its registers: between steps of
// the butterflies the warp turns its elements over in shared memory, 16 bytes at a time. A lane sees them in one of
// three ways:
//   rows   as they lie in memory: four neighbours of each block
//   combs  of one block, eight times four neighbours, 16 elements apart: butterflies of distances 64, 32 and 16
//   runs   of one block, 16 neighbours and the 16 that lie 64 further: distances 8, 4, 2 and 1, and the codes of 16
//   bytes
#pragma once

#include "codecs/codecs.h"
#include "codecs/philox.h"
#include "kernels/cuda/blocks.cuh"

namespace gradgate::kernels::cuda {
namespace {

inline constexpr unsigned kTurnBlocks = 8;

// One warp's room in shared memory for eight blocks of 128. A block has 16 bytes more than it needs: so eight lanes
// that look at the same place of eight blocks, as they do in combs and runs, find it in different banks.
class TurnRoom {
 public:
  static constexpr unsigned kPitch = codecs::Rotation::kBlock + 4;
  static constexpr size_t kFloats = kTurnBlocks * kPitch;

  // Where the lane's i-th four elements are.
  struct Rows {
    static __device__ unsigned at(unsigned i) { return lane_id() * 4 + i * kPitch; }
  };
  struct Combs {
    static __device__ unsigned at(unsigned i) { return block() * kPitch + quarter() * 4 + i * 16; }
  };
  struct Runs {
    static __device__ unsigned at(unsigned i) { return block() * kPitch + in_block(i); }
    static __device__ unsigned in_block(unsigned i) {
      return quarter() * 16 + i / 4 * (codecs::Rotation::kBlock / 2) + i % 4 * 4;
    }
  };

  /// The block of the lane's combs and runs, and which quarter of it they are.
  static __device__ unsigned block() { return lane_id() % kTurnBlocks; }
  static __device__ unsigned quarter() { return lane_id() / kTurnBlocks; }

  __device__ explicit TurnRoom(float* room) : room_(room) {}

  /// The lane's 32 elements, seen another way.
  template <class From, class To>
  __device__ __forceinline__ void turn(float* y) const {
    __syncwarp();
#pragma unroll
    for (unsigned i = 0; i < kTurnBlocks; ++i)
      *four(From::at(i)) = make_float4(y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
    __syncwarp();
#pragma unroll
    for (unsigned i = 0; i < kTurnBlocks; ++i) load4(room_ + To::at(i), y + 4 * i);
  }
  /// Codes of the lane's runs, byte by byte as in a payload, become those of its combs: word r has those of the fours r
  /// and, in upper halves of bytes, r + 4.
  __device__ __forceinline__ void turn_codes(const uint4& runs, uint32_t* combs) const {
    __syncwarp();
    *reinterpret_cast<uint4*>(room_ + block() * kPitch + quarter() * 4) = runs;
    __syncwarp();
#pragma unroll
    for (unsigned r = 0; r < 4; ++r)
      combs[r] = reinterpret_cast<const uint32_t*>(room_)[block() * kPitch + 4 * r + quarter()];
  }
  /// The random numbers of four groups, a block of them by each lane for each group: dithers reads them.
  __device__ __forceinline__ void make_dithers(const Seed& seed, size_t group) const {
    __syncwarp();
#pragma unroll
    for (unsigned g = 0; g < kTurnBlocks / 2; ++g) {
      const uint64_t first = seed.first + (group + g) * codecs::kGroup;
      const codecs::PhiloxBlock mine = codecs::random_block(seed, codecs::element_block(first) + lane_id());
      // Block b has the numbers of the group's elements b, b + 32 … : its words in turn, of those below 128 in lower
      // halves and of those 128 further in upper ones.
#pragma unroll
      for (unsigned w = 0; w < 4; ++w) room_[g * kPitch + 32 * w + lane_id()] = exact::from_bits(mine.word[w]);
    }
    __syncwarp();
  }
  /// Of the i-th four of the lane's runs.
  __device__ __forceinline__ void dithers(unsigned i, float* u) const {
    load4(room_ + block() / 2 * kPitch + Runs::in_block(i), u);
#pragma unroll
    for (unsigned j = 0; j < 4; ++j) u[j] = codecs::dither(exact::bits(u[j]) >> (block() % 2 * 16) & 0xffffu);
  }

 private:
  __device__ float4* four(unsigned at) const { return reinterpret_cast<float4*>(room_ + at); }

  float* room_;
};

/// Butterflies between a lane's elements i and i + distance, for distances kFirst down to kLast.
template <unsigned kFirst, unsigned kLast>
__device__ __forceinline__ void butterflies(float* y) {
#pragma unroll
  for (unsigned distance = kFirst; distance >= kLast; distance /= 2) {
#pragma unroll
    for (unsigned i = 0; i < 4 * kTurnBlocks; ++i) {
      if ((i & distance) == 0) codecs::butterfly(y + i, y + i + distance);
    }
  }
}

// What a thread keeps from turn to turn: its warp's room, and the signs of the rotation, which follow from the step.
// They are made once by a CTA, for the step that all payloads have as a rule.
class RotationMemory : public TurnRoom {
 public:
  __device__ explicit RotationMemory(uint32_t step) : TurnRoom(warp_room()), step_(step) {
    __shared__ codecs::PhiloxBlock signs;
    if (threadIdx.x == 0) signs = codecs::rotation_signs(step);
    __syncthreads();
#pragma unroll
    for (unsigned j = 0; j < 4; ++j) row_sign_[j] = held(signs.word[lane_id() / 8] >> (lane_id() % 8 * 4 + j) << 31);
    run_signs_ = of_runs(signs);
  }
  /// Of element j of the lane's rows, as the sign bit of a float.
  __device__ __forceinline__ uint32_t row_sign(unsigned j) const { return row_sign_[j]; }
  /// Of the lane's runs in the rotation of this step, a bit each.
  __device__ __forceinline__ uint32_t run_signs(uint32_t step) const {
    return step == step_ ? run_signs_ : of_runs(codecs::rotation_signs(step));
  }

 private:
  static __device__ float* warp_room() {
    __shared__ float4 rooms[kBlockWarps][kFloats / 4];
    return reinterpret_cast<float*>(rooms[threadIdx.x / 32]);
  }
  static __device__ __forceinline__ uint32_t of_runs(const codecs::PhiloxBlock& signs) {
    const unsigned shift = quarter() % 2 * 16;
    const bool late = quarter() >= 2;
    const uint32_t near = late ? signs.word[1] : signs.word[0], far = late ? signs.word[3] : signs.word[2];
    return (near >> shift & 0xffffu) | far >> shift << 16;
  }

  uint32_t step_, row_sign_[4], run_signs_;
};

template <class F>
struct RotatedBlocks {
  static constexpr unsigned kGroups = kTurnBlocks / 2, kHeld = kGroups * kPerLane;
  using Memory = RotationMemory;
  using Rows = TurnRoom::Rows;
  using Combs = TurnRoom::Combs;
  using Runs = TurnRoom::Runs;
  static_assert(F::kRotated && F::kBits == 4 && F::kBlock == codecs::Rotation::kBlock);

  template <bool kFeedback>
  static __device__ __forceinline__ void encode(const EncodeJob& job, const Seed& seed, const Memory& memory,
                                                size_t group, unsigned n, uint32_t, float* x) {
    using Encoder = typename F::Encoder;
    uint32_t max = 0;  // of the lane's block
    float y[kHeld];
#pragma unroll
    for (unsigned i = 0; i < kTurnBlocks; ++i) {
      const uint32_t of_block = warp_max(max_mag_of_four(x + 4 * i));
      max = i == TurnRoom::block() ? of_block : max;
#pragma unroll
      for (unsigned j = 0; j < 4; ++j) y[4 * i + j] = exact::from_bits(exact::bits(x[4 * i + j]) ^ memory.row_sign(j));
    }
    memory.turn<Rows, Combs>(y);
    const bool coded = max != 0 && max < exact::kInfBits;
    const codecs::Rotation rotation = coded ? codecs::Rotation::of(max) : codecs::Rotation{1.0f};
    if (__any_sync(kFull, !coded || rotation.before != 1.0f)) {
#pragma unroll
      for (unsigned j = 0; j < kHeld; ++j) y[j] = coded ? exact::mul(y[j], rotation.before) : 0.0f;
    }
    butterflies<16, 4>(y);
    memory.turn<Combs, Runs>(y);
    butterflies<8, 1>(y);

    float reach = 0.0f;
#pragma unroll
    for (unsigned j = 0; j < kHeld; ++j) reach = greater_mag(reach, y[j]);
    uint32_t greatest = exact::mag(reach);
#pragma unroll
    for (unsigned mask = kTurnBlocks; mask < kLanes; mask *= 2)
      greatest = ::max(greatest, __shfl_xor_sync(kFull, greatest, static_cast<int>(mask)));
    const Encoder encoder = Encoder::rotated(coded ? greatest : max, rotation);
    if (__any_sync(kFull, encoder.before != 1.0f)) {
#pragma unroll
      for (unsigned j = 0; j < kHeld; ++j) y[j] = exact::mul(y[j], encoder.before);
    }
    int32_t code[kHeld];
    if constexpr (F::kStochastic) memory.make_dithers(seed, group);
#pragma unroll
    for (unsigned i = 0; i < kTurnBlocks; ++i) {
      float u[4];
      if constexpr (F::kStochastic) memory.dithers(i, u);
#pragma unroll
      for (unsigned j = 0; j < 4; ++j) {
        const float v = exact::mul(y[4 * i + j], encoder.inverse);
        if constexpr (F::kStochastic) {
          code[4 * i + j] = Encoder::rounded(v, u[j]);
        } else {
          code[4 * i + j] = Encoder::rounded(v);
        }
      }
    }
    const uint4 codes = make_uint4(bytes_of(code), bytes_of(code + 4), bytes_of(code + 8), bytes_of(code + 12));
    if (TurnRoom::block() * F::kBlock < n) {
      if (TurnRoom::quarter() == 0)
        reinterpret_cast<uint32_t*>(job.first)[group * 2 + TurnRoom::block()] = encoder.stored;
      *codes_at(job.second, group) = codes;
    }
    if constexpr (kFeedback) {
      float d[kHeld];
      unrotate(memory, memory.run_signs(seed.step), encoder.stored, codes, d);
#pragma unroll
      for (unsigned j = 0; j < kHeld; ++j) x[j] = exact::sub(x[j], d[j]);
    }
  }

  static __device__ __forceinline__ void decode(const std::byte* payload, size_t first, size_t second,
                                                const Memory& memory, size_t group, unsigned n, float* v) {
    uint32_t stored = 0;
    uint4 codes{};
    if (TurnRoom::block() * F::kBlock < n) {
      stored = reinterpret_cast<const uint32_t*>(payload + first)[group * 2 + TurnRoom::block()];
      codes = *codes_at(payload + second, group);
    }
    unrotate(memory, memory.run_signs(step_of(payload)), stored, codes, v);
  }

 private:
  /// Where the 16 bytes of the lane's runs are in a section of codes.
  template <class Byte>
  static __device__ __forceinline__ auto* codes_at(Byte* section, size_t group) {
    using Words = std::conditional_t<std::is_const_v<Byte>, const uint4, uint4>;
    return reinterpret_cast<Words*>(section) + group * 8 + TurnRoom::block() * 4 + TurnRoom::quarter();
  }
  /// Four bytes of codes: those of four elements, and of the four that lie 64 further, in upper halves.
  static __device__ __forceinline__ uint32_t bytes_of(const int32_t* code) {
    return (low_bytes(code) & 0x0f0f0f0fu) | (low_bytes(code + kHeld / 2) << 4 & 0xf0f0f0f0u);
  }

  /// Values of the lane's rows from the codes of its runs. `signs`: those of its runs.
  static __device__ __forceinline__ void unrotate(const Memory& memory, uint32_t signs, uint32_t stored, uint4 codes,
                                                  float* z) {
    if (stored == 0) codes = uint4{}, signs = 0;  // every d is +0
    uint32_t combs[4];
    memory.turn_codes(codes, combs);
    const auto decoder = F::Decoder::rotated(stored);
#pragma unroll
    for (unsigned r = 0; r < 4; ++r) {
      const uint32_t raised = combs[r] ^ 0x88888888u;  // -8 … 7 as 0 … 15
#pragma unroll
      for (unsigned j = 0; j < 4; ++j) {
        z[4 * r + j] = value(decoder, raised & 0x0f0f0f0fu, j);
        z[kHeld / 2 + 4 * r + j] = value(decoder, raised >> 4 & 0x0f0f0f0fu, j);
      }
    }
    butterflies<16, 4>(z);
    memory.turn<Combs, Runs>(z);
    butterflies<8, 1>(z);
    const auto back = codecs::Unrotation::of(stored);
    if (__any_sync(kFull, back.after != 1.0f)) {
#pragma unroll
      for (unsigned j = 0; j < kHeld; ++j) z[j] = back.out(z[j], signs << (31 - j) & 0x80000000u);
    } else {
#pragma unroll
      for (unsigned j = 0; j < kHeld; ++j)
        z[j] = exact::from_bits(exact::bits(exact::mul(z[j], codecs::Unrotation::kEven)) ^
                                (signs << (31 - j) & 0x80000000u));
    }
    memory.turn<Runs, Rows>(z);
  }
  /// The value of byte j of four that are 0 to 15 for the codes -8 to 7: below 2^23 + 16 the lowest bits of a float
  /// count ones. decoder.value has another factor, which for rotated elements is 1: what the scale says comes after the
  /// butterflies.
  template <class Decoder>
  static __device__ __forceinline__ float value(const Decoder& decoder, uint32_t raised, unsigned j) {
    constexpr uint32_t kOnes = 0x4b000000u;  // 2^23
    const float from_8 = exact::from_bits(__byte_perm(raised, kOnes, 0x7440u + j));
    return exact::mul(exact::sub(from_8, 0x1p23f + 8.0f), decoder.step);
  }
};

}  // namespace
}  // namespace gradgate::kernels::cuda
