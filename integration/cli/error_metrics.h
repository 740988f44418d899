// How far a decoded vector is from what was encoded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gradgate::cli {

struct ErrorMetrics {
  double max_error = 0;       ///< greatest |b − a|
  double relative_l2 = 0;     ///< ‖b − a‖ / ‖a‖; 0 where both are zero, NaN where only a is
  double cosine_error = 0;    ///< 1 − a·b / (‖a‖‖b‖), not below 0; 0 where both are zero, NaN where one is
  double norm = 0;            ///< ‖a‖
  uint64_t non_finite = 0;    ///< elements of a that are not finite; left out of the numbers above together with their b
  uint64_t poisoned = 0;      ///< elements whose a is finite and b is not; left out too
};

/// Sums in f64, in element order. The spans have one length.
ErrorMetrics compare(std::span<const float> a, std::span<const float> b);

}  // namespace gradgate::cli
