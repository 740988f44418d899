// A data-parallel step whose buckets are reduced while the backward pass still runs: what of their cost shows. Seconds;
// one wire, one queue, buckets in the order in which they become ready.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace gradgate::gate {

/// Where encoding runs. On the wire's queue (a side stream, another core) it delays the bucket's transfer only; on the
/// compute stream it delays the rest of the backward pass too.
enum class EncodeOn : uint8_t { wire, compute };

struct OverlapBucket {
  double ready_s = 0;  ///< since the step began, without any encoding; ascending
  double encode_s = 0, transfer_s = 0, decode_s = 0;
};

struct OverlapStep {
  double compute_s = 0;  ///< end of the backward pass, encoding on its stream included
  double finish_s = 0;   ///< last bucket is done
  double step_s = 0;     ///< the later of the two
  double exposed_s = 0;  ///< step_s minus the backward pass without gradients' exchange: what communication costs
  double busy_s = 0;     ///< time the wire's queue works
};

/// finish_i = max(finish_{i−1}, r_i) + cost_i, where cost_i is all of a bucket's work on the queue. `backward_s` is
/// when the backward pass ends, encoding excluded. Source: this recurrence is the queue of any single-stream DDP;
/// Espresso (Wang et al. 2023) optimises over it.
constexpr OverlapStep overlapped_step(double backward_s, std::span<const OverlapBucket> buckets,
                                      EncodeOn encode) noexcept {
  OverlapStep out;
  double delay = 0;  // encoding so far on the compute stream
  for (const OverlapBucket& b : buckets) {
    double cost = b.transfer_s + b.decode_s;
    if (encode == EncodeOn::compute) {
      delay += b.encode_s;
    } else {
      cost += b.encode_s;
    }
    out.finish_s = std::max(out.finish_s, b.ready_s + delay) + cost;
    out.busy_s += cost;
  }
  out.compute_s = backward_s + delay;
  out.step_s = std::max(out.compute_s, out.finish_s);
  out.exposed_s = out.step_s - backward_s;
  return out;
}

/// When the gradients of the first `done` of `total` bytes are ready, for a backward pass that runs from `start_s` to
/// `end_s` and produces them evenly.
constexpr double even_ready_time(double start_s, double end_s, double done, double total) noexcept {
  return total > 0 ? start_s + (end_s - start_s) * (done / total) : end_s;
}

}  // namespace gradgate::gate
