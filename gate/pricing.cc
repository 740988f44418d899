#include "gate/pricing.h"

#include <algorithm>
#include <cmath>

namespace gradgate::gate {
namespace {

/// The model is scaled by measured over modelled dense time, within this factor either way: a probe on an idle link and
/// a collective in a busy step differ, and both sides of the inequality should be priced under the same load.
constexpr double kMaxLoadFactor = 2;

}  // namespace

Prediction Pricing::predict(Objective objective, Hysteresis hysteresis) const {
  const size_t n = state_.buckets.size();
  Prediction out;
  std::vector<Costs> prices(n);
  std::vector<ExposedBucket> queue(n);
  out.exposed = objective == Objective::exposed && n > 0;
  for (size_t i = 0; i < n; ++i) {
    const int incumbent = hysteresis == Hysteresis::for_running ? state_.buckets[i].running : kNoIncumbent;
    prices[i] = costs(i);
    out.decisions.push_back(decide_bucket(i, incumbent, prices[i]));
    const bool empty = !(shape_.buckets[i].dense_bytes > 0);
    queue[i] = {agreed_.ready[i],
                empty ? 0 : out.decisions[i].dense_s,
                {prices[i].data(), shape_.candidate_count()},
                incumbent};
    out.exposed = out.exposed && agreed_.ready[i] >= 0 && queue[i].dense_s >= 0;
  }
  if (out.exposed) out.step = decide_exposed(queue, out.decisions);
  return out;
}

double Pricing::measure_cost() const {
  double cost = 0;
  const size_t n = shape_.candidate_count();
  for (size_t b = 0; b < state_.buckets.size(); ++b) {
    for (size_t c = 1; c <= n; ++c) {
      if (!selectable(shape_, state_, b, static_cast<int>(c)) || c == state_.buckets[b].running) continue;
      const double once = agreed_.encode[b * n + c - 1] + agreed_.decode[b * n + c - 1];
      if (!std::isnan(once)) cost += once * shape_.shadow_calls();
    }
  }
  return cost;
}

double Pricing::dense_s(size_t bucket) const {
  const double measured = agreed_.dense_transfer[bucket];
  return std::isnan(measured) ? exchange_cost(Exchange::all_reduce, link_, shape_.buckets[bucket].dense_bytes)
                              : measured;
}

Pricing::Costs Pricing::costs(size_t bucket) const {
  const BucketInfo& info = shape_.buckets[bucket];
  const BucketState& b = state_.buckets[bucket];
  const size_t n = shape_.candidate_count();
  double load = agreed_.dense_transfer[bucket] / exchange_cost(Exchange::all_reduce, link_, info.dense_bytes);
  load = std::isnan(load) ? 1 : std::clamp(load, 1 / kMaxLoadFactor, kMaxLoadFactor);
  Costs costs;
  for (size_t i = 0; i < n; ++i) {
    const int c = static_cast<int>(i) + 1;
    const CandidateInfo& candidate = shape_.candidates[i];
    CandidateCost& cost = costs[i];
    cost.payload_bytes = shape_.offered(bucket, c) ? info.payload_bytes[i] : 0;
    cost.fidelity = candidate.fidelity;
    cost.barred = !selectable(shape_, state_, bucket, c);
    cost.encode_s = agreed_.encode[bucket * n + i];
    cost.decode_s = agreed_.decode[bucket * n + i];
    // What was seen on the wire beats the model.
    const bool seen = c == b.running && !std::isnan(b.running_transfer_s);
    cost.transfer_s = seen ? b.running_transfer_s
                           : load * exchange_cost(candidate.exchange, link_, info.payload_bytes[i], info.dense_bytes,
                                                  candidate.between);
  }
  return costs;
}

Decision Pricing::decide_bucket(size_t bucket, int incumbent, const Costs& costs) const {
  const BucketInfo& info = shape_.buckets[bucket];
  const size_t n = shape_.candidate_count();
  bool any_offered = false, any_left = false;
  for (size_t i = 0; i < n; ++i) {
    const int c = static_cast<int>(i) + 1;
    if (shape_.candidates[i].unpriced && !costs[i].barred) {
      Decision d;
      d.chosen = d.considered = c;
      d.dense_s = agreed_.dense_transfer[bucket];
      d.why = Why::unpriced;
      return d;
    }
    any_offered = any_offered || shape_.offered(bucket, c);
    any_left = any_left || !costs[i].barred;
  }
  Decision d = decide(dense_s(bucket), info.dense_bytes, {costs.data(), n}, incumbent);
  if (d.chosen != 0) return d;
  if (info.dense_bytes > 0 && info.dense_bytes < shape_.config.min_bytes) {
    d.why = Why::below_min_bytes;
  } else if (any_offered && !any_left) {
    d.why = state_.buckets[bucket].barred_why;
  } else if (any_left && !link_.usable() && d.considered == 0 && info.dense_bytes > 0) {
    d.why = Why::no_link_model;
  }
  return d;
}

}  // namespace gradgate::gate
