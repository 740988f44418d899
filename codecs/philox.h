// Philox4x32-10: random numbers that are a function of a counter (docs/format.md §5), after J. Salmon, M. Moraes,
// R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Element code, for host and device.
#pragma once

#include <cstdint>

#include "codecs/exact_math.h"
#include "gradgate/types.h"

namespace gradgate::codecs {

/// The four words of one block.
struct PhiloxBlock {
  uint32_t word[4];
};

/// Ten rounds over the counter c0 … c3 with the key k0, k1.
GRADGATE_HD PhiloxBlock philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xd2511f53u} * c0, p1 = uint64_t{0xcd9e8d57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

/// Block `index` of the stream of random numbers that a seed names.
GRADGATE_HD PhiloxBlock random_block(const Seed& seed, uint64_t index) {
  return philox4x32_10(static_cast<uint32_t>(index), seed.tensor, seed.step, seed.stream,
                       static_cast<uint32_t>(seed.key),
                       static_cast<uint32_t>(seed.key >> 32) ^ static_cast<uint32_t>(index >> 32));
}

/// Blocks that hold the numbers of a group of 256 elements: 16 bits for each.
inline constexpr uint32_t kGroupBlocks = 32;

/// Index of the block with the number of element `i` of its tensor. Neighbours are in different blocks, so that the
/// lanes of a vector or a warp make a block each and use all of it.
GRADGATE_HD uint64_t element_block(uint64_t i) { return i / 256 * kGroupBlocks + i % kGroupBlocks; }

/// The 16 bits of element `i`, from its block.
GRADGATE_HD uint32_t element_bits(const PhiloxBlock& block, uint64_t i) {
  const uint32_t k = static_cast<uint32_t>(i % 256) / kGroupBlocks;
  return (block.word[k % 4] >> (k / 4 * 16)) & 0xffffu;
}

/// A number above -1/2 and below 1/2 from 16 random bits: (bits + 1/2) / 65536 - 1/2, exact. Its mean is 0.
GRADGATE_HD float dither(uint32_t bits16) { return exact::sub(exact::from_bits(0x3f800040u | bits16 << 7), 1.5f); }

}  // namespace gradgate::codecs
