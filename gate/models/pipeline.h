// Idle time of a pipeline-parallel step: how much of it could hide communication. Numbers only; valid inside
// gate/models/parameters.h.
#pragma once

#include <cmath>

namespace gradgate::gate {

/// Share of a step in which a stage of p waits, with m micro-batches: (p−1)/(p−1+m). Source: GPipe, Huang et al. 2019.
/// With V > 1 model chunks per stage, interleaved: (p−1)/(p−1+m·V). Source: Narayanan et al. 2021.
constexpr double pipeline_bubble(double stages, double micro_batches, double chunks = 1) noexcept {
  return (stages - 1) / (stages - 1 + micro_batches * chunks);
}

/// The fewest micro-batches whose bubble is at most `target` in (0, 1]: ⌈(p−1)(1−t)/(t·V)⌉, at least 1. The inverse of
/// the formula above.
inline double micro_batches_for(double stages, double target, double chunks = 1) noexcept {
  double m = std::fmax(1, std::ceil((stages - 1) * (1 - target) / (target * chunks)));
  // The quotient above is rounded; the formula itself has the last word.
  if (m > 1 && pipeline_bubble(stages, m - 1, chunks) <= target) --m;
  if (pipeline_bubble(stages, m, chunks) > target) ++m;
  return m;
}

}  // namespace gradgate::gate
