// chunk-topk, the other way: every index is checked before a byte is written, then the entries are stored among zeros
// or added where they belong. Payload bytes read twice, the output written once.
#pragma once

#include "codecs/chunk_topk.h"
#include "kernels/cuda/blocks.cuh"
#include "kernels/cuda/entries.cuh"
#include "kernels/cuda/group.cuh"

namespace gradgate::kernels::cuda {
namespace {

inline constexpr uint32_t kTile = 1024;    // elements of the output that a warp builds in shared memory
inline constexpr unsigned kTileWarps = 4;  // warps a CTA

// Every index of every payload, and the headers: *verdict (~0 before) becomes the first fault in rank order.
struct ValidateJob {
  codecs::WireHeader header;
  const std::byte* payloads;
  size_t stride, indices_at;
  unsigned ranks, self;
  size_t count, entries;
  uint32_t c, chunk;
  uint64_t* verdict;
};

__global__ void __launch_bounds__(kBlockThreads) validate_chunks(ValidateJob job) {
  const unsigned rank = blockIdx.y;
  if (rank == job.self) return;
  const std::byte* const payload = job.payloads + rank * job.stride;
  const Verdict verdict{job.verdict, rank};
  verdict.header(payload, job.header);
  const uint16_t* const index = reinterpret_cast<const uint16_t*>(payload + job.indices_at);
  bool wrong = false;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < job.entries; i += size_t{gridDim.x} * blockDim.x) {
    const size_t chunk = i / job.c, left = job.count - chunk * job.chunk;
    const uint32_t length = left < job.chunk ? static_cast<uint32_t>(left) : job.chunk;
    wrong |= index[i] >= length || (i - chunk * job.c > 0 && index[i] <= index[i - 1]);
  }
  verdict.indices(wrong);
}

struct ChunkDecodeJob : DecodeJob {
  uint32_t c, chunk;
  size_t entries;
  DType value;      ///< type of the values
  size_t codes_at;  ///< of int8 values
};

__device__ __forceinline__ EntryValues values_of(const ChunkDecodeJob& job, const std::byte* payload) {
  return {payload + job.first, job.value, job.codes_at};
}

// Entries added where they belong; all other elements are left alone.
template <class O>
__global__ void __launch_bounds__(kBlockThreads) add_chunks(ChunkDecodeJob job) {
  if (!no_fault(job.verdict, job.fault)) return;
  const uint16_t* const index = reinterpret_cast<const uint16_t*>(job.payload + job.second);
  const EntryValues values = values_of(job, job.payload);
  O* const out = static_cast<O*>(job.out);
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < job.entries; i += size_t{gridDim.x} * blockDim.x) {
    O* const to = out + i / job.c * job.chunk + index[i];
    narrow(exact::add(widen(*to), exact::mul(values[i], job.scale)), to);
  }
}

/// The first of `size` rising indices that is not below `bound`.
__device__ __forceinline__ uint32_t lower_bound(const uint16_t* index, uint32_t size, uint32_t bound) {
  uint32_t begin = 0;
  while (size > 0) {
    const uint32_t half = size / 2;
    if (index[begin + half] < bound) {
      begin += half + 1, size -= half + 1;
    } else {
      size = half;
    }
  }
  return begin;
}

/// The entries of a tile: whole chunks, or a run within one.
struct TileEntries {
  size_t first;
  uint32_t count, in_chunk;  ///< in_chunk: where the tile begins in a longer chunk
};
__device__ __forceinline__ TileEntries entries_of_tile(const ChunkDecodeJob& job, const uint16_t* index, size_t begin,
                                                       uint32_t n) {
  TileEntries tile{begin / job.chunk * job.c, 0, 0};
  if (job.chunk <= kTile) {
    const uint32_t rest = n % job.chunk;
    tile.count = n / job.chunk * job.c + (rest < job.c ? rest : job.c);
  } else {
    tile.in_chunk = static_cast<uint32_t>(begin % job.chunk);
    const uint32_t all = job.entries - tile.first < job.c ? static_cast<uint32_t>(job.entries - tile.first) : job.c;
    const uint32_t from = lower_bound(index + tile.first, all, tile.in_chunk),
                   to = lower_bound(index + tile.first, all, tile.in_chunk + kTile);
    tile.first += from, tile.count = to - from;
  }
  return tile;
}
/// Where in its tile entry i of the tile belongs.
__device__ __forceinline__ uint32_t place_in_tile(const ChunkDecodeJob& job, const TileEntries& tile,
                                                  const uint16_t* index, uint32_t i) {
  return index[tile.first + i] + (job.chunk <= kTile ? i / job.c * job.chunk : 0u - tile.in_chunk);
}

// Stores: each warp builds a tile of 1024 in shared memory, zeros and its entries, and writes it in one run.
template <class O>
__global__ void __launch_bounds__(kTileWarps * 32) store_chunks(ChunkDecodeJob job) {
  __shared__ alignas(16) O tiles[kTileWarps][kTile];
  if (!no_fault(job.verdict, job.fault)) return;
  O* const tile = tiles[threadIdx.x / 32];
  const EntryValues values = values_of(job, job.payload);
  O* const out = static_cast<O*>(job.out);
  const uint16_t* const index = reinterpret_cast<const uint16_t*>(job.payload + job.second);
  const bool fast = four_aligned(out);
  const unsigned lane = lane_id();
  const size_t count = job.count / kTile + (job.count % kTile != 0);
  for (size_t at = size_t{blockIdx.x} * kTileWarps + threadIdx.x / 32; at < count;
       at += size_t{gridDim.x} * kTileWarps) {
    const size_t begin = at * kTile;
    const uint32_t n = job.count - begin < kTile ? static_cast<uint32_t>(job.count - begin) : kTile;
    for (uint32_t i = lane; i < kTile * sizeof(O) / 16; i += 32) reinterpret_cast<uint4*>(tile)[i] = uint4{};
    const TileEntries entries = entries_of_tile(job, index, begin, n);
    __syncwarp();
    for (uint32_t i = lane; i < entries.count; i += 32) {
      narrow(exact::mul(values[entries.first + i], job.scale), tile + place_in_tile(job, entries, index, i));
    }
    __syncwarp();
    if (fast && n == kTile) {
      for (uint32_t i = lane * 4; i < kTile; i += 128) store4(out + begin + i, tile + i);
    } else {
      for (uint32_t i = lane; i < n; i += 32) out[begin + i] = tile[i];
    }
    __syncwarp();
  }
}

// A tile of sums in shared memory, scaled and written in one run.
__device__ __forceinline__ void store_tile(const Vector& out, size_t begin, uint32_t n, float scale,
                                           const float* tile) {
  for (uint32_t i = 0; i < n; i += codecs::kGroup) {
    float v[kPerLane];
    load_room(tile + i, v);
#pragma unroll
    for (unsigned j = 0; j < kPerLane; ++j) v[j] = exact::mul(v[j], scale);
    out.store(begin + i, n - i < codecs::kGroup ? n - i : codecs::kGroup, v);
  }
}

// The sum of all ranks' entries, in rank order: as store_chunks, with a tile of f32.
__global__ void __launch_bounds__(kTileWarps * 32) sum_chunks(ChunkDecodeJob job) {
  __shared__ alignas(16) float tiles[kTileWarps][kTile];
  if (!no_fault(job.verdict, job.fault)) return;
  float* const tile = tiles[threadIdx.x / 32];
  const Vector out(job.out, job.dtype);
  const unsigned lane = lane_id();
  const size_t count = job.count / kTile + (job.count % kTile != 0);
  for (size_t at = size_t{blockIdx.x} * kTileWarps + threadIdx.x / 32; at < count;
       at += size_t{gridDim.x} * kTileWarps) {
    const size_t begin = at * kTile;
    const uint32_t n = job.count - begin < kTile ? static_cast<uint32_t>(job.count - begin) : kTile;
    for (uint32_t i = lane; i < kTile / 4; i += 32) reinterpret_cast<float4*>(tile)[i] = float4{};
    for (unsigned rank = 0; rank < job.ranks; ++rank) {
      const std::byte* const payload = job.payload + rank * job.stride;
      const uint16_t* const index = reinterpret_cast<const uint16_t*>(payload + job.second);
      const EntryValues values = values_of(job, payload);
      const TileEntries entries = entries_of_tile(job, index, begin, n);
      __syncwarp();  // the places of one rank are distinct, those of the next are not
      for (uint32_t i = lane; i < entries.count; i += 32) {
        float* const to = tile + place_in_tile(job, entries, index, i);
        const float d = values[entries.first + i];
        *to = rank == 0 ? d : exact::add(*to, d);
      }
    }
    __syncwarp();
    store_tile(out, begin, n, job.scale, tile);
    __syncwarp();
  }
}

}  // namespace
}  // namespace gradgate::kernels::cuda
