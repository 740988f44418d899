// Turning measured collectives into cost models: a straight line for the few points of a session's probe, a curve of up
// to three lines for a calibration's sweep of sizes; fitted so that bad samples do not bend them, and refused when the
// points say nothing. The probe that a session runs when there is no profile is data here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gate/cost.h"
#include "gradgate/status.h"

namespace gradgate::gate {

enum class ProbeCollective : uint8_t { all_reduce = 0, all_gather = 1, all_to_all = 2 };
inline constexpr int kProbeCollectives = 3;

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

/// A calibration's sweep of one collective: the time against the bytes of the whole vector, ascending sizes.
inline constexpr size_t kMostCurvePoints = 64;
inline constexpr int kMostPieces = 3;
/// A piece is fitted to this many sizes or more.
inline constexpr size_t kPiecePoints = 3;
/// A point counts as an outlier from this error on, and costs no more than this when curves are compared …
inline constexpr double kCurveOutlier = 0.25;
/// … where each further piece costs as much as this many outliers.
inline constexpr double kPieceCost = 2.5;
/// A curve is refused when more than this share of the points are outliers, …
inline constexpr double kCurveOutlierShare = 0.34;
/// … or when it is off by more than this (a factor of 1.5) at a point that is not one.
inline constexpr double kCurveMaxError = 0.5;

struct CurvePiece {
  double up_to_bytes = std::numeric_limits<double>::infinity();  ///< the last piece has no end
  LinearCost line;
};

/// Never falls: where one piece ends above the beginning of the next, its end value holds until the next one passes it.
struct Curve {
  CurvePiece pieces[kMostPieces];
  int count = 0;          ///< of pieces; 0: nothing was fitted
  LinearCost overall;     ///< one line for all sizes, for those who want no more
  uint64_t outliers = 0;  ///< bit i: point i was left out
  double max_error = 0;   ///< at the worst point that was used, as Fit::max_error
  double confidence = 0;  ///< 0 … 1: share of the variation of log(seconds) over all points that the curve explains

  double operator()(double bytes) const noexcept;
};

/// Fits up to kMostPieces lines, each with a, b >= 0. Per stretch the line through two points with the least median
/// error says which points are outliers, and a least-squares fit of the relative error to the others gives the line;
/// the stretches are those with the least sum of squared errors, errors capped at kCurveOutlier and pieces charged.
/// invalid_argument: fewer than two distinct sizes, sizes that do not ascend, more than kMostCurvePoints, a point that
/// is not finite and positive; bad_state: too many outliers, too large an error, or a time that does not grow with
/// size. `out` is written only on success.
Status fit_curve(std::span<const FitPoint> points, Curve* out) noexcept;

/// α and β of the ring formula (gate/models): with N >= 2 ranks and a vector of M bytes T = s·((N−1)·α + (N−1)/N·M/β),
/// s = 2 for all_reduce, 1 for the other two. The inverse of a straight line; β is infinite where it is flat.
Link ring_link(ProbeCollective collective, const LinearCost& line, uint32_t ranks) noexcept;
LinearCost ring_line(ProbeCollective collective, Link link, uint32_t ranks) noexcept;

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
