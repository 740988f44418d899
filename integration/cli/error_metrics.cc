#include "integration/cli/error_metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace gradgate::cli {

ErrorMetrics compare(std::span<const float> a, std::span<const float> b) {
  ErrorMetrics metrics;
  double aa = 0, bb = 0, ab = 0, dd = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double x = a[i], y = b[i];
    if (!std::isfinite(x)) {
      ++metrics.non_finite;
      continue;
    }
    if (!std::isfinite(y)) {
      ++metrics.poisoned;
      continue;
    }
    const double d = y - x;
    aa += x * x;
    bb += y * y;
    ab += x * y;
    dd += d * d;
    metrics.max_error = std::max(metrics.max_error, std::fabs(d));
  }
  constexpr double kUndefined = std::numeric_limits<double>::quiet_NaN();
  metrics.norm = std::sqrt(aa);
  metrics.relative_l2 = aa > 0 ? std::sqrt(dd / aa) : (bb > 0 ? kUndefined : 0);
  if (dd == 0) {
    metrics.cosine_error = 0;
  } else {
    metrics.cosine_error = aa > 0 && bb > 0 ? std::max(0.0, 1 - ab / (std::sqrt(aa) * std::sqrt(bb))) : kUndefined;
  }
  return metrics;
}

}  // namespace gradgate::cli
