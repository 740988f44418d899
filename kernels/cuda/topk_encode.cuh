// topk: the greatest elements of a whole vector, exactly, in one read of the gradient (with feedback one read and one
// write of the residual) and little more. Six launches, none of which the host looks at:
//   sample_keys   1/256 of the elements give a threshold that somewhat more than all entries reach
//   collect       the pass over everything: x, the residual, and a list of the candidates, which reach the threshold
//   look_first    the keys of the candidates near the last entry's            } where there are too few candidates or
//   too look_second   how many candidates of each chunk come before the last one  } many, all four search the vector
//   instead: recollect     nothing                                                     } 13 bits of the last key, 18
//   bits, a new list pack          the payload, and the residual of candidates that are not sent
// So whatever the values are, the vector is read at most four times, and the bytes are those of kernels/cpu/topk.cc.
//
// Candidates stand in one list: a tile of 8192 elements takes the next free place for all of its candidates at once,
// and a table says where that was. The order of tiles in the list differs from run to run; nothing else does.
#pragma once

#include <cub/block/block_scan.cuh>

#include "codecs/topk.h"
#include "kernels/cuda/blocks.cuh"
#include "kernels/cuda/entries.cuh"
#include "kernels/cuda/group.cuh"
#include "kernels/cuda/run_places.cuh"

namespace gradgate::kernels::cuda {
namespace {

using Count = unsigned long long;

inline constexpr uint32_t kTopkChunk = static_cast<uint32_t>(codecs::Codec<CodecId::topk>::kChunk);
inline constexpr unsigned kTopkThreads = 256, kTopkWarps = kTopkThreads / 32;
inline constexpr unsigned kRunGroups = 4;  // groups of a warp's part of a tile: a bit for each of a lane's 32 elements
inline constexpr uint32_t kRunElements = kRunGroups * static_cast<uint32_t>(codecs::kGroup);
inline constexpr uint32_t kTopkTile = kTopkWarps * kRunElements, kChunkTiles = kTopkChunk / kTopkTile;
static_assert(kChunkTiles == kTopkWarps, "a warp counts and packs a tile of a chunk");

inline constexpr unsigned kSampleLine = 16;              // neighbours that are sampled together
inline constexpr size_t kSampleStep = 4096;              // one line in so many elements
inline constexpr size_t kSmallSample = size_t{1} << 14;  // short vectors: about so many elements

// Histograms of keys, which have 31 bits. Coarse ones have their first 13 bits, and fine ones the other 18. Candidates
// are seen from the threshold up: bins of 2048 keys, an octave together and all that is above in the last one; then a
// bin for each of 2048 keys.
inline constexpr unsigned kCoarseShift = 18, kCoarseBins = 8192, kFineBins = 1u << kCoarseShift;
inline constexpr unsigned kFineShift = 9, kFineParts = kFineBins >> kFineShift;
inline constexpr unsigned kNearShift = 11, kNearBins = 4096, kLastBins = 1u << kNearShift;

/// What follows the collection.
enum class TopkPlan : uint32_t {
  choose,  ///< the candidates hold all entries
  fill,    ///< all elements that are not zero are candidates; zeros make up the rest
  search   ///< neither: the last key is looked for in the whole vector
};

/// All zero before the first kernel.
struct TopkState {
  Count found;         ///< candidates so far, listed or not
  Count wanted;        ///< entries that are still to be found among the keys looked at next
  Count ties;          ///< entries whose key is `last`
  uint32_t threshold;  ///< key that a candidate reaches, at least 1: zeros are never listed
  uint32_t deferred;   ///< not 0: some tile's candidates could not be listed
  TopkPlan plan;
  uint32_t low;        ///< choose: the last key is one of kLastBins from here on; search: its first 13 bits
  uint32_t last;       ///< key of the last entry
  uint32_t done;       ///< CTAs that have finished the running kernel
  uint32_t next_tile;  ///< recollect: tiles are taken in order
};

struct TopkJob : EncodeJob {
  size_t entries, capacity;  ///< of the payload, of the list
  size_t sample_step;        ///< elements from one sampled line to the next
  DType type;                ///< of the values
  std::byte* entry_values;   ///< where they go: section 1, or room for x in the workspace
  uint32_t* chunk_of;        ///< null, or (int8 values, feedback) receives the chunk of each entry
  uint32_t* carried;         ///< null, or the last key of the step before
  // In the workspace.
  TopkState* state;
  Count* bins;       ///< kCoarseBins, zero between kernels
  Count* fine;       ///< kFineBins
  Count* tile_base;  ///< where a tile's candidates begin in the list; kDeferred: they are not there
  uint32_t* tile_count;
  Count* tile_ties;                       ///< recollect: what is known of the ties up to a tile
  uint32_t *chunk_greater, *chunk_equal;  ///< candidates of a chunk above and at the last key
  uint32_t* value;                        ///< the list: bits of x, and places in the chunk
  uint16_t* index;
};
inline constexpr Count kDeferred = ~Count{0};

__host__ __device__ constexpr size_t chunks_of(size_t count) { return count / kTopkChunk + (count % kTopkChunk != 0); }
__host__ __device__ constexpr size_t tiles_of(size_t count) { return count / kTopkTile + (count % kTopkTile != 0); }

/// Whether this CTA is the last one of its grid to come here; it sees what all others have written.
__device__ inline bool is_last_cta(TopkState* state) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&state->done, 1u) == gridDim.x - 1;
    if (last) state->done = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

/// The bin that holds the wanted-th element from the top, and how many lie above it. There are so many.
struct Place {
  uint32_t bin;
  Count above;
};
template <unsigned kBins, class T>
__device__ Place place_of(const T* bins, Count wanted) {
  static_assert(kBins % kTopkThreads == 0);
  using Scan = cub::BlockScan<Count, kTopkThreads>;
  __shared__ typename Scan::TempStorage room;
  __shared__ Place found;
  constexpr unsigned kEach = kBins / kTopkThreads;
  const unsigned top = kBins - threadIdx.x * kEach;
  Count own = 0, above = 0;
  for (unsigned i = 1; i <= kEach; ++i) own += __ldcg(bins + top - i);
  Scan(room).ExclusiveSum(own, above);
  if (above < wanted && wanted <= above + own) {
    unsigned bin = top - 1;
    for (Count here = __ldcg(bins + bin); above + here < wanted; here = __ldcg(bins + bin)) above += here, --bin;
    found = {bin, above};
  }
  __syncthreads();
  const Place place = found;
  __syncthreads();
  return place;
}

template <unsigned kBins>
__device__ __forceinline__ void clear_own(uint32_t* bins) {
  for (unsigned i = threadIdx.x; i < kBins / 4; i += kTopkThreads) reinterpret_cast<uint4*>(bins)[i] = uint4{};
}
/// Those of all CTAs, by the last one. Most are zero, and need not be written.
template <unsigned kBins, class T>
__device__ __forceinline__ void clear_all(T* bins) {
  for (unsigned i = threadIdx.x; i < kBins; i += kTopkThreads) {
    if (__ldcg(bins + i) != 0) bins[i] = 0;
  }
}
/// A CTA's bins, added to those of all.
template <unsigned kBins, class T>
__device__ __forceinline__ void add_bins(const uint32_t* own, T* all) {
  for (unsigned i = threadIdx.x; i < kBins / 4; i += kTopkThreads) {
    const uint4 four = reinterpret_cast<const uint4*>(own)[i];
    if ((four.x | four.y | four.z | four.w) == 0) continue;
    const uint32_t each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (unsigned j = 0; j < 4; ++j) {
      if (each[j] != 0) atomicAdd(all + 4 * i + j, static_cast<T>(each[j]));
    }
  }
}
/// Counts a lane's key in shared memory. Where a whole warp has the same one, as constant vectors do, at once.
__device__ __forceinline__ void add_key(uint32_t* bins, uint32_t bin, bool counts) {
  const uint32_t first = __shfl_sync(kFull, bin, 0);
  if (__all_sync(kFull, counts && bin == first)) {
    if (lane_id() == 0) atomicAdd(bins + bin, 32u);
  } else if (counts) {
    atomicAdd(bins + bin, 1u);
  }
}

/// Bins of the sample and of the candidates, for which 32 bits do: half the bytes to look through.
__device__ __forceinline__ uint32_t* short_bins(const TopkJob& job) { return reinterpret_cast<uint32_t*>(job.bins); }

/// The threshold: what `wanted` of the sample reach, or the carried one where the sample does not speak against it.
__device__ inline void choose_threshold(const TopkJob& job) {
  __shared__ Count sampled, beyond;
  if (threadIdx.x == 0) sampled = 0, beyond = 0;
  __syncthreads();
  uint32_t* const bins = short_bins(job);
  const uint32_t carried = job.carried == nullptr ? 0 : *job.carried;
  constexpr uint32_t kLower = 1u << 18;  // 1.5 to 3 % below the carried one: gradients change from step to step
  const bool usable = carried > kLower && carried <= exact::kInfBits;
  const uint32_t from = usable ? carried - kLower : 0;
  Count all = 0, above = 0;
  for (unsigned i = threadIdx.x; i < kCoarseBins; i += kTopkThreads) {
    const Count here = __ldcg(bins + i);
    all += here;
    above += i > from >> kCoarseShift ? here : 0;
  }
  if (all != 0) atomicAdd(&sampled, all);
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
    const Place place = place_of<kCoarseBins>(bins, rank);
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
  clear_all<kCoarseBins>(bins);
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
  const uint32_t places = static_cast<uint32_t>(job.sample_step / kSampleLine);
  for (size_t base = size_t{blockIdx.x} * kLines; base < lines; base += size_t{gridDim.x} * kLines) {
    const size_t line = base + threadIdx.x / kSampleLine;
    const uint32_t shift = (static_cast<uint32_t>(line) * 0x9e3779b1u >> 16) % places * kSampleLine;
    const size_t i = line * job.sample_step + shift + in_line;
    const bool in = line < lines && i < job.count;
    float x = in ? gradient.get(i) : 0.0f;
    if constexpr (kFeedback) {
      // Sixteen zeros are most likely part of a zero group, which sends nothing.
      const bool zero = (__ballot_sync(kFull, x != 0.0f) >> (half * 16) & 0xffffu) == 0;
      if (in && exact::is_finite(x) && (!zero || job.flush)) x = exact::add(x, job.residual[i]);
    }
    add_key(bins, codecs::topk_key(exact::mag(x)) >> kCoarseShift, in);
  }
  __syncthreads();
  add_bins<kCoarseBins>(bins, short_bins(job));
  if (is_last_cta(job.state)) choose_threshold(job);
}

/// Element of the warp's part of a tile that a lane's bit stands for.
__device__ __forceinline__ uint32_t run_element(unsigned j) {
  return j / kPerLane * static_cast<uint32_t>(codecs::kGroup) + element(lane_id(), j % kPerLane);
}

// A warp's part of a tile.
struct TilePart {
  size_t begin;       ///< its first element
  uint32_t elements;  ///< fewer at the end of the vector
  uint32_t in_chunk;

  __device__ TilePart(size_t tile, size_t count) : begin(tile * kTopkTile + threadIdx.x / 32 * kRunElements) {
    in_chunk = static_cast<uint32_t>(begin % kTopkChunk);
    const size_t left = begin < count ? count - begin : 0;
    elements = left < kRunElements ? static_cast<uint32_t>(left) : kRunElements;
  }
  /// Elements of its group g.
  __device__ __forceinline__ unsigned n(unsigned g) const {
    const uint32_t at = g * static_cast<uint32_t>(codecs::kGroup), left = elements > at ? elements - at : 0;
    return left < codecs::kGroup ? left : static_cast<unsigned>(codecs::kGroup);
  }
};

/// A place in the list for all candidates of a tile, kDeferred where it is full: called by one thread.
__device__ inline Count claim(const TopkJob& job, uint32_t candidates) {
  const Count base = candidates == 0 ? 0 : atomicAdd(&job.state->found, Count{candidates});
  if (base + candidates <= job.capacity) return base;
  job.state->deferred = 1;
  return kDeferred;
}

// The last CTA of the collection: how to go on.
__device__ inline void make_plan(const TopkJob& job) {
  TopkState* const state = job.state;
  const Count found = __ldcg(&state->found);
  const bool listed = __ldcg(&state->deferred) == 0;
  bool near = false;
  Place place{};
  if (listed && found >= job.entries && found <= 0xffffffffu) {
    place = place_of<kNearBins>(short_bins(job), job.entries);
    near = place.bin < kNearBins - 1;
  }
  if (threadIdx.x == 0) {
    if (near) {
      state->plan = TopkPlan::choose;
      state->low = state->threshold + (place.bin << kNearShift);
      state->wanted = job.entries - place.above;
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
  clear_all<kNearBins>(short_bins(job));
}

// One read of everything, and the only one as a rule: 4 bytes an element, with feedback 12, and 6 a candidate.
template <bool kFeedback>
__global__ void __launch_bounds__(kTopkThreads, 3) collect(TopkJob job) {
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
    const RunPlaces<2> places(mask);
    if (lane_id() == 0) warp_hits[warp] = places.total;
    burst = __syncthreads_or(burst);
    if (threadIdx.x == 0) {
      uint32_t hits = 0;
      for (unsigned w = 0; w < kTopkWarps; ++w) hits += warp_hits[w];
      base = claim(job, hits);
      if (burst) base = kDeferred, job.state->deferred = 1;
      job.tile_base[tile] = base;
      job.tile_count[tile] = base == kDeferred ? 0 : hits;
    }
    __syncthreads();
    if (base != kDeferred) {
      Count at = base;
      for (unsigned w = 0; w < warp; ++w) at += warp_hits[w];
      places.for_marked(mask, [&](unsigned j, uint32_t to) {
        const float v = x[j / kPerLane][j % kPerLane];
        job.value[at + to] = exact::bits(v);
        job.index[at + to] = static_cast<uint16_t>(part.in_chunk + run_element(j));
        const uint32_t bin = (codecs::topk_key(exact::mag(v)) - t) >> kNearShift;
        atomicAdd(bins + (bin < kNearBins ? bin : kNearBins - 1), 1u);
        if constexpr (kFeedback) x[j / kPerLane][j % kPerLane] = left_of(v, job.type);
      });
      if constexpr (kFeedback) {
#pragma unroll
        for (unsigned g = 0; g < kRunGroups; ++g) {
          if (part.n(g) != 0 && (kept >> g & 1u) == 0)
            store_residual(job.residual + part.begin + g * codecs::kGroup, part.n(g), fast_e, x[g]);
        }
      }
    }
    __syncthreads();
  }
  __syncthreads();
  add_bins<kNearBins>(bins, short_bins(job));
  if (is_last_cta(job.state)) make_plan(job);
}

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
  for (uint32_t i = threadIdx.x; i < job.tile_count[tile]; i += kTopkThreads) {
    const float v = exact::from_bits(job.value[base + i]);
    if (exact::is_finite(v)) e[job.index[base + i]] = v;
  }
}

template <bool kFeedback>
__global__ void __launch_bounds__(kTopkThreads) look_first(TopkJob job) {
  __shared__ alignas(16) uint32_t bins[kCoarseBins];
  TopkState* const state = job.state;
  const TopkPlan plan = state->plan;
  const size_t tiles = tiles_of(job.count);
  if (plan == TopkPlan::choose) {  // the candidates' keys next to the last entry's
    constexpr unsigned kEach = 8;  // candidates of a thread at once: CTAs without any need not begin
    const Count found = state->found;
    if (Count{blockIdx.x} * kEach * kTopkThreads >= found) return;
    clear_own<kLastBins>(bins);
    __syncthreads();
    const uint32_t low = state->low;
    for (Count at = Count{blockIdx.x} * kEach * kTopkThreads + threadIdx.x; at < found;
         at += Count{gridDim.x} * kEach * kTopkThreads) {
#pragma unroll
      for (unsigned j = 0; j < kEach; ++j) {
        const Count i = at + j * kTopkThreads;
        const uint32_t key = i < found ? codecs::topk_key(job.value[i] & exact::kMagMask) : 0;
        if (i < found && key - low < kLastBins) atomicAdd(bins + (key - low), 1u);
      }
    }
    __syncthreads();
    add_bins<kLastBins>(bins, short_bins(job));
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
  const Place place = place_of<kCoarseBins>(job.bins, job.entries);
  if (threadIdx.x == 0) state->low = place.bin, state->wanted = job.entries - place.above;
  clear_all<kCoarseBins>(job.bins);
}

/// Candidates of a tile above and at the last key: for each lane of the warp, those that it has looked at.
__device__ __forceinline__ void count_tile(const TopkJob& job, size_t tile, uint32_t last, uint32_t* greater,
                                           uint32_t* equal) {
  *greater = 0, *equal = 0;
  const Count base = job.tile_base[tile];
  for (uint32_t i = lane_id(); i < job.tile_count[tile]; i += 32) {
    const uint32_t key = codecs::topk_key(job.value[base + i] & exact::kMagMask);
    *greater += key > last, *equal += key == last;
  }
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
    // Now the last key is known, every CTA counts the candidates of some chunks.
    const Place place = place_of<kLastBins>(short_bins(job), state->wanted);
    const uint32_t last = state->low + place.bin;
    if (blockIdx.x == 0 && threadIdx.x == 0) state->last = last, state->ties = state->wanted - place.above;
    for (size_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
      if (threadIdx.x < 2) bins[threadIdx.x] = 0;
      __syncthreads();
      const size_t tile = chunk * kChunkTiles + threadIdx.x / 32;
      if (tile < tiles) {
        uint32_t greater, equal;
        count_tile(job, tile, last, &greater, &equal);
        greater = warp_sum(greater), equal = warp_sum(equal);
        if (lane_id() == 0) atomicAdd(bins, greater), atomicAdd(bins + 1, equal);
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
  const Place part = place_of<kFineParts>(job.bins, state->wanted);
  constexpr unsigned kPart = 1u << kFineShift;
  const Place place = place_of<kPart>(job.fine + part.bin * kPart, state->wanted - part.above);
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
    const RunPlaces<2> tie_places(equal);
    if (lane_id() == 0) warp_ties[warp] = tie_places.total;
    __syncthreads();
    if (warp == 0) {
      uint32_t own = 0;
      for (unsigned w = 0; w < kTopkWarps; ++w) own += warp_ties[w];
      const Count earlier = ties_before(job, tile, own);
      if (lane_id() == 0) before = earlier;
    }
    __syncthreads();
    Count tie = before;
    for (unsigned w = 0; w < warp; ++w) tie += warp_ties[w];
    tie_places.for_marked(equal, [&](unsigned j, uint32_t to) { mask |= (tie + to < ties ? 1u : 0u) << j; });
    const RunPlaces<2> places(mask);
    if (lane_id() == 0) warp_hits[warp] = places.total;
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t hits = 0;
      for (unsigned w = 0; w < kTopkWarps; ++w) hits += warp_hits[w];
      base = claim(job, hits);
      job.tile_base[tile] = base;
      job.tile_count[tile] = hits;
      if (hits != 0) atomicAdd(job.chunk_greater + tile / kChunkTiles, hits);
    }
    __syncthreads();
    Count at = base;
    for (unsigned w = 0; w < warp; ++w) at += warp_hits[w];
    places.for_marked(mask, [&](unsigned j, uint32_t to) {
      const float v = x[j / kPerLane][j % kPerLane];
      job.value[at + to] = exact::bits(v);
      job.index[at + to] = static_cast<uint16_t>(part.in_chunk + run_element(j));
      if constexpr (kFeedback) {
        const float left = left_of(v, job.type);
        x[j / kPerLane][j % kPerLane] = left;
        // +0 leaves +0, which is there already unless it stands for a residual that is kept.
        if (listed && exact::bits(v) != 0 && exact::is_finite(v)) job.residual[part.begin + run_element(j)] = left;
      }
    });
    if (kFeedback && !listed) {
#pragma unroll
      for (unsigned g = 0; g < kRunGroups; ++g) {
        if (part.n(g) != 0 && (kept >> g & 1u) == 0)
          store_residual(job.residual + part.begin + g * codecs::kGroup, part.n(g), fast_e, x[g]);
      }
    }
  }
}

// The payload's sections: a CTA a run of chunks, a warp a tile. Candidates that are not entries get their residual
// back.
template <bool kFeedback>
__global__ void __launch_bounds__(kTopkThreads) pack(TopkJob job) {
  __shared__ uint32_t warp_greater[kTopkWarps], warp_equal[kTopkWarps];
  __shared__ Count greater_before, equal_before;
  TopkState* const state = job.state;
  const bool all = state->plan != TopkPlan::choose;  // of a second list, everything
  const uint32_t last = state->last;
  const Count ties = state->ties;
  if (blockIdx.x == 0 && threadIdx.x == 0 && job.carried != nullptr) *job.carried = last;
  const size_t tiles = tiles_of(job.count), chunks = chunks_of(job.count);
  const size_t each = chunks / gridDim.x + (chunks % gridDim.x != 0), begin = each * blockIdx.x;
  const size_t end = begin + each < chunks ? begin + each : chunks;
  uint32_t* const counts = reinterpret_cast<uint32_t*>(job.first);
  uint16_t* const indices = reinterpret_cast<uint16_t*>(job.third);
  const unsigned warp = threadIdx.x / 32, lane = lane_id();
  if (threadIdx.x == 0) greater_before = 0, equal_before = 0;
  __syncthreads();
  Count greater = 0, equal = 0;
  for (size_t i = threadIdx.x; i < begin && i < chunks; i += kTopkThreads)
    greater += job.chunk_greater[i], equal += job.chunk_equal[i];
  if (greater != 0) atomicAdd(&greater_before, greater);
  if (equal != 0) atomicAdd(&equal_before, equal);
  __syncthreads();
  greater = greater_before, equal = equal_before;

  for (size_t chunk = begin; chunk < end; ++chunk) {
    const size_t tile = chunk * kChunkTiles + warp;
    const uint32_t listed = tile < tiles ? job.tile_count[tile] : 0;
    uint32_t own_greater = listed, own_equal = 0;
    if (!all && listed != 0) {
      count_tile(job, tile, last, &own_greater, &own_equal);
      own_greater = warp_sum(own_greater), own_equal = warp_sum(own_equal);
    }
    if (lane == 0) warp_greater[warp] = own_greater, warp_equal[warp] = own_equal;
    __syncthreads();
    // Entries and ties before this warp's tile.
    Count place = greater, equals = equal;
    for (unsigned w = 0; w < warp; ++w) place += warp_greater[w], equals += warp_equal[w];
    const Count taken_before = equals < ties ? equals : ties;
    place += taken_before;
    Count left = ties - taken_before;
    const Count base = listed != 0 ? job.tile_base[tile] : 0;
    float* const e = job.residual + chunk * kTopkChunk;
    for (uint32_t from = 0; from < listed; from += 32) {
      const bool in = from + lane < listed;
      const uint32_t v = in ? job.value[base + from + lane] : 0;
      const uint16_t i = in ? job.index[base + from + lane] : 0;
      const uint32_t key = codecs::topk_key(v & exact::kMagMask);
      const unsigned tied = __ballot_sync(kFull, in && !all && key == last);
      const bool chosen = in && (all || key > last || (key == last && __popc(tied & ((1u << lane) - 1)) < left));
      const unsigned votes = __ballot_sync(kFull, chosen);
      if (chosen) {
        const Count to = place + __popc(votes & ((1u << lane) - 1));
        put_entry(job.entry_values, job.type, to, exact::from_bits(v));
        if (kFeedback && job.chunk_of != nullptr) job.chunk_of[to] = static_cast<uint32_t>(chunk);
        indices[to] = i;
      } else if (kFeedback && in && (v & exact::kMagMask) < exact::kInfBits) {
        e[i] = exact::from_bits(v);
      }
      place += __popc(votes);
      const Count took = __popc(tied);
      left -= took < left ? took : left;
    }
    Count chunk_greater = 0, chunk_equal = 0;
    for (unsigned w = 0; w < kTopkWarps; ++w) chunk_greater += warp_greater[w], chunk_equal += warp_equal[w];
    if (threadIdx.x == 0) {
      const Count to = equal + chunk_equal < ties ? equal + chunk_equal : ties, from = equal < ties ? equal : ties;
      counts[chunk] = static_cast<uint32_t>(chunk_greater + (to - from));
    }
    greater += chunk_greater, equal += chunk_equal;
    __syncthreads();
  }
}

}  // namespace
}  // namespace gradgate::kernels::cuda
