#include "gate/plan/pricing.h"

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
    for (size_t c = 1; c <= shape_.candidate_count(); ++c) {
      // What was seen on the wire beats the model.
      prices[i][c - 1] = cost(i, static_cast<int>(c), Transfers::seen_where_run);
    }
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

std::vector<UniformPlan> Pricing::uniform_plans() const {
  std::vector<UniformPlan> plans;
  for (int c = 1; c <= static_cast<int>(shape_.candidate_count()); ++c) {
    UniformPlan plan;
    plan.candidate = c;
    for (size_t i = 0; i < state_.buckets.size(); ++i) {
      const bool pays = selectable(shape_, state_, i, c) && exchange_s(i, c, Transfers::modelled) < dense_s(i);
      if (pays) plan.buckets.push_back(i);
      const int runs = pays ? c : state_.buckets[i].running;
      plan.sum_s += exchange_s(i, runs, Transfers::modelled);
      plan.seen_sum_s += exchange_s(i, runs, Transfers::seen_where_run);
    }
    if (!plan.buckets.empty() && std::isfinite(plan.sum_s)) plans.push_back(std::move(plan));
  }
  std::sort(plans.begin(), plans.end(), [](const UniformPlan& a, const UniformPlan& b) {
    return a.sum_s != b.sum_s ? a.sum_s < b.sum_s : a.candidate < b.candidate;
  });
  return plans;
}

double Pricing::running_sum_s() const {
  double sum_s = 0;
  for (size_t i = 0; i < state_.buckets.size(); ++i) {
    sum_s += exchange_s(i, state_.buckets[i].running, Transfers::seen_where_run);
  }
  return sum_s;
}

Decision Pricing::running_decision(size_t bucket, Why why) const {
  return decision_for(bucket, state_.buckets[bucket].running, Transfers::seen_where_run, why);
}

Decision Pricing::uniform_decision(size_t bucket, int candidate) const {
  return decision_for(bucket, candidate, Transfers::modelled, Why::uniform);
}

Decision Pricing::decision_for(size_t bucket, int candidate, Transfers transfers, Why why) const {
  Decision d;
  d.chosen = candidate;
  d.dense_s = dense_s(bucket);
  d.consider(candidate, cost(bucket, candidate, transfers));
  d.why = why;
  return d;
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

CandidateCost Pricing::cost(size_t bucket, int candidate, Transfers transfers) const {
  const BucketInfo& info = shape_.buckets[bucket];
  const BucketState& b = state_.buckets[bucket];
  const size_t at = static_cast<size_t>(candidate) - 1, sample = bucket * shape_.candidate_count() + at;
  const CandidateInfo& c = shape_.candidates[at];
  CandidateCost cost;
  cost.payload_bytes = shape_.offered(bucket, candidate) ? info.payload_bytes[at] : 0;
  cost.fidelity = c.fidelity;
  cost.barred = !selectable(shape_, state_, bucket, candidate);
  cost.encode_s = agreed_.encode[sample];
  cost.decode_s = agreed_.decode[sample];
  if (transfers == Transfers::seen_where_run && candidate == b.running && !std::isnan(b.running_transfer_s)) {
    cost.transfer_s = b.running_transfer_s;
    return cost;
  }
  double load = agreed_.dense_transfer[bucket] / exchange_cost(Exchange::all_reduce, link_, info.dense_bytes);
  load = std::isnan(load) ? 1 : std::clamp(load, 1 / kMaxLoadFactor, kMaxLoadFactor);
  cost.transfer_s = load * exchange_cost(c.exchange, link_, info.payload_bytes[at], info.dense_bytes, c.between);
  return cost;
}

double Pricing::exchange_s(size_t bucket, int candidate, Transfers transfers) const {
  return candidate == 0 ? dense_s(bucket) : cost(bucket, candidate, transfers).total_s();
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
