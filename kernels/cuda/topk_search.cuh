// topk's last key: from the candidates as a rule, else from the whole vector, of whose entries a new list is made.
#pragma once

#include "kernels/cuda/run_places.cuh"
#include "kernels/cuda/topk_job.cuh"

namespace gradgate::kernels::cuda {
namespace {

// x of a group of a tile after the collection. Where its candidates are listed, e is x already (once those have theirs
// back), but in zero groups and where g is not finite; else nothing has been written.
template <bool kFeedback>
__device__ __forceinline__ bool form_again(const TopkJob& job, const Vector& gradient, bool listed, size_t begin,
                                           unsigned n, bool fast_e, float* x) {
  gradient.load(begin, n, x);
  if (!kFeedback || !listed) return form_x<kFeedback>(job.residual + begin, n, fast_e, job.flush, x);
  const bool kept = warp_max(max_mag(x)) == 0 && !job.flush;
  float e[kPerLane];
  load_lane(job.residual + begin, n, fast_e, e);
#pragma unroll
  for (unsigned j = 0; j < kPerLane; ++j) x[j] = kept ? 0.0f : exact::is_finite(x[j]) ? e[j] : x[j];
  return kept;
}

/// f(key of x, whether it is an element at all) for every place of a tile, by the warp.
template <bool kFeedback, class F>
__device__ __forceinline__ void each_key_again(const TopkJob& job, const Vector& gradient, size_t tile, bool fast_e,
                                               F&& f) {
  const TilePart part(tile, job.count);
  const bool listed = job.tile_base[tile] != kDeferred;
#pragma unroll 1
  for (unsigned g = 0; g < kRunGroups; ++g) {
    float x[kPerLane];
    form_again<kFeedback>(job, gradient, listed, part.begin + g * codecs::kGroup, part.n(g), fast_e, x);
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) f(codecs::topk_key(exact::mag(x[j])), element(lane_id(), j) < part.n(g));
  }
}

/// The residual of a tile's candidates becomes x again.
__device__ inline void give_back(const TopkJob& job, size_t tile) {
  const Count base = job.tile_base[tile];
  if (base == kDeferred) return;
  float* const e = job.residual + tile / kChunkTiles * kTopkChunk;
  const Vector list = list_of<true>(job);
  for (uint32_t i = threadIdx.x; i < job.tile_count[tile]; i += kTopkThreads) {
    const float v = list.get(base + i);
    if (exact::is_finite(v)) e[job.index[base + i]] = v;
  }
}

template <bool kFeedback>
__global__ void __launch_bounds__(kTopkThreads, 4) look_first(TopkJob job) {
  __shared__ alignas(16) uint32_t bins[kCoarseBins];
  __shared__ alignas(16) uint32_t parts[kLastParts];
  TopkState* const state = job.state;
  const TopkPlan plan = state->plan;
  const size_t tiles = tiles_of(job.count);
  if (plan == TopkPlan::choose) {  // the candidates' keys next to the last entry's
    constexpr unsigned kEach = 8;  // candidates of a thread at once: CTAs without any need not begin
    const Count found = state->found;
    if (state->wanted == 0 || Count{blockIdx.x} * kEach * kTopkThreads >= found) return;
    clear_own<kLastBins>(bins);
    clear_own<kLastParts>(parts);
    __syncthreads();
    const uint32_t low = state->low;
    const Vector list = list_of<kFeedback>(job);
    for (Count at = Count{blockIdx.x} * kEach * kTopkThreads + threadIdx.x; at < found;
         at += Count{gridDim.x} * kEach * kTopkThreads) {
#pragma unroll
      for (unsigned j = 0; j < kEach; ++j) {
        const Count i = at + j * kTopkThreads;
        const uint32_t key = i < found ? codecs::topk_key(exact::mag(list.get(i))) : 0;
        if (i < found && key - low < kLastBins)
          atomicAdd(bins + (key - low), 1u), atomicAdd(parts + ((key - low) >> kLastShift), 1u);
      }
    }
    __syncthreads();
    add_bins<kLastBins>(bins, job.last_bins);
    add_bins<kLastParts>(parts, job.last_parts);
    return;
  }
  if (plan == TopkPlan::search) {
    for (size_t i = size_t{blockIdx.x} * kTopkThreads + threadIdx.x; i < kFineBins;
         i += size_t{gridDim.x} * kTopkThreads)
      job.fine[i] = 0;
  } else if (!kFeedback) {
    return;
  }
  clear_own<kCoarseBins>(bins);
  const Vector gradient(job.gradient, job.dtype);
  const bool fast_e = four_aligned(job.residual);
  for (size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if constexpr (kFeedback) give_back(job, tile);
    __syncthreads();
    if (plan == TopkPlan::fill) continue;
    each_key_again<kFeedback>(job, gradient, tile, fast_e,
                              [&](uint32_t key, bool in) { add_key(bins, key >> kCoarseShift, in); });
  }
  if (plan == TopkPlan::fill) return;
  __syncthreads();
  add_bins<kCoarseBins>(bins, job.bins);
  if (!is_last_cta(state)) return;
  const Place place = place_of(job.bins, kCoarseBins, job.entries);
  if (threadIdx.x == 0) state->low = place.bin, state->wanted = job.entries - place.above;
  clear_all<kCoarseBins>(job.bins);
}

template <bool kFeedback>
__global__ void __launch_bounds__(kTopkThreads) look_second(TopkJob job) {
  __shared__ alignas(16) uint32_t bins[kFineParts];
  TopkState* const state = job.state;
  const size_t tiles = tiles_of(job.count), chunks = chunks_of(job.count);
  const size_t thread = size_t{blockIdx.x} * kTopkThreads + threadIdx.x, threads = size_t{gridDim.x} * kTopkThreads;
  const TopkPlan plan = state->plan;
  if (plan == TopkPlan::choose) {
    if (blockIdx.x >= chunks) return;
    const Count wanted = state->wanted;
    uint32_t last;
    if (wanted == 0) {
      last = state->last;
    } else {
      const Place part = place_of(job.last_parts, kLastParts, wanted);
      const Place place = place_of(job.last_bins + part.bin * kLastPart, kLastPart, wanted - part.above);
      last = state->low + part.bin * kLastPart + place.bin;
      if (blockIdx.x == 0 && threadIdx.x == 0) state->last = last, state->ties = wanted - part.above - place.above;
    }
    // Now the last key is known, every CTA counts the candidates of some chunks.
    const Vector list = list_of<kFeedback>(job);
    for (size_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
      if (threadIdx.x < 2) bins[threadIdx.x] = 0;
      __syncthreads();
      const size_t tile = chunk * kChunkTiles + threadIdx.x / 32;
      if (tile < tiles) {
        const Count base = job.tile_base[tile];
        uint32_t greater = 0, equal = 0;
        for (uint32_t i = lane_id(); i < job.tile_count[tile]; i += 32) {
          const uint32_t key = codecs::topk_key(exact::mag(list.get(base + i)));
          greater += key > last, equal += key == last;
        }
        greater = warp_sum(greater), equal = warp_sum(equal);
        if (lane_id() == 0) {
          job.tile_greater[tile] = greater, job.tile_equal[tile] = equal;
          atomicAdd(bins, greater), atomicAdd(bins + 1, equal);
        }
      }
      __syncthreads();
      if (threadIdx.x == 0) job.chunk_greater[chunk] = bins[0], job.chunk_equal[chunk] = bins[1];
      __syncthreads();
    }
    return;
  }
  for (size_t i = thread; i < tiles; i += threads) job.tile_ties[i] = 0;
  for (size_t i = thread; i < chunks; i += threads) job.chunk_greater[i] = 0, job.chunk_equal[i] = 0;
  if (plan == TopkPlan::fill) return;
  clear_own<kFineParts>(bins);
  __syncthreads();
  const uint32_t first = state->low;
  const Vector gradient(job.gradient, job.dtype);
  const bool fast_e = four_aligned(job.residual);
  for (size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    each_key_again<kFeedback>(job, gradient, tile, fast_e, [&](uint32_t key, bool exists) {
      const uint32_t rest = key & (kFineBins - 1);
      const bool in = key >> kCoarseShift == first && exists;
      if (!__any_sync(kFull, in)) return;
      add_key(bins, rest >> kFineShift, in);
      const uint32_t other = __shfl_sync(kFull, rest, 0);
      if (__all_sync(kFull, in && rest == other)) {
        if (lane_id() == 0) atomicAdd(job.fine + rest, Count{32});
      } else if (in) {
        atomicAdd(job.fine + rest, Count{1});
      }
    });
  }
  __syncthreads();
  add_bins<kFineParts>(bins, job.bins);
  if (!is_last_cta(state)) return;
  const Place part = place_of(job.bins, kFineParts, state->wanted);
  constexpr unsigned kPart = 1u << kFineShift;
  const Place place = place_of(job.fine + part.bin * kPart, kPart, state->wanted - part.above);
  if (threadIdx.x == 0) {
    state->last = first << kCoarseShift | part.bin << kFineShift | place.bin;
    state->ties = state->wanted - part.above - place.above;
  }
}

// Ties before a tile, from what the tiles before have told: their own ties, or those up to and with theirs. Tiles are
// taken in order, so those before are all at work. By one warp; a word says all, so no fence is needed.
inline constexpr Count kOwn = Count{1} << 62, kUpTo = Count{2} << 62, kTold = Count{3} << 62;
__device__ inline Count ties_before(const TopkJob& job, size_t tile, uint32_t own) {
  if (lane_id() == 0) atomicExch(job.tile_ties + tile, (tile == 0 ? kUpTo : kOwn) | own);
  if (tile == 0) return 0;
  Count before = 0;
  for (size_t end = tile; end > 0; end -= ::min(end, size_t{32})) {  // lane i looks at tile end - 1 - i
    const bool in = lane_id() < end;
    Count word = kUpTo;
    if (in) {
      do {
        word = *const_cast<volatile Count*>(job.tile_ties + (end - 1 - lane_id()));
      } while ((word & kTold) == 0);
    }
    const unsigned whole = __ballot_sync(kFull, (word & kTold) == kUpTo);
    const unsigned upto = whole == 0 ? 31 : __ffs(static_cast<int>(whole)) - 1;
    Count part = lane_id() <= upto && in ? word & ~kTold : 0;
#pragma unroll
    for (unsigned step = 16; step > 0; step /= 2) part += __shfl_xor_sync(kFull, part, static_cast<int>(step));
    before += part;
    if (whole != 0) break;
  }
  if (lane_id() == 0) atomicExch(job.tile_ties + tile, kUpTo | (before + own));
  return before;
}

// A list of exactly the entries, where the first one did not hold them.
template <bool kFeedback>
__global__ void __launch_bounds__(kTopkThreads) recollect(TopkJob job) {
  __shared__ uint32_t warp_hits[kTopkWarps], warp_ties[kTopkWarps];
  __shared__ Count base, before;
  __shared__ uint32_t next;
  TopkState* const state = job.state;
  if (state->plan == TopkPlan::choose) return;
  const uint32_t last = state->last;
  const Count ties = state->ties;
  const Vector gradient(job.gradient, job.dtype);
  const bool fast_e = four_aligned(job.residual);
  const unsigned warp = threadIdx.x / 32;
  const size_t tiles = tiles_of(job.count);
  for (;;) {
    if (threadIdx.x == 0) next = atomicAdd(&state->next_tile, 1u);
    __syncthreads();
    const size_t tile = next;
    if (tile >= tiles) return;
    const bool listed = job.tile_base[tile] != kDeferred;
    const TilePart part(tile, job.count);
    float x[kRunGroups][kPerLane];
    uint32_t mask = 0, equal = 0, kept = 0;
#pragma unroll
    for (unsigned g = 0; g < kRunGroups; ++g) {
      if (form_again<kFeedback>(job, gradient, listed, part.begin + g * codecs::kGroup, part.n(g), fast_e, x[g]))
        kept |= 1u << g;
#pragma unroll
      for (unsigned j = 0; j < kPerLane; ++j) {
        const uint32_t key = codecs::topk_key(exact::mag(x[g][j]));
        mask |= (key > last ? 1u : 0u) << (g * kPerLane + j);
        equal |= (key == last && element(lane_id(), j) < part.n(g) ? 1u : 0u) << (g * kPerLane + j);
      }
    }
    const RunPlaces tie_places(equal);
    if (lane_id() == 0) warp_ties[warp] = tie_places.total;
    __syncthreads();
    if (warp == 0) {
      const Count earlier = ties_before(job, tile, sum_of_warps(warp_ties, kTopkWarps));
      if (lane_id() == 0) before = earlier;
    }
    __syncthreads();
    const Count tie = before + sum_of_warps(warp_ties, warp);
    tie_places.for_marked(equal, [&](unsigned j, uint32_t to) { mask |= (tie + to < ties ? 1u : 0u) << j; });
    const RunPlaces places(mask);
    if (lane_id() == 0) warp_hits[warp] = places.total;
    __syncthreads();
    if (threadIdx.x == 0) {
      const uint32_t hits = sum_of_warps(warp_hits, kTopkWarps);
      base = claim(job, hits);
      job.tile_base[tile] = base;
      job.tile_count[tile] = job.tile_greater[tile] = hits;
      job.tile_equal[tile] = 0;
      if (hits != 0) atomicAdd(job.chunk_greater + tile / kChunkTiles, hits);
    }
    __syncthreads();
    const Count at = base + sum_of_warps(warp_hits, warp);
    places.for_marked(mask, [&](unsigned j, uint32_t to) {
      const float v = x[j / kPerLane][j % kPerLane];
      list_candidate<kFeedback>(job, at + to, v, part.in_chunk + run_element(j));
      if constexpr (kFeedback) {
        const float left = left_of(v, job.type);
        x[j / kPerLane][j % kPerLane] = left;
        // +0 leaves +0, which is there already unless it stands for a residual that is kept.
        if (listed && exact::bits(v) != 0 && exact::is_finite(v)) job.residual[part.begin + run_element(j)] = left;
      }
    });
    if (kFeedback && !listed) store_part(job, part, kept, fast_e, x);
  }
}

}  // namespace
}  // namespace gradgate::kernels::cuda
