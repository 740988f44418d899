// One message, or a train of them, between two ranks. Seconds and bytes; valid inside gate/models/parameters.h.
#pragma once

#include <algorithm>

namespace gradgate::gate {

/// A link as seen by one rank: start-up time of a message, and bandwidth in one direction.
struct Link {
  double alpha_s = 0;
  double beta_Bps = 0;
};

/// One message of `bytes`: α + n/β. Source: the α-β model of Hockney 1994.
constexpr double p2p(double alpha_s, double beta_Bps, double bytes) noexcept { return alpha_s + bytes / beta_Bps; }

/// n* = α·β, bytes: the message whose latency and transfer take equally long. Shorter ones are bound by latency, and
/// making them smaller saves next to nothing; half of the bandwidth is reached at n*. Source: Hockney's n½.
constexpr double crossover_bytes(double alpha_s, double beta_Bps) noexcept { return alpha_s * beta_Bps; }

/// LogGP's parameters of a link, seconds; gap_per_byte_s is G = 1/bandwidth.
struct LogGP {
  double send_overhead_s = 0;  ///< o_s: the sender's processor per message
  double latency_s = 0;        ///< L
  double gap_s = 0;            ///< g: least time between the starts of two messages' first bytes
  double gap_per_byte_s = 0;   ///< G
  double recv_overhead_s = 0;  ///< o_r: the receiver's processor per message
};

/// One message of n ≥ 1 bytes, o_s + L + (n−1)·G + o_r. Source: Alexandrov, Ionescu, Schauser, Scheiman 1995.
constexpr double loggp_long(const LogGP& p, double bytes) noexcept {
  return p.send_overhead_s + p.latency_s + (bytes - 1) * p.gap_per_byte_s + p.recv_overhead_s;
}

/// m ≥ 1 messages of n ≥ 1 bytes back to back, until the last has arrived: each keeps the sender busy for (n−1)·G and
/// the next one follows after the gap, or the overhead where that is longer:
///   o_s + (n−1)·G + (m−1)·(max(g, o_s) + (n−1)·G) + L + o_r.
/// Source: as above.
constexpr double loggp_train(const LogGP& p, double bytes, double messages) noexcept {
  const double body = (bytes - 1) * p.gap_per_byte_s;
  return p.send_overhead_s + body + (messages - 1) * (std::max(p.gap_s, p.send_overhead_s) + body) + p.latency_s +
         p.recv_overhead_s;
}

}  // namespace gradgate::gate
