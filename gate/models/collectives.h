// Collectives over N ranks that are all equally far apart. α is the start-up time of one message, β the bandwidth of
// one rank in one direction, M the bytes of the whole vector; seconds and bytes, valid inside gate/models/parameters.h.
// One rank costs nothing. All are monotone in M; all but halving_doubling_allreduce_steps() are monotone in N.
//
// The book's formulas take log2 N as a real number. The _steps variants count whole rounds, and where N is no power of
// two they fold the ranks beyond one into the others. The gate uses the ring forms: rings are what NCCL, gloo and MPI
// run for the large messages that are worth compressing.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "gate/models/point_to_point.h"

namespace gradgate::gate {

/// Ring all-reduce: 2(N−1) steps of M/N bytes, 2(N−1)/N·M/β + 2(N−1)·α. Every rank's link carries 2(N−1)/N·M in each
/// direction. Source: Patarasuk and Yuan 2009; Thakur et al. 2005.
constexpr double ring_allreduce(double alpha_s, double beta_Bps, double ranks, double bytes) noexcept {
  return 2 * ((ranks - 1) / ranks) * bytes / beta_Bps + 2 * (ranks - 1) * alpha_s;
}

/// One pass around the ring: all-gather or reduce-scatter, and pairwise all-to-all, whose vector has M bytes in total
/// (M/N per rank or per pair): (N−1)/N·M/β + (N−1)·α. Source: Thakur et al. 2005.
constexpr double ring_pass(double alpha_s, double beta_Bps, double ranks, double bytes) noexcept {
  return (ranks - 1) / ranks * bytes / beta_Bps + (ranks - 1) * alpha_s;
}

/// Tree reduce, then tree broadcast of the whole vector: 2·log2 N·(α + M/β). Source: Thakur et al. 2005.
inline double tree_allreduce(double alpha_s, double beta_Bps, double ranks, double bytes) noexcept {
  return 2 * std::log2(ranks) * (alpha_s + bytes / beta_Bps);
}

/// Recursive halving, then recursive doubling: the ring's bytes in 2·log2 N messages, 2(N−1)/N·M/β + 2·log2 N·α.
/// Source: Rabenseifner 2004; Thakur et al. 2005.
inline double halving_doubling_allreduce(double alpha_s, double beta_Bps, double ranks, double bytes) noexcept {
  return 2 * ((ranks - 1) / ranks) * bytes / beta_Bps + 2 * std::log2(ranks) * alpha_s;
}

/// Tree broadcast of M bytes: log2 N·(α + M/β). Source: Thakur et al. 2005.
inline double tree_broadcast(double alpha_s, double beta_Bps, double ranks, double bytes) noexcept {
  return std::log2(ranks) * (alpha_s + bytes / beta_Bps);
}

/// M×, bytes: the vector above which the ring is faster than the tree, αβ·((N−1) − log2 N)/(log2 N − (N−1)/N). NaN at
/// N ≤ 2, where both take the same time. Follows from the two formulas above.
inline double ring_tree_crossover(double alpha_s, double beta_Bps, double ranks) noexcept {
  if (ranks <= 2) return std::numeric_limits<double>::quiet_NaN();
  const double rounds = std::log2(ranks);
  return alpha_s * beta_Bps * ((ranks - 1 - rounds) / (rounds - (ranks - 1) / ranks));
}

/// ⌈log2 N⌉, the rounds of a tree.
constexpr double ceil_log2(uint32_t ranks) noexcept { return ranks <= 1 ? 0 : std::bit_width(ranks - 1); }

/// Tree all-reduce in whole rounds: 2·⌈log2 N⌉·(α + M/β).
constexpr double tree_allreduce_steps(double alpha_s, double beta_Bps, uint32_t ranks, double bytes) noexcept {
  return 2 * ceil_log2(ranks) * (alpha_s + bytes / beta_Bps);
}

/// Tree broadcast in whole rounds: ⌈log2 N⌉·(α + M/β).
constexpr double tree_broadcast_steps(double alpha_s, double beta_Bps, uint32_t ranks, double bytes) noexcept {
  return ceil_log2(ranks) * (alpha_s + bytes / beta_Bps);
}

/// Recursive halving-doubling among p = 2^⌊log2 N⌋ ranks; the N − p others hand in their vector first and get the
/// result back, 2·(α + M/β) more where N ≠ p: 2(p−1)/p·M/β + 2·log2 p·α + fold. Not monotone in N: the fold makes 3
/// ranks slower than 4. Source: Thakur et al. 2005.
constexpr double halving_doubling_allreduce_steps(double alpha_s, double beta_Bps, uint32_t ranks,
                                                  double bytes) noexcept {
  if (ranks <= 1) return 0;
  const uint32_t folded = std::bit_floor(ranks);
  const double p = folded, fold = folded == ranks ? 0 : 2 * (alpha_s + bytes / beta_Bps);
  return 2 * ((p - 1) / p) * bytes / beta_Bps + 2.0 * (std::bit_width(folded) - 1) * alpha_s + fold;
}

enum class AllReduceAlgorithm : uint8_t { ring, tree, halving_doubling };
constexpr const char* algorithm_name(AllReduceAlgorithm algorithm) noexcept {
  return algorithm == AllReduceAlgorithm::ring   ? "ring"
         : algorithm == AllReduceAlgorithm::tree ? "tree"
                                                 : "halving-doubling";
}

/// Which all-reduce suits (M, N), by the step-exact times; ties go to the ring, then to the tree.
struct AlgorithmAdvice {
  AllReduceAlgorithm best;           ///< of all three
  AllReduceAlgorithm ring_or_tree;   ///< of the two that NCCL has
  double ring_s, tree_s, halving_s;  ///< what they take
};
constexpr AlgorithmAdvice advise(Link link, uint32_t ranks, double bytes) noexcept {
  using A = AllReduceAlgorithm;
  const double ring = ring_allreduce(link.alpha_s, link.beta_Bps, ranks, bytes);
  const double tree = tree_allreduce_steps(link.alpha_s, link.beta_Bps, ranks, bytes);
  const double halving = halving_doubling_allreduce_steps(link.alpha_s, link.beta_Bps, ranks, bytes);
  const A two = tree < ring ? A::tree : A::ring;
  return {halving < std::min(ring, tree) ? A::halving_doubling : two, two, ring, tree, halving};
}

}  // namespace gradgate::gate
