// Robust running estimates: medians of a short window, with the first calls discarded and unusable samples counted, not
// used.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace gradgate::gate {

/// A usable duration: finite and positive. Zero is a clock that did not tick.
inline bool usable_seconds(double seconds) noexcept { return std::isfinite(seconds) && seconds > 0; }

/// Median of the values that are not NaN, reordering them; the mean of the middle two when their number is even. NaN
/// when there is none.
inline double median_in_place(std::span<double> values) noexcept {
  const auto end = std::remove_if(values.begin(), values.end(), [](double v) { return std::isnan(v); });
  const size_t n = static_cast<size_t>(end - values.begin());
  if (n == 0) return std::numeric_limits<double>::quiet_NaN();
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(n / 2);
  std::nth_element(values.begin(), middle, end);
  return n % 2 == 1 ? *middle : *std::max_element(values.begin(), middle) / 2 + *middle / 2;
}

/// Median of the last `window` samples after the first `discard`. Fixed size, trivially copyable.
class RunningMedian {
 public:
  static constexpr uint32_t kCapacity = 16;

  RunningMedian() noexcept = default;
  /// 1 <= window <= kCapacity (clamped).
  RunningMedian(uint32_t window, uint32_t discard) noexcept
      : window_(std::clamp<uint32_t>(window, 1, kCapacity)), discard_(discard) {}

  /// Returns false and counts a rejection when the call failed or the duration is zero, negative or not finite.
  bool add(double seconds, bool ok = true) noexcept {
    if (!ok || !usable_seconds(seconds)) {
      ++rejected_;
      return false;
    }
    if (discarded_ < discard_) {
      ++discarded_;
      return true;
    }
    samples_[count_ % window_] = seconds;
    ++count_;
    return true;
  }
  /// NaN before the first counted sample.
  double median() const noexcept {
    double copy[kCapacity];
    const size_t n = size();
    std::copy_n(samples_, n, copy);
    return median_in_place({copy, n});
  }
  /// Forgets the samples, keeps the counters of rejections, and discards first calls again.
  void restart() noexcept { count_ = 0, discarded_ = 0; }

  size_t size() const noexcept { return count_ < window_ ? static_cast<size_t>(count_) : window_; }
  uint64_t rejected() const noexcept { return rejected_; }
  uint32_t discarded() const noexcept { return discarded_; }

 private:
  double samples_[kCapacity] = {};
  uint64_t count_ = 0, rejected_ = 0;
  uint32_t window_ = 8, discard_ = 0, discarded_ = 0, padding_ = 0;
};

/// The last `window` values of a series that every rank extends at the same steps, so that entries can be compared
/// between ranks one by one. NaN marks a value that is missing on this rank.
class AlignedWindow {
 public:
  void push(double value, uint32_t window) noexcept { values_[count_++ % window] = value; }
  /// Writes `window` values, oldest first, NaN where there are fewer.
  void copy(std::span<double> out) const noexcept {
    const uint64_t window = out.size(), have = count_ < window ? count_ : window;
    for (uint64_t i = 0; i < window; ++i) {
      out[i] = i < have ? values_[(count_ - have + i) % window] : std::numeric_limits<double>::quiet_NaN();
    }
  }

 private:
  double values_[RunningMedian::kCapacity] = {};
  uint64_t count_ = 0;
};

}  // namespace gradgate::gate
