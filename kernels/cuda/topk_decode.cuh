// topk, the other way: counts and indices are checked before a byte is written, then each warp builds tiles of 1024
// elements in shared memory and writes them in one run. Payload bytes read twice, the output written once.
#pragma once

#include <cub/block/block_reduce.cuh>

#include "codecs/topk.h"
#include "kernels/cuda/chunk_topk_decode.cuh"
#include "kernels/cuda/topk_job.cuh"

namespace gradgate::kernels::cuda {
namespace {

inline constexpr unsigned kPieceWarps = kTopkThreads / 32;
inline constexpr uint32_t kPiece = kPieceWarps * kTile;  // elements of the output that a CTA builds at once
static_assert(kTopkChunk % kPiece == 0);

/// The first entry of a chunk: the sum of the counts before it. By all threads of the CTA.
__device__ inline size_t entries_before(const uint32_t* counts, size_t chunk) {
  using Reduce = cub::BlockReduce<size_t, kTopkThreads>;
  __shared__ typename Reduce::TempStorage room;
  __shared__ size_t sum;
  size_t own = 0;
  for (size_t i = threadIdx.x; i < chunk; i += kTopkThreads) own += counts[i];
  own = Reduce(room).Sum(own);
  if (threadIdx.x == 0) sum = own;
  __syncthreads();
  own = sum;
  __syncthreads();
  return own;
}

struct TopkValidateJob {
  codecs::WireHeader header;
  const std::byte* payloads;
  size_t stride, counts_at, indices_at;
  unsigned ranks, self;
  size_t count, entries;
  uint64_t* verdict;
};

// Headers, counts and indices of every payload; a CTA a run of chunks of one of them.
__global__ void __launch_bounds__(kTopkThreads) validate_topk(TopkValidateJob job) {
  const unsigned rank = blockIdx.y;
  if (rank == job.self) return;
  const std::byte* const payload = job.payloads + rank * job.stride;
  const Verdict verdict{job.verdict, rank};
  verdict.header(payload, job.header);
  const uint32_t* const counts = reinterpret_cast<const uint32_t*>(payload + job.counts_at);
  const uint16_t* const index = reinterpret_cast<const uint16_t*>(payload + job.indices_at);
  const size_t chunks = chunks_of(job.count);
  const size_t each = chunks / gridDim.x + (chunks % gridDim.x != 0), begin = each * blockIdx.x;
  const size_t end = begin + each < chunks ? begin + each : chunks;
  if (begin >= chunks) return;
  size_t entry = entries_before(counts, begin);
  bool wrong = false;
  for (size_t chunk = begin; chunk < end; ++chunk) {
    const size_t left = job.count - chunk * kTopkChunk;
    const uint32_t length = left < kTopkChunk ? static_cast<uint32_t>(left) : kTopkChunk, k = counts[chunk];
    if (k > length || entry > job.entries || k > job.entries - entry) {  // nothing behind it is where it should be
      wrong = true;
      break;
    }
    for (uint32_t i = threadIdx.x; i < k; i += kTopkThreads)
      wrong |= index[entry + i] >= length || (i > 0 && index[entry + i] <= index[entry + i - 1]);
    entry += k;
  }
  if (end == chunks) wrong |= entry != job.entries;
  verdict.indices(wrong);
}

struct TopkDecodeJob : DecodeJob {
  size_t third;     ///< where the indices begin
  DType value;      ///< type of the values
  size_t codes_at;  ///< of int8 values
};

/// The first of `size` rising indices that is not below `bound`, by all lanes at once.
__device__ __forceinline__ uint32_t warp_lower_bound(const uint16_t* index, uint32_t size, uint32_t bound) {
  uint32_t begin = 0;
  while (size > 0) {
    const uint32_t step = (size + 31) / 32, at = lane_id() * step;
    const unsigned below = __ballot_sync(kFull, at < size && index[begin + at] < bound);  // a run of ones
    if (below == 0) return begin;
    const uint32_t last = (static_cast<uint32_t>(__popc(below)) - 1) * step;  // below the bound
    begin += last + 1;
    size = size - last - 1 < step - 1 ? size - last - 1 : step - 1;
  }
  return begin;
}

// Stores the one payload, or the sum of all in rank order.
template <bool kSum>
__global__ void __launch_bounds__(kTopkThreads) store_topk(TopkDecodeJob job) {
  __shared__ alignas(16) float tiles[kPieceWarps][kTile];
  if (!no_fault(job.verdict, job.fault)) return;
  const unsigned warp = threadIdx.x / 32, lane = lane_id();
  float* const tile = tiles[warp];
  const Vector out(job.out, job.dtype);
  const size_t pieces = job.count / kPiece + (job.count % kPiece != 0);
  for (size_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const size_t begin = piece * kPiece + warp * kTile;
    const size_t chunk = piece * kPiece / kTopkChunk;
    const uint32_t in_chunk = static_cast<uint32_t>(begin % kTopkChunk);
    const uint32_t n = begin >= job.count          ? 0
                       : job.count - begin < kTile ? static_cast<uint32_t>(job.count - begin)
                                                   : kTile;
    for (uint32_t i = lane; i < kTile / 4; i += 32) reinterpret_cast<float4*>(tile)[i] = float4{};
    for (unsigned rank = 0; rank < (kSum ? job.ranks : 1); ++rank) {
      const std::byte* const payload = job.payload + rank * job.stride;
      const uint32_t* const counts = reinterpret_cast<const uint32_t*>(payload + job.first);
      const size_t first = entries_before(counts, chunk);  // its barriers part the ranks as well
      const uint16_t* const index = reinterpret_cast<const uint16_t*>(payload + job.third) + first;
      const EntryValues values{payload + job.second, job.value, job.codes_at};
      const uint32_t k = counts[chunk], from = warp_lower_bound(index, k, in_chunk);
      for (uint32_t i = from + lane; i < k; i += 32) {
        const uint32_t to = index[i] - in_chunk;
        if (to >= kTile) break;
        const float d = values[first + i];
        if constexpr (kSum) {
          tile[to] = rank == 0 ? d : exact::add(tile[to], d);
        } else {
          tile[to] = exact::mul(d, job.scale);
        }
      }
    }
    __syncwarp();
    for (uint32_t i = 0; i < n; i += codecs::kGroup) {
      float v[kPerLane];
      load_room(tile + i, v);
      if constexpr (kSum) {
#pragma unroll
        for (unsigned j = 0; j < kPerLane; ++j) v[j] = exact::mul(v[j], job.scale);
      }
      out.store(begin + i, n - i < codecs::kGroup ? n - i : codecs::kGroup, v);
    }
    __syncwarp();
  }
}

// Entries added where they belong, a CTA a chunk; all other elements are left alone.
__global__ void __launch_bounds__(kTopkThreads) add_topk(TopkDecodeJob job) {
  if (!no_fault(job.verdict, job.fault)) return;
  const uint32_t* const counts = reinterpret_cast<const uint32_t*>(job.payload + job.first);
  const EntryValues values{job.payload + job.second, job.value, job.codes_at};
  const Vector out(job.out, job.dtype);
  const size_t chunks = chunks_of(job.count);
  for (size_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const size_t first = entries_before(counts, chunk);
    const uint16_t* const index = reinterpret_cast<const uint16_t*>(job.payload + job.third) + first;
    for (uint32_t i = threadIdx.x; i < counts[chunk]; i += kTopkThreads) {
      const size_t at = chunk * kTopkChunk + index[i];
      out.put(at, exact::add(out.get(at), exact::mul(values[first + i], job.scale)));
    }
  }
}

}  // namespace
}  // namespace gradgate::kernels::cuda
