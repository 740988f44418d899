// Inputs of the benchmarks, functions of (seed, rank, element) alone, so that a check can make them again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gradgate/types.h"

namespace gradgate::cli {

/// Looks like a gradient: Gaussian, with a scale per 4096 elements that is log-uniform over four decades.
class GradientLike {
 public:
  GradientLike();
  /// Fills elements first … first+out.count-1 of the vector named by `seed`. f32, bf16 or f16.
  void fill(uint64_t seed, size_t first, Vec out) const;

 private:
  static constexpr size_t kEntries = 1 << 14;
  float normal_[kEntries];
};

/// Integers times a power of two per 4096 elements, so small that their sum over `ranks` ranks is exact in f32 (and in bf16 or f16): a dense all-reduce of
/// 1, 2, 4, … ranks has no rounding at all, and any difference is an error. Near-Gaussian.
void fill_exact(int rank, int ranks, size_t first, Vec out);
/// No f32 or bf16 value of fill_exact is greater.
inline constexpr double kLargestExact = 0x1p-3;

}  // namespace gradgate::cli
