// The exposed objective: buckets become ready while the backward pass still runs, one queue works through them, and
// only what ends after the last gradient costs time. A transfer that is hidden is free, so nothing is lost for it.
#pragma once

#include <span>

#include "gate/predict.h"

namespace gradgate::gate {

/// One bucket in the order of the queue.
struct ExposedBucket {
  double ready_s = 0;  ///< since the first bucket was ready
  double dense_s = 0;
  std::span<const CandidateCost> candidates;  ///< index c − 1
  int incumbent = kNoIncumbent;
};

/// What a step would cost after its last gradient.
struct ExposedStep {
  double dense_s = kMissing, chosen_s = kMissing;
};

/// `decisions` holds the serial decision of every bucket (decide()), which says what may run at all; those that a
/// bucket's place in the queue makes pointless become dense with Why::hidden, and a more faithful candidate is taken
/// where the step ends no later for it. Encoding and decoding run on the queue, not on the compute stream: so it is on
/// a host, where one thread does both. finish_i = max(finish_{i−1}, ready_i) + cost_i (gate/models/overlap.h). The best
/// finish F is that of every bucket at its fastest; dense is taken where the step then ends at F, an incumbent gives
/// way to dense only where that holds with 5 % more dense time; among candidates the most faithful one that ends within
/// 5 % of F's exposed time.
ExposedStep decide_exposed(std::span<const ExposedBucket> buckets, std::span<Decision> decisions);

}  // namespace gradgate::gate
