// topk's pass over everything: a threshold from a sample, and a list of the candidates that reach it.
#pragma once

#include "kernels/cuda/run_places.cuh"
#include "kernels/cuda/topk_job.cuh"

namespace gradgate::kernels::cuda {
namespace {

/// Where a line of the sample begins.
__device__ __forceinline__ size_t line_begin(const TopkJob& job, size_t line) {
  const uint32_t places = static_cast<uint32_t>(job.sample_step / kSampleLine);
  return line * job.sample_step + (static_cast<uint32_t>(line) * 0x9e3779b1u >> 16) % places * kSampleLine;
}
/// How many elements are sampled: the last line may end early, or lie beyond the vector.
__device__ __forceinline__ Count sampled_of(const TopkJob& job) {
  const size_t last = (job.count - 1) / job.sample_step, begin = line_begin(job, last);
  const size_t left = begin < job.count ? job.count - begin : 0;
  return last * kSampleLine + (left < kSampleLine ? left : kSampleLine);
}

/// The threshold: what `wanted` of the sample reach, or the carried one where the sample does not speak against it.
__device__ inline void choose_threshold(const TopkJob& job) {
  __shared__ Count beyond;
  if (threadIdx.x == 0) beyond = 0;
  __syncthreads();
  const uint32_t* const bins = job.sample;
  const unsigned n = __ldcg(&job.state->top) + 1;  // the others are empty
  const Count sampled = sampled_of(job);
  const uint32_t carried = job.carried == nullptr ? 0 : *job.carried;
  constexpr uint32_t kLower = 1u << 18;  // 1.5 to 3 % below the carried one: gradients change from step to step
  const bool usable = carried > kLower && carried <= exact::kInfBits;
  const uint32_t from = usable ? carried - kLower : 0;
  Count above = 0;
  if (usable) {
    for (unsigned i = (from >> kCoarseShift) + 1 + threadIdx.x; i < n; i += kTopkThreads) above += __ldcg(bins + i);
  }
  if (above != 0) atomicAdd(&beyond, above);
  __syncthreads();
  const bool whole = job.sample_step == kSampleLine;  // everything was sampled
  const double expected =
      static_cast<double>(job.entries) * (static_cast<double>(sampled) / static_cast<double>(job.count));
  const double spread = whole ? 0 : __dsqrt_rn(expected);
  // Neighbours are alike, so a sample varies more than one of single elements would.
  const double wanted = whole ? static_cast<double>(job.entries) : expected * 1.04 + 4 * spread + 2;
  uint32_t t = 1;
  if (wanted < static_cast<double>(sampled)) {
    const Count rank = static_cast<Count>(wanted);
    const Place place = place_of(bins, n, rank);
    t = place.bin << kCoarseShift;
    if (!whole) {  // within the bin, as if its keys were spread evenly
      const double part = static_cast<double>(rank - place.above) / static_cast<double>(__ldcg(bins + place.bin));
      t += static_cast<uint32_t>((1 - part) * (1u << kCoarseShift));
    }
  }
  if (usable) {
    const uint32_t bin = from >> kCoarseShift;
    const double part = 1 - static_cast<double>(from & ((1u << kCoarseShift) - 1)) / (1u << kCoarseShift);
    const double reach = static_cast<double>(beyond) + part * static_cast<double>(__ldcg(bins + bin));
    if (reach + 3 * spread >= expected && reach <= 1.25 * wanted) t = from;
  }
  __syncthreads();
  if (threadIdx.x == 0) job.state->threshold = t < 1 ? 1 : t > exact::kInfBits ? exact::kInfBits : t;
}

// Sixteen neighbours of every job.sample_step elements, from a place that differs from line to line: rows of a matrix
// have lengths that divide the step. The first CTA begins the payload as well.
template <bool kFeedback>
__global__ void __launch_bounds__(kTopkThreads) sample_keys(TopkJob job) {
  __shared__ alignas(16) uint32_t bins[kCoarseBins];
  if (blockIdx.x == 0 && threadIdx.x < 32) write_frame(job);
  clear_own<kCoarseBins>(bins);
  __syncthreads();
  const Vector gradient(job.gradient, job.dtype);
  const unsigned in_line = threadIdx.x % kSampleLine, half = lane_id() / kSampleLine;
  constexpr size_t kLines = kTopkThreads / kSampleLine;
  const size_t lines = job.count / job.sample_step + (job.count % job.sample_step != 0);
  uint32_t top = 0;
  for (size_t base = size_t{blockIdx.x} * kLines; base < lines; base += size_t{gridDim.x} * kLines) {
    const size_t line = base + threadIdx.x / kSampleLine;
    const size_t i = line_begin(job, line) + in_line;
    const bool in = line < lines && i < job.count;
    float x = in ? gradient.get(i) : 0.0f;
    if constexpr (kFeedback) {
      // Sixteen zeros are most likely part of a zero group, which sends nothing.
      const bool zero = (__ballot_sync(kFull, x != 0.0f) >> (half * 16) & 0xffffu) == 0;
      if (in && exact::is_finite(x) && (!zero || job.flush)) x = exact::add(x, job.residual[i]);
    }
    const uint32_t bin = codecs::topk_key(exact::mag(x)) >> kCoarseShift;
    add_key(bins, bin, in);
    top = ::max(top, bin);
  }
  top = warp_max(top);
  if (lane_id() == 0) atomicMax(&job.state->top, top);
  __syncthreads();
  add_bins<kCoarseBins>(bins, job.sample);
  if (is_last_cta(job.state)) choose_threshold(job);
}

// The last CTA of the collection: how to go on.
template <bool kFeedback>
__device__ inline void make_plan(const TopkJob& job) {
  TopkState* const state = job.state;
  const Count found = __ldcg(&state->found);
  const bool listed = __ldcg(&state->deferred) == 0;
  bool near = false;
  Place place{};
  if (listed && found >= job.entries && found <= 0xffffffffu) {
    place = place_of(job.near, kNearBins, job.entries);
    near = place.bin < kNearBins - 1;
  }
  if (!near) clear_all<kCoarseBins>(job.bins);  // the sample's are still there
  if (threadIdx.x == 0) {
    if (near) {
      state->plan = TopkPlan::choose;
      state->low = ((state->threshold >> kNearShift) + place.bin) << kNearShift;
      const Count wanted = job.entries - place.above;
      if (!kFeedback && job.dtype != DType::f32 && state->low < exact::kInfBits) {  // the bin has one key
        state->last = state->low;
        state->ties = wanted;
      } else {
        state->wanted = wanted;
      }
    } else {
      state->found = 0;
      if (listed && found < job.entries && state->threshold == 1) {
        state->plan = TopkPlan::fill;
        state->last = 0;
        state->ties = job.entries - found;
      } else {
        state->plan = TopkPlan::search;
      }
    }
  }
}

// One read of everything, and the only one as a rule: 4 bytes an element, with feedback 12, and 6 a candidate; where
// the gradient has 16 bits 2 less an element, and without feedback 2 less a candidate. With feedback a thread has 64
// values on their way at once: two CTAs of a processor are enough, and three would spill.
template <bool kFeedback>
__global__ void __launch_bounds__(kTopkThreads, kFeedback ? 2 : 3) collect(TopkJob job) {
  __shared__ alignas(16) uint32_t bins[kNearBins];
  __shared__ uint32_t warp_hits[kTopkWarps];
  __shared__ Count base;
  clear_own<kNearBins>(bins);
  const uint32_t t = job.state->threshold;
  const Vector gradient(job.gradient, job.dtype);
  const bool fast_e = four_aligned(job.residual);
  const unsigned warp = threadIdx.x / 32;
  const size_t tiles = tiles_of(job.count);
  for (size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const TilePart part(tile, job.count);
    float x[kRunGroups][kPerLane];
#pragma unroll
    for (unsigned g = 0; g < kRunGroups; ++g) gradient.load(part.begin + g * codecs::kGroup, part.n(g), x[g]);
    uint32_t mask = 0, kept = 0;
    bool burst = false;  // some x is not finite though its g is: it could not be told from g and e later
#pragma unroll
    for (unsigned g = 0; g < kRunGroups; ++g) {
      const size_t begin = part.begin + g * codecs::kGroup;
      if (form_x<kFeedback>(job.residual + begin, part.n(g), fast_e, job.flush, x[g])) kept |= 1u << g;
      uint32_t max_of = 0;
#pragma unroll
      for (unsigned j = 0; j < kPerLane; ++j) {
        const uint32_t m = exact::mag(x[g][j]);
        max_of = ::max(max_of, m);
        mask |= (m >= t ? 1u : 0u) << (g * kPerLane + j);
      }
      if (warp_max(max_of) >= exact::kInfBits) {
        note_non_finite(x[g], job.payload, job.non_finite);
        if constexpr (kFeedback) {
          float v[kPerLane];
          gradient.load(begin, part.n(g), v);
#pragma unroll
          for (unsigned j = 0; j < kPerLane; ++j) burst |= exact::is_finite(v[j]) && !exact::is_finite(x[g][j]);
        }
      }
    }
    const RunPlaces places(mask);
    if (lane_id() == 0) warp_hits[warp] = places.total;
    burst = __syncthreads_or(burst);
    if (threadIdx.x == 0) {
      const uint32_t hits = sum_of_warps(warp_hits, kTopkWarps);
      base = claim(job, hits);
      if (burst) base = kDeferred, job.state->deferred = 1;
      job.tile_base[tile] = base;
      job.tile_count[tile] = base == kDeferred ? 0 : hits;
    }
    __syncthreads();
    if (base != kDeferred) {
      const Count at = base + sum_of_warps(warp_hits, warp);
      places.for_marked(mask, [&](unsigned j, uint32_t to) {
        const float v = x[j / kPerLane][j % kPerLane];
        list_candidate<kFeedback>(job, at + to, v, part.in_chunk + run_element(j));
        const uint32_t bin = (codecs::topk_key(exact::mag(v)) >> kNearShift) - (t >> kNearShift);
        atomicAdd(bins + (bin < kNearBins ? bin : kNearBins - 1), 1u);
        if constexpr (kFeedback) x[j / kPerLane][j % kPerLane] = left_of(v, job.type);
      });
      if constexpr (kFeedback) store_part(job, part, kept, fast_e, x);
    }
    __syncthreads();
  }
  __syncthreads();
  add_bins<kNearBins>(bins, job.near);
  if (is_last_cta(job.state)) make_plan<kFeedback>(job);
}

}  // namespace
}  // namespace gradgate::kernels::cuda
