// What one rank tells rank 0 at an agreement, and how the reports of all ranks become one set of numbers: MAX over
// ranks for codec and step times (the slowest rank is waited for), MIN over ranks per step for transfers (waiting for a
// late rank is not transfer).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "gate/plan/state.h"

namespace gradgate::gate {

/// Layout of one report: header, step times, per bucket the guard's reading, and in full reports per bucket the codec
/// medians, transfer windows and the median time of being ready.
struct ReportLayout {
  /// kStep, kEpoch and kHash must be equal on all ranks. kFailures counts failed exchanges since the last agreement;
  /// kFailed names one: 16 × bucket + candidate, or 0. kShadow: seconds spent in shadow calls since the last agreement.
  enum Header : size_t { kStep = 0, kEpoch = 1, kHash = 2, kFailures = 3, kFailed = 4, kShadow = 5, kHeader = 6 };
  size_t steps = 0;  ///< step times
  bool full = false;
  size_t buckets = 0, candidates = 0, window = 0;

  size_t per_bucket() const noexcept { return full ? 2 * candidates + 2 * window + 1 : 0; }
  size_t size() const noexcept { return bucket_at(buckets); }
  size_t guard_at(size_t bucket) const noexcept { return kHeader + steps + bucket * kGuardNumbers; }
  size_t encode_at(size_t bucket, size_t candidate) const noexcept { return bucket_at(bucket) + 2 * (candidate - 1); }
  size_t decode_at(size_t bucket, size_t candidate) const noexcept { return encode_at(bucket, candidate) + 1; }
  size_t dense_at(size_t bucket) const noexcept { return bucket_at(bucket) + 2 * candidates; }
  size_t plan_at(size_t bucket) const noexcept { return dense_at(bucket) + window; }
  size_t ready_at(size_t bucket) const noexcept { return plan_at(bucket) + window; }

 private:
  size_t bucket_at(size_t bucket) const noexcept { return guard_at(buckets) + bucket * per_bucket(); }
};
/// Layout of the report of the agreement that ends the window in `state`.
ReportLayout report_layout(const GateShape& shape, const PlanState& state) noexcept;

/// All reports as one set of numbers, seconds. NaN where a rank had no usable number: the ranks cannot be compared
/// then.
struct Agreed {
  std::vector<double> steps;                          ///< MAX over ranks per step
  std::vector<double> encode, decode;                 ///< MAX over ranks of the medians; bucket-major
  std::vector<double> dense_transfer, plan_transfer;  ///< MIN over ranks per step, then the median
  std::vector<double> ready;                          ///< MAX over ranks of the medians
  std::vector<GuardNumbers> guards;
  double failures = 0, failed = 0, shadow_s = 0;
};

/// `reports`: a whole number of reports of `layout`, in rank order.
Agreed agree(const ReportLayout& layout, std::span<const double> reports);

}  // namespace gradgate::gate
