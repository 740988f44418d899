#include "gate/guard.h"

namespace gradgate::gate {

Why judge(const GuardNumbers& n, const GuardLimits& limits) noexcept {
  if (!n.known) return Why::starting;
  if (!n.replicas_equal) return Why::guard_replicas;
  if (n.non_finite_out > 0 && n.non_finite_in == 0) return Why::guard_non_finite;
  if (!limits.feedback && (n.stage1 > limits.error_budget || n.stage2 > limits.error_budget)) return Why::guard_error;
  if (limits.feedback && n.residual > limits.residual_budget * limits.ratio) return Why::guard_residual;
  return Why::starting;
}

}  // namespace gradgate::gate
