// What every bucket costs dense and with every candidate, from the numbers that all ranks agreed on, and what follows
// from it: a decision for every bucket.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gate/plan/exposed.h"
#include "gate/plan/report.h"
#include "gate/plan/state.h"

namespace gradgate::gate {

/// What the buckets' decisions minimise.
enum class Objective : uint8_t {
  exposed,  ///< what ends after the last gradient, if every bucket's time of being ready is known; else the sum
  sum       ///< all exchanges, nothing hidden
};

/// Whether what runs is favoured by the hysteresis.
enum class Hysteresis : uint8_t { none, for_running };

struct Prediction {
  std::vector<Decision> decisions;  ///< per bucket
  bool exposed = false;             ///< of exposed time; then `step` has its numbers
  ExposedStep step;
};

/// One candidate for all buckets: what a user would choose by hand.
struct UniformPlan {
  int candidate = 0;
  std::vector<size_t> buckets;  ///< those in which it costs less than dense; the others keep what they run
  double sum_s = 0;             ///< of all buckets' exchanges, all transfers modelled
  double seen_sum_s = 0;        ///< the same with transfers as they were seen, where this is what runs
};

/// Prices the buckets of `state`: what runs there and what is closed for good. All references must outlive it.
class Pricing {
 public:
  Pricing(const GateShape& shape, const LinkModel& link, const Agreed& agreed, const PlanState& state)
      : shape_(shape), link_(link), agreed_(agreed), state_(state) {}

  Prediction predict(Objective objective, Hysteresis hysteresis) const;
  /// Those that pay anywhere, the smallest modelled sum first: beside a running job a transfer takes longer than its
  /// model, so by what was seen the candidate that runs would look slower than those that do not.
  std::vector<UniformPlan> uniform_plans() const;
  /// The sum of what runs, with its transfers as they were seen.
  double running_sum_s() const;
  /// Staying with the candidate that a bucket runs, with the numbers that were seen of it.
  Decision running_decision(size_t bucket, Why why) const;
  /// The decision for a bucket of a uniform plan, with its numbers.
  Decision uniform_decision(size_t bucket, int candidate) const;
  /// Seconds of shadow calls in a measuring phase that leaves out what runs.
  double measure_cost() const;

 private:
  using Costs = std::array<CandidateCost, kMaxCandidates>;  ///< index c − 1

  enum class Transfers : uint8_t { modelled, seen_where_run };

  Decision decision_for(size_t bucket, int candidate, Transfers transfers, Why why) const;
  double dense_s(size_t bucket) const;
  CandidateCost cost(size_t bucket, int candidate, Transfers transfers) const;
  double exchange_s(size_t bucket, int candidate, Transfers transfers) const;
  Decision decide_bucket(size_t bucket, int incumbent, const Costs& costs) const;

  const GateShape& shape_;
  const LinkModel& link_;
  const Agreed& agreed_;
  const PlanState& state_;
};

}  // namespace gradgate::gate
