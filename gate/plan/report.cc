#include "gate/plan/report.h"

#include <algorithm>
#include <cmath>

#include "gate/estimator.h"

namespace gradgate::gate {
namespace {

// Column-wise over ranks; NaN as soon as one rank has no usable number, because then the ranks cannot be compared.
template <class Pick>
double over_ranks(std::span<const double> reports, size_t stride, size_t at, Pick pick) noexcept {
  double result = kMissing;
  for (size_t r = at; r < reports.size(); r += stride) {
    if (!usable_seconds(reports[r])) return kMissing;
    result = std::isnan(result) ? reports[r] : pick(result, reports[r]);
  }
  return result;
}

// The sum over ranks of one of the guard's numbers; NaN when a rank has none.
double sum_over_ranks(std::span<const double> reports, size_t stride, size_t at) noexcept {
  double sum = 0;
  for (size_t r = at; r < reports.size(); r += stride) sum += reports[r] >= 0 ? reports[r] : kMissing;
  return sum;
}

GuardNumbers guard_numbers(std::span<const double> reports, size_t stride, size_t at) noexcept {
  double sums[kGuardNumbers - 1];
  GuardNumbers n;
  n.known = true;
  for (size_t i = 0; i + 1 < kGuardNumbers; ++i) {
    sums[i] = sum_over_ranks(reports, stride, at + i);
    n.known = n.known && std::isfinite(sums[i]);
  }
  const auto relative = [](double part, double whole) { return part > 0 ? std::sqrt(part / whole) : 0.0; };
  n.stage1 = relative(sums[0], sums[1]), n.stage2 = relative(sums[2], sums[3]);
  n.residual = relative(sums[4], sums[5]);
  n.non_finite_in = sums[6], n.non_finite_out = sums[7];
  const size_t hash = at + kGuardNumbers - 1;
  for (size_t r = hash; r < reports.size(); r += stride) {
    n.replicas_equal = n.replicas_equal && reports[r] == reports[hash];
  }
  return n;
}

double larger(double a, double b) noexcept { return a > b ? a : b; }
double smaller(double a, double b) noexcept { return a < b ? a : b; }

}  // namespace

ReportLayout report_layout(const GateShape& shape, const PlanState& state) noexcept {
  ReportLayout layout;
  const uint64_t from = state.phase == Phase::verify ? state.phase_start : state.last_agreement;
  if (state.next_agreement == kNever) return layout;
  layout.steps = std::min<size_t>(state.next_agreement - from, shape.step_capacity());
  layout.full = state.phase != Phase::hold && state.phase != Phase::fixed;
  layout.buckets = shape.buckets.size();
  layout.candidates = shape.candidate_count();
  layout.window = shape.config.window;
  return layout;
}

Agreed agree(const ReportLayout& layout, std::span<const double> reports) {
  Agreed a;
  const size_t stride = layout.size();
  for (size_t r = 0; r < reports.size(); r += stride) {
    a.failures += reports[r + ReportLayout::kFailures];
    a.failed = larger(a.failed, reports[r + ReportLayout::kFailed]);
    a.shadow_s = larger(a.shadow_s, reports[r + ReportLayout::kShadow]);
  }
  for (size_t i = 0; i < layout.steps; ++i) {
    a.steps.push_back(over_ranks(reports, stride, ReportLayout::kHeader + i, larger));
  }
  for (size_t b = 0; b < layout.buckets; ++b) a.guards.push_back(guard_numbers(reports, stride, layout.guard_at(b)));
  if (!layout.full) return a;
  std::vector<double> window(layout.window);
  const auto transfer = [&](size_t at) {
    for (size_t i = 0; i < layout.window; ++i) window[i] = over_ranks(reports, stride, at + i, smaller);
    return median_in_place(window);
  };
  for (size_t b = 0; b < layout.buckets; ++b) {
    for (size_t c = 1; c <= layout.candidates; ++c) {
      a.encode.push_back(over_ranks(reports, stride, layout.encode_at(b, c), larger));
      a.decode.push_back(over_ranks(reports, stride, layout.decode_at(b, c), larger));
    }
    a.dense_transfer.push_back(transfer(layout.dense_at(b)));
    a.plan_transfer.push_back(transfer(layout.plan_at(b)));
    double ready = 0;
    for (size_t r = layout.ready_at(b); r < reports.size() && !std::isnan(ready); r += stride) {
      ready = reports[r] >= 0 && std::isfinite(reports[r]) ? std::fmax(ready, reports[r]) : kMissing;
    }
    a.ready.push_back(ready);
  }
  return a;
}

}  // namespace gradgate::gate
