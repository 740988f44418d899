// The measurement that decides: step times of ABBA windows (plan, base, base, plan), paired and put to a sign test. No
// distribution is assumed, one long step moves nothing, and a steady drift cancels between the two halves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gate/estimator.h"

namespace gradgate::gate {

enum class Verdict : uint8_t { undecided = 0, win = 1, lose = 2 };
inline const char* verdict_name(Verdict verdict) noexcept {
  return verdict == Verdict::win ? "win" : verdict == Verdict::lose ? "lose" : "undecided";
}

/// Two-sided sign test: the probability of a split at least this uneven when both sides are equally likely. 1 without
/// pairs.
inline double sign_test(uint32_t wins, uint32_t losses) noexcept {
  const uint32_t n = wins + losses, fewer = std::min(wins, losses);
  double term = 1, sum = 0;  // term: n choose k, halved n times
  for (uint32_t i = 0; i < n; ++i) term /= 2;
  for (uint32_t k = 0; k <= fewer; ++k) {
    sum += term;
    term = term * (n - k) / (k + 1);
  }
  return std::min(1.0, 2 * sum);
}

/// True when step `offset` of a verification runs the plan (windows 0 and 3 of each round of four), false for the base.
constexpr bool verify_runs_plan(uint64_t offset, uint32_t window) noexcept {
  const uint64_t index = offset / window % 4;
  return index == 0 || index == 3;
}

struct PairedTest {
  Verdict verdict = Verdict::undecided;
  uint32_t pairs = 0, wins = 0, losses = 0;  ///< usable pairs; those in which the plan was faster, slower
  double p = 1;                              ///< two-sided sign test
  double median_gain_s = 0;                  ///< median of base − plan over the pairs; NaN without pairs
  double plan_s = 0, base_s = 0;             ///< medians of the steps that were used
};

/// `steps`: the step times of `rounds` rounds of four windows of `window` steps, NaN where unusable (the pair is then
/// left out). The first `discard` steps of each window do not count. Step k of the first window is paired with step k
/// of the second, step k of the fourth with step k of the third. Win (lose): p < significance and the median gain
/// (loss) reaches `min_gain` of the base step.
inline PairedTest paired_test(std::span<const double> steps, uint32_t window, uint32_t rounds, uint32_t discard,
                              double significance, double min_gain) {
  PairedTest out;
  std::vector<double> plan, base, gains;
  for (uint32_t round = 0; round < rounds; ++round) {
    for (uint32_t half = 0; half < 2; ++half) {
      for (uint32_t k = discard; k < window; ++k) {
        const size_t start = size_t{round} * 4 * window;
        const size_t a = start + (half == 0 ? 0 : 3 * window) + k, b = start + (half == 0 ? 1 : 2) * window + k;
        if (std::max(a, b) >= steps.size() || !usable_seconds(steps[a]) || !usable_seconds(steps[b])) continue;
        plan.push_back(steps[a]);
        base.push_back(steps[b]);
        gains.push_back(steps[b] - steps[a]);
        out.wins += steps[a] < steps[b];
        out.losses += steps[a] > steps[b];
      }
    }
  }
  out.pairs = static_cast<uint32_t>(gains.size());
  out.p = sign_test(out.wins, out.losses);
  out.median_gain_s = median_in_place(gains);
  out.plan_s = median_in_place(plan);
  out.base_s = median_in_place(base);
  if (out.p < significance && out.median_gain_s >= min_gain * out.base_s) out.verdict = Verdict::win;
  if (out.p < significance && -out.median_gain_s >= min_gain * out.base_s) out.verdict = Verdict::lose;
  return out;
}

}  // namespace gradgate::gate
