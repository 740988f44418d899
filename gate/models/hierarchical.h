// All-reduce over two levels: K nodes of G ranks (N = K·G), one link inside a node, another between nodes. Seconds and
// bytes, valid inside gate/models/parameters.h with G a divisor of N. One node costs what happens inside it, one rank
// nothing. Source: both are compositions of gate/models/collectives.h; in use in NCCL and Horovod (hierarchical
// all-reduce) and in ZeRO++ (sharded).
#pragma once

#include "gate/models/collectives.h"

namespace gradgate::gate {

/// One representative per node: tree reduce to it, ring all-reduce of M bytes between the representatives, tree
/// broadcast: 2·log2 G·(α₁ + M/β₁) + 2(K−1)/K·M/β₂ + 2(K−1)·α₂. One link per node carries everything.
inline double hierarchical_representative(Link inside, Link between, double ranks_per_node, double nodes,
                                          double bytes) noexcept {
  return 2 * tree_broadcast(inside.alpha_s, inside.beta_Bps, ranks_per_node, bytes) +
         ring_allreduce(between.alpha_s, between.beta_Bps, nodes, bytes);
}

/// Sharded over the node: ring reduce-scatter inside, ring all-reduce of M/G bytes between nodes, every rank on a link
/// of its own, ring all-gather inside: 2·[(G−1)/G·M/β₁ + (G−1)·α₁] + 2(K−1)/K·(M/G)/β₂ + 2(K−1)·α₂. The gate prices
/// Exchange::hierarchical in this form.
constexpr double hierarchical_sharded(Link inside, Link between, double ranks_per_node, double nodes,
                                      double bytes) noexcept {
  return 2 * ring_pass(inside.alpha_s, inside.beta_Bps, ranks_per_node, bytes) +
         ring_allreduce(between.alpha_s, between.beta_Bps, nodes, bytes / ranks_per_node);
}

}  // namespace gradgate::gate
