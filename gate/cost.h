// Communication cost models: what a collective costs on a link, from start-up latency and bandwidth. Pure functions,
// exact to rounding; times in seconds, sizes in bytes, bandwidths in bytes per second, N ranks (N >= 1; one rank costs
// nothing). The formulas are in gate/models/, one header per topic; this one adds what the gate prices exchanges with.
// docs/cost-models.md lists all of them, and says which of them the gate uses.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "gate/models/collectives.h"
#include "gate/models/compression.h"
#include "gate/models/hierarchical.h"
#include "gate/models/point_to_point.h"
#include "gradgate/types.h"

namespace gradgate::gate {

/// Time of one collective as a straight line in the bytes of its whole vector.
struct LinearCost {
  double fixed_s = std::numeric_limits<double>::quiet_NaN();
  double per_byte_s = std::numeric_limits<double>::quiet_NaN();

  constexpr double operator()(double bytes) const noexcept { return fixed_s + per_byte_s * bytes; }
  bool usable() const noexcept {
    return std::isfinite(fixed_s) && std::isfinite(per_byte_s) && fixed_s >= 0 && per_byte_s >= 0;
  }
};

/// The two levels of a job with several ranks per node, for the hierarchical exchange.
struct NodeModel {
  LinearCost pass;  ///< reduce-scatter or all-gather inside a node, in bytes of the whole vector
  /// Between the nodes' ranks of equal place, in bytes of the shard that they reduce: 1/ranks_per_node of the vector.
  LinearCost all_reduce, all_gather, all_to_all;
  uint32_t ranks_per_node = 0;  ///< 0: not known, hierarchical is not priced

  bool usable() const noexcept {
    return ranks_per_node > 0 && pass.usable() && all_reduce.usable() && all_gather.usable() && all_to_all.usable();
  }
};

/// The three collectives that exchanges are made of, for a given number of ranks; from a nominal link or from a fit.
/// The vector of all_gather and all_to_all is the whole one: N times what one rank sends or receives from each peer.
struct LinkModel {
  LinearCost all_reduce, all_gather, all_to_all;
  uint32_t ranks = 0;
  NodeModel node = {};

  bool usable() const noexcept {
    return ranks > 0 && all_reduce.usable() && all_gather.usable() && all_to_all.usable();
  }
};

/// One pass of a ring of `ranks` as a line: (N−1)·α + (N−1)/N/β per byte.
constexpr LinearCost ring_line(Link link, uint32_t ranks) noexcept {
  const double n = ranks;
  return {(n - 1) * link.alpha_s, (n - 1) / n / link.beta_Bps};
}

/// The model of a link by the ring formulas above. ranks == 1: all zero.
constexpr LinkModel link_model(Link link, uint32_t ranks) noexcept {
  const LinearCost pass = ring_line(link, ranks);
  return {{2 * pass.fixed_s, 2 * pass.per_byte_s}, pass, pass, ranks};
}

/// The model of a job on two levels: hierarchical over both links, the flat exchanges over the one between nodes (or
/// the one inside, when there is one node only). `ranks_per_node` must divide `ranks`.
constexpr LinkModel two_level_model(Link inside, Link between, uint32_t ranks, uint32_t ranks_per_node) noexcept {
  const uint32_t nodes = ranks / ranks_per_node;
  LinkModel model = link_model(nodes > 1 ? between : inside, ranks);
  const LinkModel shard = link_model(between, nodes);
  model.node = {ring_line(inside, ranks_per_node), shard.all_reduce, shard.all_gather, shard.all_to_all,
                ranks_per_node};
  return model;
}

/// Transfer time of one exchange whose payload is `payload_bytes` per rank for the whole vector; for dense, the
/// gradient's bytes over all_reduce. hierarchical: a dense reduce-scatter and all-gather of `dense_bytes` inside the
/// node, and in between the exchange `between` of a shard's payload, payload_bytes / ranks_per_node. NaN where the
/// model is unusable, and for hierarchical where the node's part is or dense_bytes are missing.
inline double exchange_cost(Exchange exchange, const LinkModel& link, double payload_bytes,
                            double dense_bytes = std::numeric_limits<double>::quiet_NaN(),
                            Exchange between = Exchange::two_shot) noexcept {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  if (!link.usable()) return kNone;
  if (link.ranks == 1) return 0;
  switch (exchange) {
    case Exchange::all_reduce:
      return link.all_reduce(payload_bytes);
    case Exchange::two_shot:
      return link.all_to_all(payload_bytes) + link.all_gather(payload_bytes);
    case Exchange::all_gather:
      return link.all_gather(link.ranks * payload_bytes);
    case Exchange::hierarchical: {
      if (!link.node.usable() || between == Exchange::hierarchical) return kNone;
      const NodeModel& node = link.node;
      const LinkModel nodes{node.all_reduce, node.all_gather, node.all_to_all, link.ranks / node.ranks_per_node};
      return 2 * node.pass(dense_bytes) + exchange_cost(between, nodes, payload_bytes / node.ranks_per_node);
    }
  }
  return kNone;
}

}  // namespace gradgate::gate
