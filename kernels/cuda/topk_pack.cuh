// topk's payload, from a list of candidates and the last key.
#pragma once

#include "kernels/cuda/topk_job.cuh"

namespace gradgate::kernels::cuda {
namespace {

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
