// `gradgate plan --params`: a data-parallel step with buckets of several sizes, reduced while the backward pass runs.
#pragma once

#include <string>
#include <vector>

#include "gate/models/overlap.h"
#include "integration/cli/plan/break_even.h"

namespace gradgate::cli {

/// PyTorch DDP's first bucket is this small, so that communication can begin early.
inline constexpr double kFirstBucket = 1 << 20;
/// A plan is taken only where it shortens the step by this share, as the gate verifies gains.
inline constexpr double kStepGain = 0.005;

struct OverlapInput {
  uint64_t parameters = 0;
  double step_s = 0;                ///< forward and backward pass, without communication
  double backward_share = 2.0 / 3;  ///< of step_s: the rest comes before
  gate::EncodeOn encode = gate::EncodeOn::wire;
  uint32_t ranks = 1;
};

/// One way to send the buckets: the last `tail` of them by a candidate, the others dense.
struct OverlapChoice {
  int candidate = 0;  ///< 1-based; 0: dense
  size_t tail = 0;
  gate::OverlapStep step;
};

struct OverlapRow {
  double bucket_bytes = 0;
  size_t buckets = 0;
  OverlapChoice dense;
  std::vector<OverlapChoice> all;  ///< per candidate, every bucket by it; tail 0 where it is not offered
  OverlapChoice best;              ///< what a gate that sees the overlap would run
};

/// The row of one bucket size. Throws UsageError where that makes more than a million buckets.
OverlapRow overlap_row(const Planner& planner, const OverlapInput& input, double bucket_bytes);

std::string overlap_table(const Planner& planner, const OverlapInput& input, const std::vector<OverlapRow>& rows);
Json overlap_json(const Planner& planner, const OverlapInput& input, const std::vector<OverlapRow>& rows);

}  // namespace gradgate::cli
