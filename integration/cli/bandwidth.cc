#include "integration/cli/bandwidth.h"

#include <cmath>
#include <limits>

namespace gradgate::cli {

Rates rates(RateOf collective, uint64_t bytes, int ranks, double seconds) noexcept {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  if (!(seconds > 0) || !std::isfinite(seconds)) return {kNone, kNone};
  const double algbw = static_cast<double>(bytes) / seconds / 1e9;
  const double share = ranks > 1 ? static_cast<double>(ranks - 1) / ranks : 0;
  return {algbw, algbw * (collective == RateOf::all_reduce ? 2 * share : share)};
}

double break_even_bandwidth(uint64_t dense_bytes, uint64_t wire_bytes, int ranks, double codec_s) noexcept {
  if (wire_bytes >= dense_bytes || ranks < 2 || std::isnan(codec_s)) return 0;
  if (codec_s <= 0) return std::numeric_limits<double>::infinity();
  return 2.0 * (ranks - 1) / ranks * static_cast<double>(dense_bytes - wire_bytes) / codec_s;
}

}  // namespace gradgate::cli
