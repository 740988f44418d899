#include "integration/cli/doctor/advise.h"

#include <algorithm>
#include <cmath>

#include "gate/models/overlap.h"
#include "integration/cli/quantity.h"

namespace gradgate::cli {
namespace {

/// A saving below this share of the step is not worth a codec's loss.
constexpr double kWorthwhile = 0.01;

std::string ms(double seconds) { return format_number(1e3 * seconds, 3); }
std::string percent(double share) { return format_number(std::round(1000 * share) / 10, 3) + " %"; }

// A step with every bucket at this cost; a bucket that is not full costs its share.
double step_of(const DoctorNumbers& n, double encode_s, double transfer_s, double decode_s) {
  const double begin = n.step_s * (1 - n.backward_share);
  std::vector<gate::OverlapBucket> buckets;
  for (double done = 0; done < n.gradient_bytes;) {
    const double bytes = std::min(n.bucket_bytes, n.gradient_bytes - done), share = bytes / n.bucket_bytes;
    done += bytes;
    buckets.push_back({gate::even_ready_time(begin, n.step_s, done, n.gradient_bytes), share * encode_s,
                       share * transfer_s, share * decode_s});
  }
  // Encoding on the CPU's or GPU's compute stream delays the backward pass.
  return gate::overlapped_step(n.step_s, buckets, gate::EncodeOn::compute).step_s;
}

std::string inequality(const DoctorNumbers& n, const gate::Decision& d, const CodecWork& work) {
  const bool opens = d.codec_s() < d.gain_s();
  return "bucket of " + format_size(static_cast<uint64_t>(n.bucket_bytes)) + ", " + work.name + ": T_enc " +
         ms(d.encode_s) + " + T_dec " + ms(d.decode_s) + " = " + ms(d.codec_s()) + " ms " + (opens ? "<" : ">=") +
         " T(M) " + ms(d.dense_s) + " - T_" + exchange_name(work.candidate.exchange) + "(M/" +
         format_number(n.bucket_bytes / work.wire_bytes, 3) + ") " + ms(d.transfer_s) + " = " + ms(d.gain_s()) + " ms";
}

std::string leave_off(const DoctorNumbers& n, const Advice& a, const CodecWork* best) {
  const std::string off = "leave it off: ";
  if (n.ranks == 1) return off + "one rank has nothing to send";
  if (best == nullptr) return off + gate::why_text(a.decision.why);
  if (a.decision.chosen == 0)
    return off + best->name + " costs " + ms(a.decision.codec_s()) + " ms a bucket and saves " +
           ms(a.decision.gain_s()) + " ms of transfer";
  if (a.saving_s <= kWorthwhile * a.step_dense_s)
    return off + "communication hides behind the backward pass; " + best->name + " would save " +
           ms(std::fmax(a.saving_s, 0)) + " of " + ms(a.step_dense_s) + " ms a step (up to " + ms(a.serial_saving_s) +
           " ms if nothing overlapped)";
  return off + best->name + " would save " + ms(a.saving_s) + " of " + ms(a.step_dense_s) +
         " ms a step, but what was measured allows " + ms(a.saving_low_s) + " to " + ms(a.saving_high_s) +
         " ms: not certain";
}

std::string turn_on(const Advice& a, const CodecWork& work) {
  return "use " + work.name + " (" + exchange_name(work.candidate.exchange) + ") on " +
         (a.buckets == 1 ? "the one bucket" : "all " + std::to_string(a.buckets) + " buckets") + ": saves " +
         ms(a.saving_s) + " of " + ms(a.step_dense_s) + " ms a step (" + ms(a.saving_low_s) + " to " +
         ms(a.saving_high_s) + " ms; predicted, not verified); pays while convergence needs no more than " +
         percent(a.inflation) + " more steps; " +
         (a.residual_bytes > 0 ? format_size(static_cast<uint64_t>(a.residual_bytes)) + " of residuals on each rank"
                               : "no residuals");
}

}  // namespace

Advice advise(const DoctorNumbers& n) {
  Advice advice;
  advice.buckets = static_cast<size_t>(std::ceil(n.gradient_bytes / n.bucket_bytes));
  std::vector<gate::CandidateCost> costs;
  for (const CodecWork& work : n.codecs) {
    costs.push_back({work.encode_s, work.transfer_s, work.decode_s, work.wire_bytes, work.fidelity, false});
  }
  advice.decision = gate::decide(n.dense_s, n.bucket_bytes, costs);
  advice.step_dense_s = step_of(n, 0, n.dense_s, 0);
  advice.step_chosen_s = advice.step_dense_s;
  const int considered = advice.decision.chosen != 0 ? advice.decision.chosen : advice.decision.considered;
  const CodecWork* work = considered > 0 ? &n.codecs[static_cast<size_t>(considered) - 1] : nullptr;
  if (work != nullptr && work->wire_bytes > 0) {
    // A link that is off makes dense and compressed transfers slower or faster alike.
    const auto saving = [&](double link, double codec) {
      const double codec_s = work->encode_s + work->decode_s, scale = codec_s > 0 ? codec / codec_s : 1;
      return step_of(n, 0, link * n.dense_s, 0) -
             step_of(n, scale * work->encode_s, link * work->transfer_s, scale * work->decode_s);
    };
    const double codec_s = work->encode_s + work->decode_s;
    advice.saving_s = saving(1, codec_s);
    advice.step_chosen_s = advice.step_dense_s - advice.saving_s;
    const double ends[] = {
        saving(1 / (1 + n.link_error), work->codec_low_s), saving(1 / (1 + n.link_error), work->codec_high_s),
        saving(1 + n.link_error, work->codec_low_s), saving(1 + n.link_error, work->codec_high_s), advice.saving_s};
    advice.saving_low_s = *std::min_element(std::begin(ends), std::end(ends));
    advice.saving_high_s = *std::max_element(std::begin(ends), std::end(ends));
    advice.serial_saving_s = n.gradient_bytes / n.bucket_bytes * (n.dense_s - codec_s - work->transfer_s);
    advice.reasons.push_back(inequality(n, advice.decision, *work));
  }
  advice.inflation = advice.step_dense_s / advice.step_chosen_s - 1;
  advice.reasons.push_back("a step without communication " + ms(n.step_s) + " ms, with dense communication " +
                           ms(advice.step_dense_s) +
                           " ms (buckets are sent while the rest of the backward pass runs); " +
                           ms(n.gradient_bytes / n.bucket_bytes * n.dense_s) + " ms of transfer in all");
  const bool worthwhile = advice.saving_s > kWorthwhile * advice.step_dense_s && advice.saving_low_s > 0;
  if (advice.decision.chosen != 0 && worthwhile) {
    advice.chosen = advice.decision.chosen;
    if (work->candidate.codec.feedback) advice.residual_bytes = sizeof(float) * n.parameters;
    advice.verdict = turn_on(advice, *work);
  } else {
    advice.verdict = leave_off(n, advice, work);
  }
  return advice;
}

}  // namespace gradgate::cli
