// The guard: what compression loses, judged. A codec that loses more than its budget gives way to a more faithful one,
// whatever time it saves.
#pragma once

#include <cstdint>

#include "gate/predict.h"

namespace gradgate::gate {

/// One rank's look at one compressed exchange of one bucket. Sums of squares over finite elements.
struct GuardReading {
  double error1 = kMissing, norm1 = kMissing;  ///< stage 1: what this rank's payloads lost, and of how much
  double error2 = kMissing, norm2 = kMissing;  ///< stage 2: of the sum that this rank owns; both 0 where there is none
  double residual = kMissing, gradient = kMissing;             ///< of e after the exchange, of g before it
  double non_finite_in = kMissing, non_finite_out = kMissing;  ///< elements
  double hash = kMissing;                                      ///< of the result, 52 bits: equal on all ranks
};
inline constexpr int kGuardNumbers = 9;

/// All ranks' readings of one exchange.
struct GuardNumbers {
  bool known = false;
  double stage1 = kMissing, stage2 = kMissing;  ///< relative L2 error
  double residual = kMissing;                   ///< ‖e‖ / ‖g‖ over all ranks
  double non_finite_in = 0, non_finite_out = 0;
  bool replicas_equal = true;
};

struct GuardLimits {
  double error_budget = 0;     ///< largest relative error of a stage, for codecs without feedback
  double residual_budget = 0;  ///< largest ‖e‖ / ‖g‖ as a multiple of M / P, for codecs with feedback
  double ratio = 1;            ///< M / P of the bucket with this codec
  bool feedback = false;
};

/// Why::starting: within its budgets; else the first of guard_replicas, guard_non_finite, guard_error, guard_residual
/// that holds. A codec with feedback is not judged by one exchange's error, which later ones make good, but by a
/// residual that has grown: with ratio r an element waits about r steps for its turn, so ‖e‖ of up to r·‖g‖ is its way
/// of working.
Why judge(const GuardNumbers& numbers, const GuardLimits& limits) noexcept;

}  // namespace gradgate::gate
