#include "gate/fit.h"

#include <cmath>

#include "gate/estimator.h"

namespace gradgate::gate {
namespace {

// Larger over smaller, minus one: 1 means off by a factor of two, in either direction.
double relative_error(const LinearCost& line, const FitPoint& point) noexcept {
  const double predicted = line(point.bytes);
  return std::fmax(predicted / point.seconds, point.seconds / predicted) - 1;
}

struct Weighted {
  LinearCost line;
  double max_error;
};

// Least squares of (a + b·M − T)/T without point `skip`, on the quadrant a, b >= 0: the free minimum when it lies
// inside, else the better of the two edges (the objective is convex, so the minimum is on an edge then).
Weighted solve(std::span<const FitPoint> points, int skip) noexcept {
  double sw = 0, sm = 0, smm = 0, st = 0, smt = 0, scale = 0;
  for (const FitPoint& p : points) scale = std::fmax(scale, p.bytes);
  if (scale == 0) scale = 1;
  for (size_t i = 0; i < points.size(); ++i) {
    if (static_cast<int>(i) == skip) continue;
    const double t = points[i].seconds, w = 1 / (t * t), m = points[i].bytes / scale;  // scaled: sums of like size
    sw += w, sm += w * m, smm += w * m * m, st += w * t, smt += w * m * t;
  }
  const double determinant = sw * smm - sm * sm;
  double a = (st * smm - smt * sm) / determinant, b = (sw * smt - sm * st) / determinant;
  if (!(a >= 0 && b >= 0)) {
    const double only_b = smt / smm, only_a = st / sw;
    // Both edges have the same Σw·T²; the reduction of the objective tells which is better.
    const bool through_origin = smm > 0 && smt * only_b >= st * only_a;
    a = through_origin ? 0 : only_a, b = through_origin ? only_b : 0;
  }
  Weighted out{{a, b / scale}, 0};
  for (size_t i = 0; i < points.size(); ++i) {
    if (static_cast<int>(i) != skip) out.max_error = std::fmax(out.max_error, relative_error(out.line, points[i]));
  }
  return out;
}

bool two_sizes(std::span<const FitPoint> points, int skip) noexcept {
  const FitPoint* first = nullptr;
  for (size_t i = 0; i < points.size(); ++i) {
    if (static_cast<int>(i) == skip) continue;
    if (first == nullptr) first = &points[i];
    if (points[i].bytes != first->bytes) return true;
  }
  return false;
}

}  // namespace

Status fit_line(std::span<const FitPoint> points, Fit* out) noexcept {
  for (const FitPoint& p : points) {
    if (!usable_seconds(p.seconds) || !std::isfinite(p.bytes) || p.bytes < 0) return StatusCode::invalid_argument;
  }
  if (out == nullptr || !two_sizes(points, -1)) return StatusCode::invalid_argument;
  Weighted best = solve(points, -1);
  int dropped = -1;
  if (points.size() >= 4 && best.max_error > kOutlierError) {
    const double limit = kOutlierGain * best.max_error;
    Weighted without = best;
    for (size_t i = 0; i < points.size(); ++i) {
      if (!two_sizes(points, static_cast<int>(i))) continue;
      const Weighted candidate = solve(points, static_cast<int>(i));
      if (candidate.max_error < without.max_error) without = candidate, dropped = static_cast<int>(i);
    }
    if (without.max_error < limit) {
      best = without;
    } else {
      dropped = -1;
    }
  }
  if (!(best.max_error <= kFitMaxError) || !best.line.usable()) return StatusCode::bad_state;
  *out = {best.line, best.max_error, dropped};
  return {};
}

Status fit_probe(std::span<const double> samples, uint32_t ranks, LinkModel* out, Fit* fits) noexcept {
  if (out == nullptr || ranks == 0 || samples.size() != ranks * kProbeSamples) return StatusCode::invalid_argument;
  FitPoint points[kProbeCollectives][kProbePoints];
  size_t counts[kProbeCollectives] = {};
  for (size_t point = 0; point < kProbePoints; ++point) {
    double times[kProbeRepetitions];
    for (size_t repetition = 0; repetition < kProbeRepetitions; ++repetition) {
      double least = std::numeric_limits<double>::infinity();
      for (uint32_t rank = 0; rank < ranks; ++rank) {
        const double t = samples[rank * kProbeSamples + point * kProbeRepetitions + repetition];
        least = usable_seconds(t) ? std::fmin(least, t) : -1;
        if (least < 0) break;
      }
      times[repetition] = least > 0 ? least : std::numeric_limits<double>::quiet_NaN();
    }
    const double median = median_in_place(times);
    const int collective = static_cast<int>(kProbe[point].collective);
    if (!std::isnan(median)) points[collective][counts[collective]++] = {double(kProbe[point].bytes), median};
  }
  Fit fitted[kProbeCollectives];
  for (int i = 0; i < kProbeCollectives; ++i) GRADGATE_TRY(fit_line({points[i], counts[i]}, &fitted[i]));
  *out = {fitted[0].line, fitted[1].line, fitted[2].line, ranks};
  if (fits != nullptr) std::copy_n(fitted, kProbeCollectives, fits);
  return {};
}

}  // namespace gradgate::gate
