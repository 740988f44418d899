// Random numbers of a group of 256 (docs/format.md §5).
#pragma once

#include "codecs/philox.h"
#include "kernels/cpu/loops/lanes.h"

namespace gradgate::kernels::cpu {
namespace {

// Dithers of elements first … first + 255 of the seed's tensor, first a multiple of 256: a block in each lane.
__attribute__((noinline)) void group_dither(const Seed& seed, uint64_t first, float* u) {
  constexpr uint32_t kBlocks = codecs::kGroupBlocks;
  const uint64_t base = codecs::element_block(first);
  uint32_t word[4][kBlocks];
  for (uint32_t lane = 0; lane < kBlocks; ++lane) {
    const codecs::PhiloxBlock block = codecs::random_block(seed, base + lane);
    for (uint32_t w = 0; w < 4; ++w) word[w][lane] = block.word[w];
  }
  for (uint32_t k = 0; k < 8; ++k) {
    for (uint32_t lane = 0; lane < kBlocks; ++lane)
      u[k * kBlocks + lane] = codecs::dither((word[k % 4][lane] >> (k / 4 * 16)) & 0xffffu);
  }
}

}  // namespace
}  // namespace gradgate::kernels::cpu
