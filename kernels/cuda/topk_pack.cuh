// topk's payload, from a list of candidates and the last key: a warp a tile. Values of f32 and bf16 are written as they
// come; int8 ones by runs of entries, each of which has its greatest value found before the first one is coded.
#pragma once

#include "kernels/cuda/topk_job.cuh"

namespace gradgate::kernels::cuda {
namespace {

// Which candidates are entries: those above the last key, and of those at it the first `ties` of the vector. Of a
// second list, all.
struct Choice {
  uint32_t last;
  Count ties;
  bool all;

  __device__ explicit Choice(const TopkState& state)
      : last(state.last), ties(state.ties), all(state.plan != TopkPlan::choose) {}
};

// Candidates above and at the last key, from the beginning of the vector to some place.
struct Passed {
  Count greater, equal;

  __device__ Count ties(const Choice& choice) const { return equal < choice.ties ? equal : choice.ties; }
  __device__ Count entries(const Choice& choice) const { return greater + ties(choice); }

  __device__ Passed with_chunk(const TopkJob& job, size_t chunk) const {
    return {greater + job.chunk_greater[chunk], equal + job.chunk_equal[chunk]};
  }
  __device__ Passed with_tile(const TopkJob& job, size_t tile) const {
    return {greater + job.tile_greater[tile], equal + job.tile_equal[tile]};
  }
  /// Up to a tile of the chunk that begins here.
  __device__ Passed up_to(const TopkJob& job, size_t tile) const {
    Passed passed = *this;
    for (size_t t = tile / kChunkTiles * kChunkTiles; t < tile; ++t) passed = passed.with_tile(job, t);
    return passed;
  }
};

/// Calls entry(place, bits of x, index) for each entry of a tile, and other(bits, index) for its other candidates, by
/// the lanes of a warp, in index order. `passed`: up to the tile.
template <bool kFeedback, class Entry, class Other>
__device__ __forceinline__ void each_candidate(const TopkJob& job, const Choice& choice, size_t tile,
                                               const Passed& passed, const Entry& entry, const Other& other) {
  const uint32_t listed = job.tile_count[tile];
  const Count base = job.tile_base[tile];
  const Vector list = list_of<kFeedback>(job);
  Count place = passed.entries(choice), left = choice.ties - passed.ties(choice);
  for (uint32_t from = 0; from < listed; from += 32) {
    const bool in = from + lane_id() < listed;
    const uint32_t v = in ? exact::bits(list.get(base + from + lane_id())) : 0;
    const uint16_t i = in ? job.index[base + from + lane_id()] : 0;
    const uint32_t key = codecs::topk_key(v & exact::kMagMask);
    const unsigned tied = __ballot_sync(kFull, in && !choice.all && key == choice.last);
    const bool chosen =
        in && (choice.all || key > choice.last || (key == choice.last && __popc(tied & lanes_below()) < left));
    const unsigned votes = __ballot_sync(kFull, chosen);
    if (chosen) {
      entry(place + __popc(votes & lanes_below()), v, i);
    } else if (in) {
      other(v, i);
    }
    place += __popc(votes);
    const Count took = __popc(tied);
    left -= took < left ? took : left;
  }
}

/// How many entries a chunk has.
__device__ __forceinline__ void put_count(const TopkJob& job, size_t chunk, Count entries) {
  reinterpret_cast<uint32_t*>(job.first)[chunk] = static_cast<uint32_t>(entries);
}
/// The last key, for the next step.
__device__ __forceinline__ void carry_last(const TopkJob& job, const Choice& choice) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && job.carried != nullptr) *job.carried = choice.last;
}

// f32 and bf16 values: a CTA a run of chunks. Candidates that are not entries get their residual back.
template <bool kFeedback>
__global__ void __launch_bounds__(kTopkThreads) pack(TopkJob job) {
  __shared__ Passed before;
  const Choice choice(*job.state);
  carry_last(job, choice);
  const size_t tiles = tiles_of(job.count), chunks = chunks_of(job.count);
  const size_t each = chunks / gridDim.x + (chunks % gridDim.x != 0), begin = each * blockIdx.x;
  const size_t end = begin + each < chunks ? begin + each : chunks;
  uint16_t* const indices = reinterpret_cast<uint16_t*>(job.third);
  if (threadIdx.x == 0) before = {0, 0};
  __syncthreads();
  Passed passed{0, 0};
  for (size_t i = threadIdx.x; i < begin && i < chunks; i += kTopkThreads) passed = passed.with_chunk(job, i);
  if (passed.greater != 0) atomicAdd(&before.greater, passed.greater);
  if (passed.equal != 0) atomicAdd(&before.equal, passed.equal);
  __syncthreads();
  passed = before;

  for (size_t chunk = begin; chunk < end; ++chunk) {
    const size_t tile = chunk * kChunkTiles + threadIdx.x / 32;
    if (tile < tiles) {
      float* const e = job.residual + chunk * kTopkChunk;
      each_candidate<kFeedback>(
          job, choice, tile, passed.up_to(job, tile),
          [&](Count to, uint32_t v, uint16_t i) {
            put_entry(job.second, job.type, to, exact::from_bits(v));
            indices[to] = i;
          },
          [&](uint32_t v, uint16_t i) {
            if (kFeedback && (v & exact::kMagMask) < exact::kInfBits) e[i] = exact::from_bits(v);
          });
    }
    const Passed next = passed.with_chunk(job, chunk);
    if (threadIdx.x == 0) put_count(job, chunk, next.entries(choice) - passed.entries(choice));
    passed = next;
  }
}

// A chunk, and what lies before it.
struct ChunkPlace {
  size_t chunk;
  Passed passed;

  __device__ ChunkPlace next(const TopkJob& job) const { return {chunk + 1, passed.with_chunk(job, chunk)}; }
};

/// The chunk of entry `first`; or of chunks without any that come just before it, the first. All threads of the CTA
/// must come here.
__device__ inline ChunkPlace chunk_of_entry(const TopkJob& job, const Choice& choice, Count first) {
  using Scan = cub::BlockScan<Count, kTopkThreads>;
  __shared__ typename Scan::TempStorage room;
  __shared__ ChunkPlace found;
  const size_t chunks = chunks_of(job.count);
  Passed passed{0, 0};
  for (size_t base = 0;; base += kTopkThreads) {
    const size_t chunk = base + threadIdx.x;
    const bool in = chunk < chunks;
    const Passed own = in ? Passed{0, 0}.with_chunk(job, chunk) : Passed{0, 0};
    Passed before, all;
    Scan(room).ExclusiveSum(own.greater, before.greater, all.greater);
    __syncthreads();
    Scan(room).ExclusiveSum(own.equal, before.equal, all.equal);
    const ChunkPlace here{chunk, {passed.greater + before.greater, passed.equal + before.equal}};
    const bool over = in && here.passed.entries(choice) < first && here.next(job).passed.entries(choice) <= first;
    const unsigned ended = static_cast<unsigned>(__syncthreads_count(over));  // chunks in order: the first so many
    if (threadIdx.x == ended) found = here;
    __syncthreads();
    if (ended < kTopkThreads) return found;
    passed = {passed.greater + all.greater, passed.equal + all.equal};
  }
}

/// f(place, bits of x, index, chunk) for the entries first … end-1, from the chunk on that has the first, and the
/// counts of their chunks. Returns the chunk of `end`.
template <bool kFeedback, class F>
__device__ __forceinline__ ChunkPlace each_entry(const TopkJob& job, const Choice& choice, ChunkPlace at, Count first,
                                                 Count end, const F& f) {
  const size_t tiles = tiles_of(job.count), chunks = chunks_of(job.count);
  while (at.chunk < chunks && (at.passed.entries(choice) < end || end == job.entries)) {
    const size_t tile = at.chunk * kChunkTiles + threadIdx.x / 32;
    if (tile < tiles) {
      const Passed passed = at.passed.up_to(job, tile);
      if (passed.entries(choice) < end && passed.with_tile(job, tile).entries(choice) > first) {
        each_candidate<kFeedback>(
            job, choice, tile, passed,
            [&](Count to, uint32_t v, uint16_t i) {
              if (to >= first && to < end) f(to, v, i, at.chunk);
            },
            [](uint32_t, uint16_t) {});
      }
    }
    const ChunkPlace next = at.next(job);
    if (threadIdx.x == 0) put_count(job, at.chunk, next.passed.entries(choice) - at.passed.entries(choice));
    if (next.passed.entries(choice) > end) break;
    at = next;
  }
  return at;
}

inline constexpr unsigned kPackRuns = 32;  // runs that a CTA codes at once

// int8 values: a CTA whole runs of entries, wherever their chunks end. The residual of a candidate is x already.
template <bool kFeedback>
__global__ void __launch_bounds__(kTopkThreads, 2) pack_int8(TopkJob job) {
  constexpr Count kRun = codecs::kScaleRun;
  __shared__ uint32_t greatest[kPackRuns];
  const Choice choice(*job.state);
  carry_last(job, choice);
  const size_t runs = job.entries / kRun + (job.entries % kRun != 0);
  const size_t each = runs / gridDim.x + (runs % gridDim.x != 0), begin = each * blockIdx.x;
  const size_t end = begin + each < runs ? begin + each : runs;
  uint32_t* const scales = reinterpret_cast<uint32_t*>(job.second);
  int8_t* const codes = reinterpret_cast<int8_t*>(job.second + job.codes_at);
  uint16_t* const indices = reinterpret_cast<uint16_t*>(job.third);
  pad_scales(job.second, runs, job.codes_at);
  if (begin >= end) return;

  ChunkPlace at = chunk_of_entry(job, choice, begin * kRun);
  for (size_t run = begin; run < end; run += kPackRuns) {
    const size_t run_end = run + kPackRuns < end ? run + kPackRuns : end;
    const Count first = run * kRun, entries_end = run_end * kRun < job.entries ? run_end * kRun : job.entries;
    if (threadIdx.x < kPackRuns) greatest[threadIdx.x] = 0;
    __syncthreads();
    each_entry<kFeedback>(job, choice, at, first, entries_end, [&](Count to, uint32_t v, uint16_t, size_t) {
      const uint32_t mag = v & exact::kMagMask;
      if (mag < exact::kInfBits) atomicMax(greatest + (to - first) / kRun, mag);
    });
    __syncthreads();
    if (threadIdx.x < run_end - run) scales[run + threadIdx.x] = codecs::EntryEncoder::of(greatest[threadIdx.x]).stored;
    at =
        each_entry<kFeedback>(job, choice, at, first, entries_end, [&](Count to, uint32_t v, uint16_t i, size_t chunk) {
          const auto encoder = codecs::EntryEncoder::of(greatest[(to - first) / kRun]);
          indices[to] = i;
          put_code<kFeedback>(encoder, exact::from_bits(v), codes + to,
                              [&] { return job.residual + chunk * kTopkChunk + i; });
        });
    __syncthreads();
  }
}

}  // namespace
}  // namespace gradgate::kernels::cuda
