// chunk-topk, the other way: every index is checked before a byte is written, then the entries are stored among zeros
// or added where they belong. Payload bytes read twice, the output written once.
#pragma once

#include "codecs/chunk_topk.h"
#include "kernels/cuda/blocks.cuh"
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
  const auto keep = [&](uint64_t fault) {
    atomicMin(reinterpret_cast<unsigned long long*>(job.verdict), static_cast<unsigned long long>(fault));
  };
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const uint64_t fault = header_fault(payload, job.header, rank);
    if (fault != 0) keep(fault);
  }
  const uint16_t* const index = reinterpret_cast<const uint16_t*>(payload + job.indices_at);
  bool wrong = false;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < job.entries; i += size_t{gridDim.x} * blockDim.x) {
    const size_t chunk = i / job.c, left = job.count - chunk * job.chunk;
    const uint32_t length = left < job.chunk ? static_cast<uint32_t>(left) : job.chunk;
    wrong |= index[i] >= length || (i - chunk * job.c > 0 && index[i] <= index[i - 1]);
  }
  if (__syncthreads_or(wrong) && threadIdx.x == 0)
    keep(kFaultSet | static_cast<uint64_t>(rank) << 16 | static_cast<uint64_t>(PayloadFault::index) << 8);
}

struct ChunkDecodeJob : DecodeJob {
  uint32_t c, chunk;
  size_t entries;
};

template <class V>
__device__ __forceinline__ float entry_value(const std::byte* values, size_t i) {
  if constexpr (sizeof(V) == 4) {
    return exact::from_bits(reinterpret_cast<const uint32_t*>(values)[i]);
  } else {
    return codecs::widen_bf16(reinterpret_cast<const uint16_t*>(values)[i]);
  }
}

// Entries added where they belong; all other elements are left alone.
template <class V, class O>
__global__ void __launch_bounds__(kBlockThreads) add_chunks(ChunkDecodeJob job) {
  if (!no_fault(job.verdict, job.fault)) return;
  const uint16_t* const index = reinterpret_cast<const uint16_t*>(job.payload + job.second);
  O* const out = static_cast<O*>(job.out);
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < job.entries; i += size_t{gridDim.x} * blockDim.x) {
    O* const to = out + i / job.c * job.chunk + index[i];
    narrow(exact::add(widen(*to), exact::mul(entry_value<V>(job.payload + job.first, i), job.scale)), to);
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

// Stores: each warp builds a tile of 1024 in shared memory, zeros and its entries, and writes it in one run.
template <class V, class O>
__global__ void __launch_bounds__(kTileWarps * 32) store_chunks(ChunkDecodeJob job) {
  __shared__ alignas(16) O tiles[kTileWarps][kTile];
  if (!no_fault(job.verdict, job.fault)) return;
  O* const tile = tiles[threadIdx.x / 32];
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
    // The tile's entries: whole chunks, or a run within one.
    const size_t chunk = begin / job.chunk;
    const uint32_t in_chunk = static_cast<uint32_t>(begin % job.chunk);
    size_t entry = chunk * job.c;
    uint32_t entries;
    if (job.chunk <= kTile) {
      const uint32_t rest = n % job.chunk;
      entries = n / job.chunk * job.c + (rest < job.c ? rest : job.c);
    } else {
      const uint32_t all = job.entries - entry < job.c ? static_cast<uint32_t>(job.entries - entry) : job.c;
      const uint32_t from = lower_bound(index + entry, all, in_chunk),
                     to = lower_bound(index + entry, all, in_chunk + kTile);
      entry += from, entries = to - from;
    }
    __syncwarp();
    for (uint32_t i = lane; i < entries; i += 32) {
      const uint32_t base = job.chunk <= kTile ? i / job.c * job.chunk : 0;
      narrow(exact::mul(entry_value<V>(job.payload + job.first, entry + i), job.scale),
             tile + base + index[entry + i] - (job.chunk <= kTile ? 0 : in_chunk));
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

}  // namespace
}  // namespace gradgate::kernels::cuda
