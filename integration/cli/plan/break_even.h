// The break-even table of `gradgate plan`: for each message and number of ranks what the gate would choose, by the
// gate's own formulas and rule.
#pragma once

#include <string>
#include <vector>

#include "gate/predict.h"
#include "integration/cli/plan/network.h"

namespace gradgate::cli {

/// A codec on the way it would travel.
struct PlanCandidate {
  size_t codec = 0;  ///< index of PlanCodecs::list
  Exchange exchange = Exchange::two_shot;
  Exchange between = Exchange::two_shot;  ///< of hierarchical
  std::string name;                       ///< "int8", "int8 hierarchical"
};

/// What one candidate costs; seconds and bytes. Not offered where payload_bytes is 0.
struct PlanCost {
  double payload_bytes = 0, encode_s = 0, transfer_s = 0, decode_s = 0;
  bool offered() const { return payload_bytes > 0; }
  double codec_s() const { return encode_s + decode_s; }
  double total_s() const { return encode_s + transfer_s + decode_s; }
};

/// The dense exchange: the faster of a flat ring and, on two levels, the sharded one.
struct DenseCost {
  double seconds = 0;
  Exchange exchange = Exchange::all_reduce;
};

struct PlanCell {
  uint32_t ranks = 0;
  double bytes = 0;  ///< of the gradient, whole elements
  DenseCost dense;
  std::vector<PlanCost> costs;  ///< in the order of the candidates
  gate::Decision decision;      ///< chosen and considered are 1-based indices of candidates; 0: dense
  double bf16_s = 0;            ///< NaN for bf16 gradients, which dense sends as they are
  uint32_t most_ranks = 0;      ///< up to which the considered codec pays for this message; 0: nowhere

  double best_s() const { return decision.chosen == 0 ? dense.seconds : decision.total_s(); }
};

/// Where a codec starts or stops to pay as messages grow.
struct Crossover {
  uint32_t ranks = 0;
  size_t candidate = 0;
  double bytes = 0;
  bool pays_above = true;
};

class Planner {
 public:
  Planner(PlanNetwork network, PlanCodecs codecs, DType dtype);

  const PlanNetwork& network() const { return network_; }
  const PlanCodecs& codecs() const { return codecs_; }
  const std::vector<PlanCandidate>& candidates() const { return candidates_; }
  DType dtype() const { return dtype_; }

  /// Bytes that are whole elements, at least one.
  double whole(double bytes) const;
  DenseCost dense(uint32_t ranks, double bytes) const;
  PlanCost cost(const PlanCandidate& candidate, uint32_t ranks, double bytes) const;
  /// Everything but most_ranks.
  PlanCell cell(uint32_t ranks, double bytes) const;
  /// The largest number of ranks (gate::kMostRanks at most) at which the codec pays by any of its exchanges; 0: none.
  uint32_t most_ranks(size_t codec, double bytes) const;
  /// Sign changes of the candidates' advantage over dense for messages in [low, high], by bisection. Of several within
  /// a factor of 4 (shards are padded, and small messages go up and down by it) only the last is given.
  std::vector<Crossover> crossovers(uint32_t ranks, double low, double high) const;

 private:
  bool pays(const PlanCandidate& candidate, uint32_t ranks, double bytes) const;

  PlanNetwork network_;
  PlanCodecs codecs_;
  DType dtype_;
  std::vector<PlanCandidate> candidates_;
};

/// `count` sizes from low to high, evenly on a logarithmic scale, both ends included.
std::vector<double> log_spaced(double low, double high, size_t count);

/// The table for people, and its JSON.
std::string break_even_table(const Planner& planner, const std::vector<PlanCell>& cells);
Json break_even_json(const Planner& planner, const std::vector<PlanCell>& cells,
                     const std::vector<Crossover>& crossovers);
/// "dense", or the candidate's name.
std::string choice_name(const Planner& planner, int choice);
/// Assumptions, one per line: links, codecs, dtype.
std::string plan_assumptions(const Planner& planner);

}  // namespace gradgate::cli
