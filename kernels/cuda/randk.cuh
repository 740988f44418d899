// randk: a random sample of the vector. Encoding reads everything, for the residual and for what is not finite: 4 bytes
// an element, with feedback 12. A warp forms a run of 1024 elements in shared memory and then looks for the entries in
// it, a lane an entry: which they are follows from their numbers alone. Equal to kernels/cpu/loops/randk.h.
#pragma once

#include "codecs/randk.h"
#include "kernels/cuda/blocks.cuh"
#include "kernels/cuda/chunk_topk_decode.cuh"
#include "kernels/cuda/entries.cuh"

namespace gradgate::kernels::cuda {
namespace {

struct RandkJob : EncodeJob {
  size_t entries;
  DType value;
  uint32_t* marked;  ///< a bit for every stratum that holds an x which is not finite; zero before
  float* before;     ///< with feedback receives e of each entry's element as it was
};

/// Calls f(entry, element) for the entries of the elements begin … end-1, by the lanes of a warp. The last stratum may
/// reach around to element 0, which is why it is asked for first.
template <class F>
__device__ __forceinline__ void for_entries(const codecs::Sample& sample, size_t begin, size_t end, const F& f) {
  const uint64_t start = sample.start(0);
  const unsigned around = begin < start ? 1 : 0;
  const uint64_t first = around != 0 ? 0 : sample.stratum(begin);
  const uint64_t stop = end > start ? sample.stratum(end - 1) + 1 : first;
  for (uint64_t k = lane_id(); k < around + (stop - first); k += 32) {
    const bool last = k < around;
    const uint64_t j = last ? sample.entries - 1 : first + k - around;
    const uint64_t at = codecs::Sample::place(sample.start(j), sample.start(j + 1), sample.draw(j));
    const uint64_t i = sample.element(at);
    if ((at >= sample.count) == last && i >= begin && i < end) f(j, i);
  }
}

template <bool kFeedback>
__global__ void __launch_bounds__(kTileWarps * 32) encode_randk(RandkJob job) {
  __shared__ alignas(16) float tiles[kTileWarps][kTile];
  __shared__ codecs::SampleWords words;
  if (threadIdx.x == 0) {
    words = codecs::SampleWords::of(seed_of(job));
    if (blockIdx.x == 0) *reinterpret_cast<codecs::SampleWords*>(job.first) = words;
  }
  __syncthreads();
  const codecs::Sample sample(words, job.count, job.entries);
  const Vector gradient(job.gradient, job.dtype);
  const bool fast_e = four_aligned(job.residual);
  float* const x = tiles[threadIdx.x / 32];
  constexpr unsigned kGroups = kTile / codecs::kGroup;
  const size_t count = job.count / kTile + (job.count % kTile != 0);
  for (size_t at = size_t{blockIdx.x} * kTileWarps + threadIdx.x / 32; at < count;
       at += size_t{gridDim.x} * kTileWarps) {
    const size_t begin = at * kTile, end = job.count - begin < kTile ? job.count : begin + kTile;
    unsigned kept = 0;
    for (unsigned g = 0; g < kGroups; ++g) {
      const size_t from = begin + g * codecs::kGroup;
      if (from >= end) break;
      const unsigned n = end - from < codecs::kGroup ? static_cast<unsigned>(end - from) : codecs::kGroup;
      float v[kPerLane];
      gradient.load(from, n, v);
      if (form_x<kFeedback>(job.residual + from, n, fast_e, job.flush, v)) kept |= 1u << g;
      if (warp_max(max_mag(v)) >= exact::kInfBits) {
        note_non_finite(v, job.payload, job.non_finite);
        for (unsigned j = 0; j < kPerLane; ++j) {
          if (exact::is_finite(v[j])) continue;
          const uint64_t stratum = sample.stratum(from + element(lane_id(), j));
          atomicOr(job.marked + stratum / 32, 1u << (stratum % 32));
        }
      }
      store_room(x + g * codecs::kGroup, v);
    }
    __syncwarp();
    for_entries(sample, begin, end, [&](uint64_t j, uint64_t i) {
      const float v = x[i - begin];
      put_entry(job.second, job.value, j, v);
      if constexpr (kFeedback) {
        job.before[j] = job.residual[i];
        if (exact::is_finite(v)) x[i - begin] = left_of(v, job.value);
      }
    });
    __syncwarp();
    if constexpr (kFeedback) {
      for (unsigned g = 0; g < kGroups; ++g) {
        const size_t from = begin + g * codecs::kGroup;
        if (from >= end) break;
        if ((kept >> g & 1u) != 0) continue;
        const unsigned n = end - from < codecs::kGroup ? static_cast<unsigned>(end - from) : codecs::kGroup;
        float v[kPerLane];
        load_room(x + g * codecs::kGroup, v);
        store_residual(job.residual + from, n, fast_e, v);
      }
    }
    __syncwarp();
  }
}

// Where a stratum holds an x that is not finite, NaN in the place of a finite value; its element keeps the e it had.
// Nothing to do, as a rule: the header says so.
__global__ void __launch_bounds__(kBlockThreads) spoil_entries(RandkJob job) {
  if ((static_cast<uint8_t>(job.payload[7]) & codecs::kFlagNonFinite) == 0) return;
  const codecs::Sample sample(*reinterpret_cast<const codecs::SampleWords*>(job.first), job.count, job.entries);
  for (size_t j = size_t{blockIdx.x} * blockDim.x + threadIdx.x; j < job.entries; j += size_t{gridDim.x} * blockDim.x) {
    if ((job.marked[j / 32] >> (j % 32) & 1u) == 0) continue;
    if (job.residual != nullptr) job.residual[sample.index(j)] = job.before[j];
    const EntryValues values{job.second, job.value, 0};
    if (exact::is_finite(values[j])) put_entry(job.second, job.value, j, exact::from_bits(exact::kNanBits));
  }
}

struct RandkDecodeJob : DecodeJob {
  size_t entries;
  DType value;
};

// Stores the one payload, or the sum of all in rank order: each warp builds tiles of 1024 elements in shared memory.
template <bool kSum>
__global__ void __launch_bounds__(kTileWarps * 32) store_randk(RandkDecodeJob job) {
  __shared__ alignas(16) float tiles[kTileWarps][kTile];
  const unsigned ranks = kSum ? job.ranks : 1;
  if (!headers_ok(job.payload, job.stride, ranks, ranks, job.header, job.fault)) return;
  float* const tile = tiles[threadIdx.x / 32];
  const Vector out(job.out, job.dtype);
  const size_t count = job.count / kTile + (job.count % kTile != 0);
  for (size_t at = size_t{blockIdx.x} * kTileWarps + threadIdx.x / 32; at < count;
       at += size_t{gridDim.x} * kTileWarps) {
    const size_t begin = at * kTile, end = job.count - begin < kTile ? job.count : begin + kTile;
    for (uint32_t i = lane_id(); i < kTile / 4; i += 32) reinterpret_cast<float4*>(tile)[i] = float4{};
    for (unsigned rank = 0; rank < ranks; ++rank) {
      const std::byte* const payload = job.payload + rank * job.stride;
      const codecs::Sample sample(*reinterpret_cast<const codecs::SampleWords*>(payload + job.first), job.count,
                                  job.entries);
      const EntryValues values{payload + job.second, job.value, 0};
      __syncwarp();  // the places of one rank are distinct, those of the next are not
      for_entries(sample, begin, end, [&](uint64_t j, uint64_t i) {
        float* const to = tile + (i - begin);
        const float d = values[j];
        if constexpr (kSum) {
          *to = rank == 0 ? d : exact::add(*to, d);
        } else {
          *to = exact::mul(d, job.scale);
        }
      });
    }
    __syncwarp();
    store_tile(out, begin, static_cast<uint32_t>(end - begin), kSum ? job.scale : 1.0f, tile);
    __syncwarp();
  }
}

// Entries added where they belong; all other elements are left alone.
__global__ void __launch_bounds__(kBlockThreads) add_randk(RandkDecodeJob job) {
  if (!headers_ok(job.payload, 0, 1, 1, job.header, job.fault)) return;
  const codecs::Sample sample(*reinterpret_cast<const codecs::SampleWords*>(job.payload + job.first), job.count,
                              job.entries);
  const EntryValues values{job.payload + job.second, job.value, 0};
  const Vector out(job.out, job.dtype);
  for (size_t j = size_t{blockIdx.x} * blockDim.x + threadIdx.x; j < job.entries; j += size_t{gridDim.x} * blockDim.x) {
    const size_t i = sample.index(j);
    out.put(i, exact::add(out.get(i), exact::mul(values[j], job.scale)));
  }
}

}  // namespace
}  // namespace gradgate::kernels::cuda
