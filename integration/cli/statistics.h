// Order statistics of a few measurements.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace gradgate::cli {

/// Value at quantile q (0 … 1) by nearest rank, the mean of the two middle ones for the median of an even number; NaN when empty.
inline double quantile(std::vector<double> values, double q) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  if (q == 0.5 && values.size() % 2 == 0) return (values[values.size() / 2 - 1] + values[values.size() / 2]) / 2;
  const double rank = std::ceil(q * static_cast<double>(values.size()));
  return values[static_cast<size_t>(std::clamp(rank, 1.0, static_cast<double>(values.size()))) - 1];
}
inline double median(const std::vector<double>& values) { return quantile(values, 0.5); }

/// Half the distance between the quartiles, relative to the median: the spread of a typical measurement.
inline double relative_spread(const std::vector<double>& values) { return (quantile(values, 0.75) - quantile(values, 0.25)) / 2 / median(values); }

/// Median over rounds of a[i] / b[i]: what both had in common in a round (other tenants, clocks) cancels.
inline double median_ratio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) ratios.push_back(a[i] / b[i]);
  return median(ratios);
}

}  // namespace gradgate::cli
