// Turning a few measured collectives into a LinkModel: a straight line per collective, fitted so that one bad sample
// does not bend it, and refused when the points say nothing. The probe that a session runs when there is no profile is
// data here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gate/cost.h"
#include "gradgate/status.h"

namespace gradgate::gate {

struct FitPoint {
  double bytes = 0;
  double seconds = 0;
};

struct Fit {
  LinearCost line;
  double max_error = 0;  ///< at the worst point that was used: larger over smaller of line and sample, minus 1
  int dropped = -1;      ///< index of the point left out as an outlier; −1: none
};

/// A fit whose line is off by more than this (a factor of three) at some point is refused.
inline constexpr double kFitMaxError = 2.0;
/// With four points or more, one is dropped when the line misses by more than this and …
inline constexpr double kOutlierError = 0.15;
/// … leaving that point out reduces the largest error to less than this share.
inline constexpr double kOutlierGain = 0.5;

/// Fits T = a + b·bytes, a >= 0 and b >= 0, by least squares of the relative error (weights 1/T²). invalid_argument:
/// fewer than two distinct sizes, or a point that is not finite and positive; bad_state: the points do not lie near a
/// line (kFitMaxError). `out` is written only on success.
Status fit_line(std::span<const FitPoint> points, Fit* out) noexcept;

enum class ProbeCollective : uint8_t { all_reduce = 0, all_gather = 1, all_to_all = 2 };
inline constexpr int kProbeCollectives = 3;

/// One point of the probe: run the collective `warmups + repetitions` times on a vector of `bytes` in total (rounded up
/// by the session to a multiple of the rank count), a barrier before each, and keep the seconds of the last
/// `repetitions`.
struct ProbePoint {
  ProbeCollective collective;
  uint32_t bytes;
  uint8_t warmups, repetitions;
};
inline constexpr uint8_t kProbeRepetitions = 5;
inline constexpr ProbePoint kProbe[] = {
    {ProbeCollective::all_reduce, 4u << 10, 1, kProbeRepetitions},
    {ProbeCollective::all_reduce, 64u << 10, 1, kProbeRepetitions},
    {ProbeCollective::all_reduce, 512u << 10, 1, kProbeRepetitions},
    {ProbeCollective::all_reduce, 2u << 20, 1, kProbeRepetitions},
    {ProbeCollective::all_gather, 4u << 10, 1, kProbeRepetitions},
    {ProbeCollective::all_gather, 64u << 10, 1, kProbeRepetitions},
    {ProbeCollective::all_gather, 512u << 10, 1, kProbeRepetitions},
    {ProbeCollective::all_gather, 2u << 20, 1, kProbeRepetitions},
    {ProbeCollective::all_to_all, 4u << 10, 1, kProbeRepetitions},
    {ProbeCollective::all_to_all, 64u << 10, 1, kProbeRepetitions},
    {ProbeCollective::all_to_all, 512u << 10, 1, kProbeRepetitions},
    {ProbeCollective::all_to_all, 2u << 20, 1, kProbeRepetitions},
};
inline constexpr size_t kProbePoints = sizeof(kProbe) / sizeof(kProbe[0]);
/// Seconds that one rank reports: kProbe order, repetitions of a point together.
inline constexpr size_t kProbeSamples = kProbePoints * kProbeRepetitions;

/// The model from all ranks' samples (`ranks` × kProbeSamples in rank order). Per repetition the MIN over ranks
/// (waiting for a late peer is not transfer), then the median over repetitions, then one line per collective.
/// Repetitions in which any rank's sample is not finite and positive are left out. Errors as fit_line(); `fits`, when
/// given, receives the three fits.
Status fit_probe(std::span<const double> samples, uint32_t ranks, LinkModel* out, Fit* fits = nullptr) noexcept;

}  // namespace gradgate::gate
