// topk: the greatest elements of a whole vector, exactly, in one read of the gradient (with feedback one read and one
// write of the residual) and little more. Six launches, none of which the host looks at:
//   sample_keys  a sample gives a threshold that somewhat more than all entries reach       (topk_collect.cuh)
//   collect      everything: x, the residual, a list of the candidates, which reach it
//   look_first   the keys of the candidates near the last entry's: of a bf16 or f16         (topk_search.cuh)
//                gradient without feedback there is only one, and nothing is to be done
//   look_second  how many candidates of each tile and chunk lie above the last key, and at it
//   recollect    nothing
//   pack         the payload, and the residual of candidates that are not sent              (topk_pack.cuh)
// Where there are too few candidates or too many, the three in the middle search the vector instead: 13 bits of the
// last key, 18 bits, a new list. So whatever the values are, the vector is read at most four times, and the bytes are
// those of kernels/cpu/topk.cc.
//
// Candidates stand in one list: a tile of 8192 elements takes the next free place for all of its candidates at once,
// and a table says where that was. The order of tiles in the list differs from run to run; nothing else does.
//
// Here what the launches share: their job, its state in the workspace, histograms and tiles.
#pragma once

#include <cub/block/block_scan.cuh>

#include "codecs/topk.h"
#include "kernels/cuda/blocks.cuh"
#include "kernels/cuda/entries.cuh"
#include "kernels/cuda/group.cuh"

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
// are seen from the threshold up: bins of 8192 keys, an octave together and all that is above in the last one; then a
// bin for each of 8192 keys, and one for each 128 of them.
inline constexpr unsigned kCoarseShift = 18, kCoarseBins = 8192, kFineBins = 1u << kCoarseShift;
inline constexpr unsigned kFineShift = 9, kFineParts = kFineBins >> kFineShift;
inline constexpr unsigned kNearShift = 13, kNearBins = 1024, kLastBins = 1u << kNearShift;
inline constexpr unsigned kLastShift = 7, kLastParts = kLastBins >> kLastShift, kLastPart = 1u << kLastShift;
static_assert(kNearShift <= 13, "a bf16 or f16 has no more than one key in a bin");

/// What follows the collection.
enum class TopkPlan : uint32_t {
  choose,  ///< the candidates hold all entries
  fill,    ///< all elements that are not zero are candidates; zeros make up the rest
  search   ///< neither: the last key is looked for in the whole vector
};

/// All zero before the first kernel.
struct TopkState {
  Count found;         ///< candidates so far, listed or not
  Count wanted;        ///< entries that are still to be found among the keys looked at next; 0: `last` is known
  Count ties;          ///< entries whose key is `last`
  uint32_t threshold;  ///< key that a candidate reaches, at least 1: zeros are never listed
  uint32_t deferred;   ///< not 0: some tile's candidates could not be listed
  TopkPlan plan;
  uint32_t low;        ///< choose: the last key is one of kLastBins from here on; search: its first 13 bits
  uint32_t last;       ///< key of the last entry
  uint32_t done;       ///< CTAs that have finished the running kernel
  uint32_t next_tile;  ///< recollect: tiles are taken in order
  uint32_t top;        ///< of the sample, the uppermost bin
};

struct TopkJob : EncodeJob {
  size_t entries, capacity;  ///< of the payload, of the list
  size_t sample_step;        ///< elements from one sampled line to the next
  DType type;                ///< of the values
  size_t codes_at;           ///< of int8 values in their section
  uint32_t* carried;         ///< null, or the last key of the step before
  // In the workspace.
  TopkState* state;
  Count* bins;           ///< kCoarseBins of the vector; these and the next ones are zero before the first kernel
  uint32_t* near;        ///< kNearBins of the candidates
  uint32_t* last_parts;  ///< kLastParts
  uint32_t* sample;      ///< kCoarseBins, in one half of `bins`, and
  uint32_t* last_bins;   ///< kLastBins, in the other: where the vector is not searched
  Count* fine;           ///< kFineBins
  Count* tile_base;      ///< where a tile's candidates begin in the list; kDeferred: they are not there
  uint32_t* tile_count;
  Count* tile_ties;                       ///< recollect: what is known of the ties up to a tile
  uint32_t *tile_greater, *tile_equal;    ///< candidates of a tile above and at the last key
  uint32_t *chunk_greater, *chunk_equal;  ///< of a chunk
  std::byte* value;                       ///< the list: x, and places in the chunk
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

/// The bin that holds the wanted-th element from the top, and how many lie above it. There are so many. Bins are looked
/// at from the top down, and those far below it not at all.
struct Place {
  uint32_t bin;
  Count above;
};
template <class T>
__device__ Place place_of(const T* bins, unsigned n, Count wanted) {
  using Scan = cub::BlockScan<Count, kTopkThreads>;
  __shared__ typename Scan::TempStorage room;
  __shared__ Place found;
  constexpr unsigned kEach = 4;
  Count passed = 0;
  do {
    const unsigned top = n - ::min(n, threadIdx.x * kEach);
    Count here[kEach], own = 0, above, all;
#pragma unroll
    for (unsigned i = 0; i < kEach; ++i) own += here[i] = i < top ? __ldcg(bins + top - 1 - i) : 0;
    Scan(room).ExclusiveSum(own, above, all);
    above += passed;
#pragma unroll
    for (unsigned i = 0; i < kEach; ++i) {
      if (above < wanted && wanted <= above + here[i]) found = {top - 1 - i, above};
      above += here[i];
    }
    passed += all;
    n -= ::min(n, kEach * kTopkThreads);
    __syncthreads();
  } while (passed < wanted && n > 0);
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

/// x of the list, without feedback in the gradient's type.
template <bool kFeedback>
__device__ __forceinline__ Vector list_of(const TopkJob& job) {
  return {job.value, kFeedback ? DType::f32 : job.dtype};
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
  __device__ __forceinline__ unsigned n(unsigned g) const { return group_length(elements, g); }
};

/// A place in the list for all candidates of a tile, kDeferred where it is full: called by one thread.
__device__ inline Count claim(const TopkJob& job, uint32_t candidates) {
  const Count base = candidates == 0 ? 0 : atomicAdd(&job.state->found, Count{candidates});
  if (base + candidates <= job.capacity) return base;
  job.state->deferred = 1;
  return kDeferred;
}

/// Of a CTA's warps, what the first n have together.
__device__ __forceinline__ uint32_t sum_of_warps(const uint32_t* of_warp, unsigned n) {
  uint32_t sum = 0;
  for (unsigned w = 0; w < n; ++w) sum += of_warp[w];
  return sum;
}

/// A candidate's place in the list.
template <bool kFeedback>
__device__ __forceinline__ void list_candidate(const TopkJob& job, Count at, float x, uint32_t in_chunk) {
  list_of<kFeedback>(job).put(at, x);
  job.index[at] = static_cast<uint16_t>(in_chunk);
}

/// The residual of a warp's part of a tile. Bit g of `kept`: that of its group g stays as it is.
__device__ __forceinline__ void store_part(const TopkJob& job, const TilePart& part, uint32_t kept, bool fast,
                                           const float (&left)[kRunGroups][kPerLane]) {
#pragma unroll
  for (unsigned g = 0; g < kRunGroups; ++g) {
    if (part.n(g) != 0 && (kept >> g & 1u) == 0)
      store_residual(job.residual + part.begin + g * codecs::kGroup, part.n(g), fast, left[g]);
  }
}

}  // namespace
}  // namespace gradgate::kernels::cuda
