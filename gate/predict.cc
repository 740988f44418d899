#include "gate/predict.h"

#include <cmath>

#include "gate/log.h"

namespace gradgate::gate {
namespace {

struct WhyText {
  const char* name;
  const char* text;
};
constexpr WhyText kWhys[kWhyCount] = {
    {"starting", "start-up: nothing is known yet"},
    {"fastest", "the fastest that pays"},
    {"most_faithful", "within 5 % of the fastest, and more faithful"},
    {"kept", "kept: the change is within the hysteresis"},
    {"break_even", "the codec costs as much as it saves, or more"},
    {"payload_not_smaller", "the payload is not smaller than the gradient"},
    {"bad_time", "a time is negative or not finite"},
    {"not_measured", "a time has not been measured"},
    {"bad_dense_time", "the dense time is missing, negative or not finite"},
    {"no_link_model", "no usable model of the link"},
    {"no_candidate", "no codec is offered for this bucket"},
    {"empty_bucket", "nothing to send"},
    {"below_min_bytes", "smaller than the configured minimum"},
    {"lost_verification", "closed for good: the measured step was slower"},
    {"lost_account", "closed for good: it kept costing more than it saved"},
    {"codec_failed", "closed for good: the exchange reported an error"},
    {"undecided", "the measurement did not decide: what ran before goes on"},
    {"single_rank", "one rank: nothing to send"},
    {"mode_off", "the mode is off"},
    {"mode_on", "the mode is on"},
    {"hidden", "the dense transfer is hidden behind the backward pass"},
    {"guard_error", "closed for good: its error was over the budget"},
    {"guard_residual", "closed for good: its residual grew over the budget"},
    {"guard_non_finite", "closed for good: its result was not finite though every gradient was"},
    {"guard_replicas", "closed for good: ranks got different results"},
    {"unpriced", "a black box: the measured steps decide"},
    {"uniform", "one codec for all buckets, compared as a whole"},
};

bool sane(double seconds) noexcept { return std::isfinite(seconds) && seconds >= 0; }

struct Border {
  double cost_factor, tolerance;
};

// How far the borders move for candidate c: outwards for the incumbent, inwards for whoever would replace it.
Border border(int c, int incumbent) noexcept {
  if (incumbent == kNoIncumbent) return {1, kFaithfulTolerance};
  if (incumbent == 0) return {1 / (1 - kHysteresis), kFaithfulTolerance};
  if (c == incumbent) return {1 / (1 + kHysteresis), kIncumbentTolerance};
  return {1, kReplacingTolerance};
}

// The reason why a candidate cannot take part, or Why::fastest when it can.
Why admission(const CandidateCost& c, double dense_bytes) noexcept {
  if (c.payload_bytes == 0) return Why::no_candidate;
  if (c.barred) return Why::lost_verification;
  if (!(c.payload_bytes > 0 && c.payload_bytes < dense_bytes)) return Why::payload_not_smaller;
  if (std::isnan(c.encode_s) || std::isnan(c.transfer_s) || std::isnan(c.decode_s)) return Why::not_measured;
  if (!sane(c.encode_s) || !sane(c.transfer_s) || !sane(c.decode_s)) return Why::bad_time;
  return Why::fastest;
}

bool passes(const CandidateCost& c, double dense_s, Border limits) noexcept {
  const double cost = c.encode_s + c.decode_s, gain = codec_budget(dense_s, c.transfer_s);
  return gain - cost * limits.cost_factor > kRounding * dense_s;
}

}  // namespace

const char* why_name(Why why) noexcept {
  const auto i = static_cast<size_t>(why);
  return i < kWhyCount ? kWhys[i].name : "?";
}

const char* why_text(Why why) noexcept {
  const auto i = static_cast<size_t>(why);
  return i < kWhyCount ? kWhys[i].text : "?";
}

Decision decide(double dense_s, double dense_bytes, std::span<const CandidateCost> candidates, int incumbent) noexcept {
  Decision d;
  d.dense_s = dense_s;
  d.why = Why::no_candidate;
  if (!(dense_bytes > 0) || !std::isfinite(dense_bytes)) return d.why = Why::empty_bucket, d;
  if (!sane(dense_s)) return d.why = Why::bad_dense_time, d;

  int best = 0, fastest = 0, barred = 0;  // best: fastest of all that have numbers; fastest: of those that pass
  for (size_t i = 0; i < candidates.size(); ++i) {
    const int c = static_cast<int>(i) + 1;
    const Why reason = admission(candidates[i], dense_bytes);
    if (reason != Why::fastest) {
      if (d.why == Why::no_candidate) d.why = reason;
      if (reason == Why::lost_verification && barred == 0) barred = c;
      continue;
    }
    if (best == 0 || candidates[i].total_s() < candidates[best - 1].total_s()) best = c;
    if (!passes(candidates[i], dense_s, border(c, incumbent))) continue;
    if (fastest == 0 || candidates[i].total_s() < candidates[fastest - 1].total_s()) fastest = c;
  }
  if (fastest == 0) {
    if (best == 0) {
      if (barred != 0) d.consider(barred, candidates[barred - 1]);
      return d;
    }
    d.consider(best, candidates[best - 1]);
    // Without hysteresis it would have been opened: say that, not that it does not pay.
    d.why = incumbent == 0 && passes(candidates[best - 1], dense_s, border(best, kNoIncumbent)) ? Why::kept
                                                                                                : Why::break_even;
    return d;
  }

  int chosen = 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const int c = static_cast<int>(i) + 1;
    const CandidateCost& cost = candidates[i];
    const Border limits = border(c, incumbent);
    if (admission(cost, dense_bytes) != Why::fastest || !passes(cost, dense_s, limits)) continue;
    if (cost.total_s() > candidates[fastest - 1].total_s() * (1 + limits.tolerance)) continue;
    const CandidateCost* held = chosen == 0 ? nullptr : &candidates[chosen - 1];
    if (held == nullptr || cost.fidelity < held->fidelity ||
        (cost.fidelity == held->fidelity && cost.payload_bytes > held->payload_bytes)) {
      chosen = c;
    }
  }
  d.chosen = chosen;
  d.consider(chosen, candidates[chosen - 1]);
  d.why = chosen == fastest ? Why::fastest : Why::most_faithful;
  if (chosen == incumbent && decide(dense_s, dense_bytes, candidates, kNoIncumbent).chosen != incumbent)
    d.why = Why::kept;
  return d;
}

Message explain(uint64_t step, size_t bucket, double dense_bytes, const Decision& d, std::span<const char* const> names,
                std::span<const Exchange> exchanges, double verified_speedup) noexcept {
  static constexpr const char* kTransfer[] = {"T_all_reduce", "T_two_shot", "T_all_gather", "T_hierarchical"};
  const auto name = [&](int c) { return c >= 0 && static_cast<size_t>(c) < names.size() ? names[c] : "?"; };
  Message message;
  TextBuilder out(message.text, sizeof(message.text));
  out.text("gradgate: step ")
      .integer(static_cast<int64_t>(step))
      .text(" bucket ")
      .integer(static_cast<int64_t>(bucket));
  out.text(" ").bytes(dense_bytes).text(": ");
  const size_t c = static_cast<size_t>(d.considered);
  if (d.considered > 0 && c < exchanges.size() && static_cast<size_t>(exchanges[c]) < 4 && !std::isnan(d.encode_s)) {
    const bool pays = d.gain_s() - d.codec_s() > kRounding * d.dense_s;
    out.text("T_enc ").milliseconds(d.encode_s).text(" + T_dec ").milliseconds(d.decode_s).text(" = ");
    out.milliseconds(d.codec_s()).text(pays ? " ms < T(M) " : " ms ≥ T(M) ").milliseconds(d.dense_s).text(" − ");
    out.text(kTransfer[static_cast<size_t>(exchanges[c])])
        .text("(M/")
        .fixed(dense_bytes / d.payload_bytes, 2)
        .text(") ");
    out.milliseconds(d.transfer_s).text(" = ").milliseconds(d.gain_s()).text(" ms ");
  }
  out.text("→ ").text(name(d.chosen));
  if (d.chosen == 0) {
    out.text(" (");
    if (d.considered > 0) out.text(name(d.considered)).text(": ");
    out.text(why_text(d.why)).text(")");
  } else {
    // What was compared with the one that runs, and lost or was not decided, has the numbers above.
    const bool other = d.considered > 0 && d.considered != d.chosen;
    out.text(" (");
    if (other) out.text(name(d.considered)).text(": ").text(why_text(d.why));
    if (verified_speedup > 0) {
      out.text(other ? "; verified " : "verified ").fixed(verified_speedup, verified_speedup < 9.95 ? 1 : 0).text("x");
    } else if (!other && d.why == Why::unpriced) {
      out.text(why_text(d.why));
    } else if (!other) {
      const double ratio = d.dense_s / d.total_s();
      out.text("predicted ").fixed(ratio, ratio < 9.95 ? 1 : 0).text("x");
    }
    out.text(")");
  }
  return message;
}

}  // namespace gradgate::gate
