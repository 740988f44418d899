// The prediction: given what a bucket costs dense and what each candidate would cost, which one to run. A pure function
// of numbers, the same on every machine. Serial objective: encode, transfer and decode add up (docs/gate.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "gate/cost.h"
#include "gradgate/types.h"

namespace gradgate::gate {

/// Candidates whose total time is within this share of the fastest count as equally fast; the most faithful one runs.
inline constexpr double kFaithfulTolerance = 0.05;
/// Hysteresis of the break-even border: dense opens when the codec costs less than (1 − kHysteresis) of T(M) − T(M/r),
/// an open incumbent closes when it costs more than (1 + kHysteresis) of it.
inline constexpr double kHysteresis = 0.05;
/// Hysteresis between candidates: the tolerance above for an incumbent, and for a more faithful one that would replace
/// it.
inline constexpr double kIncumbentTolerance = 0.10, kReplacingTolerance = 0.025;
/// Advantages smaller than this share of T(M) are rounding, not advantages; keeps `<` strict for numbers such as
/// 0.002 + 0.001 against 0.010 − 0.007.
inline constexpr double kRounding = 1e-12;
/// "Not measured yet".
inline constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();
/// decide() without an incumbent: no hysteresis.
inline constexpr int kNoIncumbent = -1;

/// Why a bucket runs what it runs. The values are written into logs and saved states: never renumbered.
enum class Why : uint8_t {
  starting = 0,             ///< start-up: nothing is known yet
  fastest = 1,              ///< open: the fastest candidate that pays
  most_faithful = 2,        ///< open: not the fastest, but within 5 % of it and more faithful
  kept = 3,                 ///< the incumbent stays: the change is within the hysteresis
  break_even = 4,           ///< closed: the codec costs as much as it saves, or more
  payload_not_smaller = 5,  ///< closed: the payload is not smaller than the gradient
  bad_time = 6,             ///< closed: a time is negative, infinite or NaN
  not_measured = 7,         ///< closed: a time is missing
  bad_dense_time = 8,       ///< closed: the dense time is missing, negative or not finite
  no_link_model = 9,        ///< closed: no profile, and the probe gave no usable fit
  no_candidate = 10,        ///< closed: no codec is offered for this bucket
  empty_bucket = 11,        ///< closed: nothing to send
  below_min_bytes = 12,     ///< closed: smaller than the configured minimum
  lost_verification = 13,   ///< closed for good: the measured step was slower
  lost_account = 14,        ///< closed for good: the cumulative saving was falling
  codec_failed = 15,        ///< closed for good: the exchange reported an error
  undecided = 16,           ///< what ran before goes on: the measurement did not decide
  single_rank = 17,         ///< one rank: nothing to send
  mode_off = 18,            ///< dense because the mode is off
  mode_on = 19,             ///< the first candidate because the mode is on
  hidden = 20,              ///< closed: the dense transfer is hidden behind the backward pass
  guard_error = 21,         ///< closed for good: the relative error was over its budget
  guard_residual = 22,      ///< closed for good: the residual grew over its budget
  guard_non_finite = 23,    ///< closed for good: the result was not finite though every gradient was
  guard_replicas = 24,      ///< closed for good: ranks got different results
  unpriced = 25,            ///< a black box: the measured steps decide
  uniform = 26,             ///< open: one candidate for all buckets, compared as a whole
};
inline constexpr int kWhyCount = 27;
/// "fastest", "break_even", …: the name used in the log. "?" outside the enumeration.
const char* why_name(Why why) noexcept;
/// One line for people, without the numbers. Never null.
const char* why_text(Why why) noexcept;

/// What one candidate costs for one bucket; seconds and bytes. kMissing where something was never measured.
struct CandidateCost {
  double encode_s = kMissing;    ///< all encoding of one exchange
  double transfer_s = kMissing;  ///< all collectives of one exchange, waiting for late ranks excluded
  double decode_s = kMissing;    ///< all decoding of one exchange
  double payload_bytes = 0;      ///< one rank's payload for the whole bucket; 0: not offered for this bucket
  int fidelity = 0;              ///< 0 is exact; a larger number loses more
  bool barred = false;           ///< closed for good

  double total_s() const noexcept { return encode_s + transfer_s + decode_s; }
};

/// The outcome, with every number of the inequality. Numbers are those of `considered`; NaN where there are none.
struct Decision {
  int chosen = 0;  ///< 0: dense; c: the caller's candidate c (span index c − 1)
  /// The candidate that the numbers belong to: `chosen`, or the best one turned down, or one closed for good; 0: none.
  int considered = 0;
  double dense_s = kMissing;
  double encode_s = kMissing, transfer_s = kMissing, decode_s = kMissing;
  double payload_bytes = 0;
  Why why = Why::starting;

  double codec_s() const noexcept { return encode_s + decode_s; }               ///< left side of the inequality
  double gain_s() const noexcept { return dense_s - transfer_s; }               ///< right side: T(M) − T(M/r)
  double total_s() const noexcept { return encode_s + transfer_s + decode_s; }  ///< time of the compressed exchange
  /// T_dense / T_compressed − 1 of the exchange alone: an upper bound of the share of extra training steps that the
  /// candidate may cost before time-to-accuracy is lost. NaN without numbers.
  double tolerable_inflation() const noexcept { return dense_s / total_s() - 1; }
  /// Makes the numbers those of candidate c.
  void consider(int c, const CandidateCost& cost) noexcept {
    considered = c;
    encode_s = cost.encode_s, transfer_s = cost.transfer_s, decode_s = cost.decode_s;
    payload_bytes = cost.payload_bytes;
  }
};

/// Chooses for a bucket of `dense_bytes` whose dense exchange takes `dense_s` seconds. candidates[i] is candidate i
/// + 1. A candidate takes part when it is offered, not barred, all its inputs are finite and not negative, and its
/// payload is smaller than dense_bytes; it passes when encode + decode < dense_s − transfer, strictly. Among those that
/// pass, the most faithful one whose total is within kFaithfulTolerance of the fastest is chosen (ties: the bigger
/// payload, then the lower index). `incumbent` (0: dense, c: candidate c) runs now: the borders are then shifted in its
/// favour (the hysteresis above). Never fails: bad input is a closed Decision with the reason.
Decision decide(double dense_s, double dense_bytes, std::span<const CandidateCost> candidates,
                int incumbent = kNoIncumbent) noexcept;

/// The one-line explanation of a decision, e.g.
///   gradgate: step 200 bucket 3 25.0 MiB: T_enc 0.81 + T_dec 0.62 = 1.43 ms < T(M) 42.4 − T_two_shot(M/3.94) 12.1 =
///   30.3 ms → int8 (predicted 3.1x)
/// `names[c]` is the name of candidate c and `exchanges[c]` its exchange; names[0] is "dense". `verified_speedup` > 0
/// is the measured ratio of whole steps and replaces the predicted ratio of the exchange; pass 0 before verification.
Message explain(uint64_t step, size_t bucket, double dense_bytes, const Decision& decision,
                std::span<const char* const> names, std::span<const Exchange> exchanges,
                double verified_speedup) noexcept;

}  // namespace gradgate::gate
