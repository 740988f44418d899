#include "gate/plan/exposed.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gate/models/overlap.h"

namespace gradgate::gate {
namespace {

class Queue {
 public:
  explicit Queue(std::span<const ExposedBucket> buckets) {
    for (const ExposedBucket& bucket : buckets) {
      work_.push_back({bucket.ready_s, 0, bucket.dense_s, 0});
      last_ready_ = std::max(last_ready_, bucket.ready_s);
    }
  }
  void set(size_t bucket, double cost_s) { work_[bucket].transfer_s = cost_s; }
  double exposed() const { return overlapped_step(last_ready_, work_, EncodeOn::wire).exposed_s; }
  /// The exposed time if one bucket cost so much.
  double exposed_with(size_t bucket, double cost_s) {
    const double before = work_[bucket].transfer_s;
    work_[bucket].transfer_s = cost_s;
    const double result = exposed();
    work_[bucket].transfer_s = before;
    return result;
  }

 private:
  std::vector<OverlapBucket> work_;
  double last_ready_ = 0;
};

}  // namespace

ExposedStep decide_exposed(std::span<const ExposedBucket> buckets, std::span<Decision> decisions) {
  Queue queue(buckets);
  ExposedStep step;
  step.dense_s = queue.exposed();
  // A serial decision is the fastest or, within 5 % of it, a more faithful one: the mark is set by the fastest.
  const auto runnable = [&](size_t i, int c) {
    const CandidateCost& cost = buckets[i].candidates[static_cast<size_t>(c) - 1];
    return !cost.barred && cost.payload_bytes > 0 && cost.total_s() < buckets[i].dense_s;  // NaN: false
  };
  for (size_t i = 0; i < buckets.size(); ++i) {
    if (decisions[i].chosen == 0) continue;
    double fastest = buckets[i].dense_s;
    for (size_t c = 1; c <= buckets[i].candidates.size(); ++c) {
      if (runnable(i, static_cast<int>(c))) fastest = std::min(fastest, buckets[i].candidates[c - 1].total_s());
    }
    queue.set(i, fastest);
  }
  const double best = queue.exposed();
  const double rounding = kRounding * std::max(step.dense_s, best);
  for (size_t i = 0; i < buckets.size(); ++i) {
    const int serial = decisions[i].chosen;
    if (serial == 0) continue;
    const bool open = buckets[i].incumbent > 0;
    const double margin = open ? 1 + kHysteresis : 1;
    if (queue.exposed_with(i, buckets[i].dense_s * margin) <= best + rounding) {
      decisions[i].chosen = 0;
      decisions[i].why = Why::hidden;
      queue.set(i, buckets[i].dense_s);
      continue;
    }
    int chosen = serial;
    for (size_t c = 1; c <= buckets[i].candidates.size(); ++c) {
      const CandidateCost& cost = buckets[i].candidates[c - 1];
      const CandidateCost& held = buckets[i].candidates[static_cast<size_t>(chosen) - 1];
      if (!runnable(i, static_cast<int>(c)) || cost.fidelity >= held.fidelity) continue;
      if (queue.exposed_with(i, cost.total_s()) <= best * (1 + kFaithfulTolerance)) chosen = static_cast<int>(c);
    }
    const CandidateCost& cost = buckets[i].candidates[static_cast<size_t>(chosen) - 1];
    queue.set(i, cost.total_s());
    if (chosen == serial) continue;
    Decision& d = decisions[i];
    d.chosen = chosen;
    d.consider(chosen, cost);
    d.why = Why::most_faithful;
  }
  step.chosen_s = queue.exposed();
  return step;
}

}  // namespace gradgate::gate
