// What compression may cost and when it pays. M dense bytes, P one rank's payload for the whole vector, r = M/P;
// seconds and bytes, valid inside gate/models/parameters.h. A payload pays by the collective that carries it, so there
// is one budget per exchange. Where both sides of a difference are rings, the latencies cancel; they are left out
// rather than subtracted, which keeps small budgets exact.
#pragma once

#include <cstdint>
#include <limits>

#include "gate/models/collectives.h"
#include "gradgate/types.h"

namespace gradgate::gate {

/// Every rank receives the P-byte payload of every other rank: an all-gather of N·P bytes, (N−1)·(α + P/β). Grows with
/// N: the price of a payload that cannot be summed on the way.
constexpr double gather_exchange(double alpha_s, double beta_Bps, double ranks, double payload_bytes) noexcept {
  return (ranks - 1) * (alpha_s + payload_bytes / beta_Bps);
}

/// All-to-all of encoded shards, then all-gather of re-encoded shards: 2·[(N−1)/N·P/β + (N−1)·α].
constexpr double two_shot_exchange(double alpha_s, double beta_Bps, double ranks, double payload_bytes) noexcept {
  return 2 * ring_pass(alpha_s, beta_Bps, ranks, payload_bytes);
}

/// How often the codec passes over the whole vector in one exchange of N ranks. Encoding is always one pass, but none
/// where the backend sums. Decoding: two_shot sums N−1 shards at their owner and decodes the result, (2N−1)/N;
/// all_gather decodes every rank's payload, N.
constexpr double decode_passes(Exchange exchange, double ranks) noexcept {
  return exchange == Exchange::all_gather ? ranks : exchange == Exchange::two_shot ? (2 * ranks - 1) / ranks : 1;
}

/// T_enc + T(M/r) + T_dec.
constexpr double compressed_total(double encode_s, double transfer_s, double decode_s) noexcept {
  return encode_s + transfer_s + decode_s;
}

/// What encoding and decoding together may cost before a compressed exchange stops paying, T(M) − T(M/r): the
/// break-even codec time. May be negative.
constexpr double codec_budget(double dense_s, double compressed_transfer_s) noexcept {
  return dense_s - compressed_transfer_s;
}

/// The budget where the payload travels like a ring all-reduce (all_reduce, two_shot): 2(N−1)/N·(M − P)/β.
constexpr double codec_budget_ring(double beta_Bps, double ranks, double bytes, double payload_bytes) noexcept {
  return 2 * ((ranks - 1) / ranks) * (bytes - payload_bytes) / beta_Bps;
}

/// The budget where every rank gathers every payload: (N−1)·(α + (2M/N − P)/β). Negative where P > 2M/N + αβ.
constexpr double codec_budget_gather(double alpha_s, double beta_Bps, double ranks, double bytes,
                                     double payload_bytes) noexcept {
  return (ranks - 1) * (alpha_s + (2 * bytes / ranks - payload_bytes) / beta_Bps);
}

/// β, bytes per second, below which a codec of `codec_s` pays on a ring: 2(N−1)/N·M·(1−1/r)/T_codec. +Inf at T_codec =
/// 0 where there is something to save, NaN where there is nothing to say (T_codec = 0 and nothing saved).
constexpr double breakeven_bandwidth_ring(double ranks, double bytes, double ratio, double codec_s) noexcept {
  const double saved = 2 * ((ranks - 1) / ranks) * bytes * ((ratio - 1) / ratio);
  if (codec_s > 0) return saved / codec_s;
  return saved > 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
}

/// r above which a codec of `codec_s` pays on a ring: 1/(1 − T_codec/T), T = 2(N−1)/N·M/β. NaN where no ratio is enough
/// (T_codec ≥ T).
constexpr double breakeven_ratio_ring(double beta_Bps, double ranks, double bytes, double codec_s) noexcept {
  const double full = 2 * ((ranks - 1) / ranks) * bytes / beta_Bps;
  return codec_s >= full ? std::numeric_limits<double>::quiet_NaN() : full / (full - codec_s);
}

/// M, bytes, above which a codec of fixed time `fixed_s` and throughput `rate_Bps` (encode and decode together) pays on
/// a ring: fixed / (2(N−1)/N·(1−1/r)/β − 1/rate). NaN where it never does.
constexpr double breakeven_bytes_ring(double beta_Bps, double ranks, double ratio, double fixed_s,
                                      double rate_Bps) noexcept {
  const double per_byte = 2 * ((ranks - 1) / ranks) * ((ratio - 1) / ratio) / beta_Bps - 1 / rate_Bps;
  return per_byte <= 0 ? std::numeric_limits<double>::quiet_NaN() : fixed_s / per_byte;
}

/// The largest number of ranks that is looked at.
inline constexpr uint32_t kMostRanks = 4096;

/// The largest N in 2 … kMostRanks for which `pays(N)`; 1 where there is none. A search: with a payload whose cost
/// grows with N and a codec whose cost does too, the answer has no closed form.
template <typename Pays>
constexpr uint32_t breakeven_ranks(Pays pays) {
  for (uint32_t ranks = kMostRanks; ranks > 1; --ranks) {
    if (pays(ranks)) return ranks;
  }
  return 1;
}

/// The largest N at which a payload of P bytes, all-gathered, pays with a codec of `codec_s`; 1 where it never does.
constexpr uint32_t breakeven_ranks_gather(double alpha_s, double beta_Bps, double bytes, double payload_bytes,
                                          double codec_s) noexcept {
  return breakeven_ranks(
      [=](uint32_t ranks) { return codec_budget_gather(alpha_s, beta_Bps, ranks, bytes, payload_bytes) > codec_s; });
}

}  // namespace gradgate::gate
