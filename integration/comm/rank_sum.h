// Sums over ranks, in rank order: f32 accumulation for f32, bf16 and f16, f64 for f64, one rounding at the end.
#pragma once

#include <cstddef>

#include "gradgate/types.h"

namespace gradgate::comm {

/// Whether vectors of this dtype can be summed (u8 carries payloads only).
constexpr bool can_sum(DType dtype) noexcept {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
}

/// dests[k][dest_offset + i] = Σ over r, in order, of sources[r][source_offset + i] for i < count and every k. Offsets
/// and count in elements. Works tile by tile: a tile of every source is read before that tile of any destination is
/// written, so a destination may be the very place it was read from.
void sum_over_ranks(std::span<const void* const> sources, size_t source_offset, std::span<void* const> dests,
                    size_t dest_offset, size_t count, DType dtype) noexcept;

}  // namespace gradgate::comm
