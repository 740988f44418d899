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

// Least squares of (a + b·M − T)/T over the points that `used(index)` names, on the quadrant a, b >= 0: the free
// minimum when it lies inside, else the better of the two edges (the objective is convex, so the minimum is on an edge
// then).
template <class Used>
Weighted solve_used(std::span<const FitPoint> points, Used used) noexcept {
  double sw = 0, sm = 0, smm = 0, st = 0, smt = 0, scale = 0;
  for (const FitPoint& p : points) scale = std::fmax(scale, p.bytes);
  if (scale == 0) scale = 1;
  for (size_t i = 0; i < points.size(); ++i) {
    if (!used(i)) continue;
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
    if (used(i)) out.max_error = std::fmax(out.max_error, relative_error(out.line, points[i]));
  }
  return out;
}

Weighted solve(std::span<const FitPoint> points, int skip) noexcept {
  return solve_used(points, [skip](size_t i) { return static_cast<int>(i) != skip; });
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

/// A robust line through a stretch of points.
struct Stretch {
  LinearCost line;
  uint64_t outliers = 0;  ///< bit i: point i of the stretch
  double max_error = 0;   ///< of the others
  double cost = 0;        ///< sum of squared capped errors
};

double square(double x) noexcept { return x * x; }

Stretch fit_stretch(std::span<const FitPoint> points) noexcept {
  Stretch out;
  if (points.size() > kPiecePoints) {
    LinearCost best = solve_used(points, [](size_t) { return true; }).line;
    double least = std::numeric_limits<double>::infinity();
    const auto consider = [&](const LinearCost& line) {
      double errors[kMostCurvePoints];
      for (size_t i = 0; i < points.size(); ++i) errors[i] = relative_error(line, points[i]);
      const double median = median_in_place({errors, points.size()});
      if (median < least) least = median, best = line;
    };
    consider(best);
    for (size_t i = 0; i < points.size(); ++i) {
      for (size_t j = i + 1; j < points.size(); ++j) {
        const FitPoint two[] = {points[i], points[j]};
        consider(solve_used(two, [](size_t) { return true; }).line);
      }
    }
    for (size_t i = 0; i < points.size(); ++i) {
      if (relative_error(best, points[i]) > kCurveOutlier) out.outliers |= uint64_t{1} << i;
    }
  }
  const Weighted fit = solve_used(points, [&](size_t i) { return (out.outliers >> i & 1) == 0; });
  out.line = fit.line;
  out.max_error = fit.max_error;
  for (const FitPoint& p : points) out.cost += square(std::fmin(relative_error(fit.line, p), kCurveOutlier));
  return out;
}

bool ascending(std::span<const FitPoint> points) noexcept {
  for (size_t i = 0; i < points.size(); ++i) {
    if (!usable_seconds(points[i].seconds) || !std::isfinite(points[i].bytes) || points[i].bytes < 0) return false;
    if (i > 0 && points[i].bytes <= points[i - 1].bytes) return false;
  }
  return points.size() >= 2;
}

// Where the second of two lines takes over, between the last size of one piece and the first of the next: where they
// cross, or half way (in the ratio of sizes).
double border(const LinearCost& before, const LinearCost& after, double low, double high) noexcept {
  const double cross = (before.fixed_s - after.fixed_s) / (after.per_byte_s - before.per_byte_s);
  return cross > low && cross < high ? cross : std::sqrt(std::fmax(low, 1) * high);
}

}  // namespace

double Curve::operator()(double bytes) const noexcept {
  double least = 0;  // what the pieces before have reached
  for (int i = 0; i < count; ++i) {
    const CurvePiece& piece = pieces[i];
    if (bytes <= piece.up_to_bytes || i + 1 == count) return std::fmax(least, piece.line(bytes));
    least = std::fmax(least, piece.line(piece.up_to_bytes));
  }
  return std::numeric_limits<double>::quiet_NaN();
}

Status fit_curve(std::span<const FitPoint> points, Curve* out) noexcept {
  const size_t n = points.size();
  if (out == nullptr || n > kMostCurvePoints || !ascending(points)) return StatusCode::invalid_argument;

  // ends[p − 1] is the number of points up to the end of piece p; all ways to cut, cheapest first seen wins.
  size_t ends[kMostPieces] = {n}, pieces = 1;
  double least = fit_stretch(points).cost;
  const double charge = kPieceCost * square(kCurveOutlier);
  for (size_t i = kPiecePoints; i + kPiecePoints <= n; ++i) {
    const double first = fit_stretch(points.first(i)).cost + charge;
    if (first >= least) continue;
    const double two = first + fit_stretch(points.subspan(i)).cost;
    if (two < least) least = two, pieces = 2, ends[0] = i, ends[1] = n;
    for (size_t j = i + kPiecePoints; j + kPiecePoints <= n; ++j) {
      const double three =
          first + charge + fit_stretch(points.subspan(i, j - i)).cost + fit_stretch(points.subspan(j)).cost;
      if (three < least) least = three, pieces = 3, ends[0] = i, ends[1] = j, ends[2] = n;
    }
  }

  Curve curve;
  size_t begin = 0;
  for (size_t p = 0; p < pieces; ++p) {
    const Stretch stretch = fit_stretch(points.subspan(begin, ends[p] - begin));
    if (!stretch.line.usable()) return StatusCode::bad_state;
    curve.outliers |= stretch.outliers << begin;
    curve.pieces[p].line = stretch.line;
    if (p > 0)
      curve.pieces[p - 1].up_to_bytes =
          border(curve.pieces[p - 1].line, stretch.line, points[begin - 1].bytes, points[begin].bytes);
    begin = ends[p];
  }
  curve.count = static_cast<int>(pieces);
  curve.overall = fit_stretch(points).line;

  size_t outliers = 0;
  double mean = 0, explained = 0, variation = 0;
  for (const FitPoint& p : points) mean += std::log(p.seconds) / static_cast<double>(n);
  for (size_t i = 0; i < n; ++i) {
    const double predicted = curve(points[i].bytes), t = points[i].seconds;
    explained += square(std::log(t / predicted)), variation += square(std::log(t) - mean);
    if (curve.outliers >> i & 1) {
      ++outliers;
    } else {
      curve.max_error = std::fmax(curve.max_error, std::fmax(predicted / t, t / predicted) - 1);
    }
  }
  curve.confidence = variation > 0 ? std::fmin(std::fmax(1 - explained / variation, 0), 1) : 0;
  const bool grows =
      curve.pieces[pieces - 1].line.per_byte_s > 0 && curve.overall.usable() && curve.overall.per_byte_s > 0;
  if (static_cast<double>(outliers) > kCurveOutlierShare * static_cast<double>(n) ||
      !(curve.max_error <= kCurveMaxError) || !grows)
    return StatusCode::bad_state;
  *out = curve;
  return {};
}

Link ring_link(ProbeCollective collective, const LinearCost& line, uint32_t ranks) noexcept {
  const double n = ranks, steps = (collective == ProbeCollective::all_reduce ? 2 : 1) * (n - 1);
  return {line.fixed_s / steps, steps / n / line.per_byte_s};
}

LinearCost ring_line(ProbeCollective collective, Link link, uint32_t ranks) noexcept {
  const double n = ranks, steps = (collective == ProbeCollective::all_reduce ? 2 : 1) * (n - 1);
  return {steps * link.alpha_s, steps / n / link.beta_Bps};
}

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
