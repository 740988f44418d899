// Communication cost models: what a collective costs on a link, from start-up latency and bandwidth. Pure functions,
// exact to rounding; times in seconds, sizes in bytes, bandwidths in bytes per second, N ranks (N >= 1; one rank costs
// nothing). Every formula is for valid input: alpha >= 0, beta > 0, bytes >= 0, all finite. The gate uses the ring
// forms: they are what NCCL, gloo and MPI run for the large messages that are worth compressing.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "gradgate/types.h"

namespace gradgate::gate {

/// A link as seen by one rank: start-up time of a message, and bandwidth in one direction.
struct Link {
  double alpha_s = 0;
  double beta_Bps = 0;
};

/// One message of `bytes` between two ranks: α + n/β. Source: the α-β (Hockney) model.
constexpr double p2p(double alpha_s, double beta_Bps, double bytes) noexcept { return alpha_s + bytes / beta_Bps; }

/// Ring all-reduce of an M-byte vector: 2(N−1) steps of M/N bytes, 2(N−1)/N·M/β + 2(N−1)α. Every rank's link carries
/// 2(N−1)/N·M in each direction. Source: Patarasuk and Yuan 2009; Thakur et al. 2005.
constexpr double ring_allreduce(double alpha_s, double beta_Bps, double ranks, double bytes) noexcept {
  return 2 * ((ranks - 1) / ranks) * bytes / beta_Bps + 2 * (ranks - 1) * alpha_s;
}

/// One pass around the ring: all-gather or reduce-scatter, and pairwise all-to-all, whose vector has M bytes in total
/// (M/N per rank or per pair): (N−1)/N·M/β + (N−1)α. Source: Thakur et al. 2005.
constexpr double ring_pass(double alpha_s, double beta_Bps, double ranks, double bytes) noexcept {
  return (ranks - 1) / ranks * bytes / beta_Bps + (ranks - 1) * alpha_s;
}

/// Every rank receives the P-byte payload of every other rank: an all-gather of N·P bytes, (N−1)(α + P/β). Grows with
/// N: the price of a payload that cannot be summed on the way.
constexpr double gather_exchange(double alpha_s, double beta_Bps, double ranks, double payload_bytes) noexcept {
  return (ranks - 1) * (alpha_s + payload_bytes / beta_Bps);
}

/// All-to-all of encoded shards, then all-gather of re-encoded shards; P is one rank's payload for the whole vector.
constexpr double two_shot_exchange(double alpha_s, double beta_Bps, double ranks, double payload_bytes) noexcept {
  return 2 * ring_pass(alpha_s, beta_Bps, ranks, payload_bytes);
}

/// What encoding and decoding together may cost before a compressed exchange stops paying: T(M) − T(M/r). May be
/// negative.
constexpr double codec_budget(double dense_s, double compressed_transfer_s) noexcept {
  return dense_s - compressed_transfer_s;
}

/// Time of one collective as a straight line in the bytes of its whole vector.
struct LinearCost {
  double fixed_s = std::numeric_limits<double>::quiet_NaN();
  double per_byte_s = std::numeric_limits<double>::quiet_NaN();

  constexpr double operator()(double bytes) const noexcept { return fixed_s + per_byte_s * bytes; }
  bool usable() const noexcept {
    return std::isfinite(fixed_s) && std::isfinite(per_byte_s) && fixed_s >= 0 && per_byte_s >= 0;
  }
};

/// The three collectives that exchanges are made of, for a given number of ranks; from a nominal link or from a fit.
/// The vector of all_gather and all_to_all is the whole one: N times what one rank sends or receives from each peer.
struct LinkModel {
  LinearCost all_reduce, all_gather, all_to_all;
  uint32_t ranks = 0;

  bool usable() const noexcept {
    return ranks > 0 && all_reduce.usable() && all_gather.usable() && all_to_all.usable();
  }
};

/// The model of a link by the ring formulas above. ranks == 1: all zero.
constexpr LinkModel link_model(Link link, uint32_t ranks) noexcept {
  const double n = ranks;
  const LinearCost pass{(n - 1) * link.alpha_s, (n - 1) / n / link.beta_Bps};
  return {{2 * pass.fixed_s, 2 * pass.per_byte_s}, pass, pass, ranks};
}

/// Transfer time of one exchange whose payload is `payload_bytes` per rank for the whole vector; for dense, the
/// gradient's bytes over all_reduce. NaN where the exchange is not priced (hierarchical needs two links) or the model
/// is unusable.
inline double exchange_cost(Exchange exchange, const LinkModel& link, double payload_bytes) noexcept {
  if (!link.usable()) return std::numeric_limits<double>::quiet_NaN();
  if (link.ranks == 1) return 0;
  switch (exchange) {
    case Exchange::all_reduce:
      return link.all_reduce(payload_bytes);
    case Exchange::two_shot:
      return link.all_to_all(payload_bytes) + link.all_gather(payload_bytes);
    case Exchange::all_gather:
      return link.all_gather(link.ranks * payload_bytes);
    case Exchange::hierarchical:
      break;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace gradgate::gate
