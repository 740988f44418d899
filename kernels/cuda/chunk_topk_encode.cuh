// chunk-topk: a team (a warp for chunks up to 1024, a CTA for longer ones) holds a chunk in shared memory, finds the
// c-th greatest magnitude and writes what comes first in the order, in ascending index order. One read of the gradient,
// and with feedback one read and one write of the residual.
//
// The search never looks at every element twice: the greatest of every four consecutive elements stay in registers, and
// a bisection over those gives a bound that at least c elements reach. Elements that reach it (a few more than c) are
// listed, and the exact place is found in the list.
#pragma once

#include "codecs/chunk_topk.h"
#include "codecs/codecs.h"
#include "kernels/cuda/blocks.cuh"
#include "kernels/cuda/entries.cuh"
#include "kernels/cuda/group.cuh"

namespace gradgate::kernels::cuda {
namespace {

inline constexpr uint32_t kGroup = static_cast<uint32_t>(codecs::kGroup);
inline constexpr uint32_t kWarpChunk = 1024;  // the longest chunk of a warp
inline constexpr unsigned kSmallTeams = 4;    // warps a CTA, where a warp is a team
inline constexpr unsigned kLargeWarps = 8;    // warps of a team, where a CTA is one

/// Elements that a team forms at once: a chunk, or the group of several short ones.
__host__ __device__ constexpr uint32_t unit_of(uint32_t chunk) { return chunk > kGroup ? chunk : kGroup; }

struct ChunkJob : EncodeJob {
  uint32_t c, chunk;
  DType value;         ///< type of the values
  size_t codes_at;     ///< of int8 values in a payload
  std::byte* entries;  ///< where values go: section 0, or room for x in the workspace
  std::byte* spill;    ///< memory of the teams where shared memory is too small for a chunk, else null
};

__device__ __forceinline__ uint32_t key_of(float x) { return codecs::topk_key(exact::mag(x)); }
__device__ __forceinline__ unsigned lanes_below() { return (1u << lane_id()) - 1; }

// Threads that work on one chunk. kWarps 1: every warp of the CTA is a team of its own.
template <int kWarps>
struct Team {
  uint32_t* scratch;  ///< 3 * kWarps words of shared memory

  __device__ static unsigned warp() { return kWarps == 1 ? 0 : threadIdx.x / 32; }
  __device__ static void sync() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  /// Sum over the team of a value each lane has.
  __device__ uint32_t sum(uint32_t v) const {
    v = warp_sum(v);
    if constexpr (kWarps > 1) {
      if (lane_id() == 0) scratch[warp()] = v;
      __syncthreads();
      v = 0;
      for (int w = 0; w < kWarps; ++w) v += scratch[w];
      __syncthreads();
    }
    return v;
  }
  __device__ uint32_t max(uint32_t v) const {
    v = warp_max(v);
    if constexpr (kWarps > 1) {
      if (lane_id() == 0) scratch[warp()] = v;
      __syncthreads();
      v = 0;
      for (int w = 0; w < kWarps; ++w) v = v > scratch[w] ? v : scratch[w];
      __syncthreads();
    }
    return v;
  }
};

// The greatest t that at least k counted keys reach, or (`enough` > k) any t that k to `enough` reach. count(t): how
// many reach t; all are below `above`. Gradients crowd below their greatest: steps down from there double, then halve.
template <class Count>
__device__ __forceinline__ uint32_t threshold(uint32_t above, uint32_t k, uint32_t enough, const Count& count) {
  uint32_t low = 0, high = above, step = 1u << 21;  // a quarter of an octave
  while (low == 0 && high > 0) {
    const uint32_t t = high > step ? high - step : 0;
    const uint32_t reached = t == 0 ? 0xffffffffu : count(t);
    if (reached >= k) {
      low = t;
      if (t != 0 && reached <= enough) return t;
      break;
    }
    high = t;
    step *= 2;
  }
  while (high - low > 1) {
    const uint32_t t = low + (high - low) / 2, reached = count(t);
    if (reached >= k) {
      low = t;
      if (reached <= enough) return t;
    } else {
      high = t;
    }
  }
  return low;
}

// The greatest of every four neighbours of a chunk that is shorter than a group: two rows of 128, the second perhaps
// beyond the end.
__device__ __forceinline__ void find_peaks(const float* x, uint32_t length, uint32_t* peak) {
#pragma unroll
  for (unsigned j = 0; j < 8; ++j) peak[j] = 0;
#pragma unroll
  for (unsigned row = 0; row < 2; ++row) {
    const uint32_t i = row * 128 + lane_id() * 4;
    float v[4] = {};
    if (i < length) load4(x + i, v);
#pragma unroll
    for (unsigned s = 0; s < 4; ++s) {
      if (i + s < length) peak[row] = ::max(peak[row], key_of(v[s]));
    }
  }
}

// Indices of the elements whose key reaches `bound`, in index order; returns how many. No key exceeds that of NaN, so
// magnitudes may stand for keys here.
template <bool kGuard>
__device__ __forceinline__ uint32_t list_candidates(const float* x, uint32_t row_begin, uint32_t row_end,
                                                    uint32_t length, const uint32_t* peak, uint32_t bound,
                                                    uint16_t* list) {
  uint32_t listed = 0;
  for (uint32_t row = row_begin; row < row_end; row += 8) {
#pragma unroll
    for (unsigned j = 0; j < 8; ++j) {
      if (row + j >= row_end) break;
      if (!__any_sync(kFull, peak[j] >= bound)) continue;  // a peak is that of several rows, where there are many
      const uint32_t i = (row + j) * 128 + lane_id() * 4;
      float v[4];
      load4(x + i, v);
      unsigned votes[4], before = 0, all = 0;
      bool reaches[4];
#pragma unroll
      for (unsigned s = 0; s < 4; ++s) {
        reaches[s] = exact::mag(v[s]) >= bound && (!kGuard || i + s < length);
        votes[s] = __ballot_sync(kFull, reaches[s]);
        before += __popc(votes[s] & lanes_below());
        all += __popc(votes[s]);
      }
      uint32_t at = listed + before;
#pragma unroll
      for (unsigned s = 0; s < 4; ++s) {
        if (reaches[s]) list[at++] = static_cast<uint16_t>(i + s);
      }
      listed += all;
    }
  }
  return listed;
}

// Values and indices of one chunk's entries; with feedback x of the chosen becomes their residual. Each warp owns
// rows_each rows of 128; peak: the greatest keys of its lanes' fours, of rows 0, 8, 16 … in peak[0], and so on.
template <int kWarps, bool kFeedback>
__device__ void select_chunk(const Team<kWarps>& team, float* x, uint16_t* list, uint32_t length, uint32_t k,
                             uint32_t rows_each, const uint32_t* peak, const ChunkJob& job, size_t entry,
                             uint16_t* indices) {
  const unsigned lane = lane_id(), warp = team.warp();
  const uint32_t rows = (length + 127) / 128;
  const uint32_t row_begin = warp * rows_each, row_end = rows < row_begin + rows_each ? rows : row_begin + rows_each;
  const bool whole = length % 128 == 0;

  uint32_t top = 0;
#pragma unroll
  for (unsigned j = 0; j < 8; ++j) top = ::max(top, peak[j]);
  const uint32_t above = team.max(top) + 1;
  uint32_t bound = 0;
  const uint32_t peaks = (rows_each < 8 ? rows_each : 8) * 32 * kWarps;
  if (k * 2 <= peaks && k < length) {  // with fewer peaks the list would be nearly everything anyway
    const uint32_t enough = k + k / 4 + 8;
    bound = threshold(above, k, enough, [&](uint32_t t) {
      uint32_t n = 0;
#pragma unroll
      for (unsigned j = 0; j < 8; ++j) n += peak[j] >= t;
      return team.sum(n);
    });
  }

  // Each warp's part of the list begins where its rows do.
  uint16_t* const mine = list + row_begin * 128;
  const uint32_t listed = whole ? list_candidates<false>(x, row_begin, row_end, length, peak, bound, mine)
                                : list_candidates<true>(x, row_begin, row_end, length, peak, bound, mine);
  team.sync();

  // The c-th greatest of the list, exactly: at least k keys reach `last`, fewer exceed it.
  uint32_t last;
  if (kWarps == 1 && listed <= 32) {  // nearly always: the list in registers
    const uint32_t key = lane < listed ? key_of(x[mine[lane]]) : 0;
    last = threshold(above, k, k,
                     [&](uint32_t t) { return static_cast<uint32_t>(__popc(__ballot_sync(kFull, key >= t))); });
  } else {
    last = threshold(above, k, k, [&](uint32_t t) {
      uint32_t n = 0;
      for (uint32_t i = lane; i < listed; i += 32) n += key_of(x[mine[i]]) >= t;
      return team.sum(n);
    });
  }
  uint32_t greater = 0, equal = 0;
  for (uint32_t i = lane; i < listed; i += 32) {
    const uint32_t key = key_of(x[mine[i]]);
    greater += key > last;
    equal += key == last;
  }
  greater = warp_sum(greater), equal = warp_sum(equal);
  // Of the equal ones the first in index order are taken; what earlier warps take and write goes before.
  uint32_t ties = equal, place = 0;
  if constexpr (kWarps == 1) {
    ties = k - greater < equal ? k - greater : equal;
  } else {
    if (lane == 0) team.scratch[warp] = greater, team.scratch[kWarps + warp] = equal;
    __syncthreads();
    uint32_t left = k;
    for (int w = 0; w < kWarps; ++w) left -= team.scratch[w];
    for (unsigned w = 0; w < warp; ++w) {
      const uint32_t taken = left < team.scratch[kWarps + w] ? left : team.scratch[kWarps + w];
      place += team.scratch[w] + taken;
      left -= taken;
    }
    ties = left < equal ? left : equal;
    __syncthreads();
  }
  for (uint32_t base = 0; base < listed; base += 32) {
    const bool in = base + lane < listed;
    const uint32_t i = in ? mine[base + lane] : 0;
    const float v = in ? x[i] : 0.0f;
    const uint32_t key = key_of(v);
    const unsigned equals = __ballot_sync(kFull, in && key == last);
    const uint32_t rank = __popc(equals & lanes_below());
    const bool chosen = in && (key > last || (key == last && rank < ties));
    const unsigned votes = __ballot_sync(kFull, chosen);
    if (chosen) {
      const uint32_t to = place + __popc(votes & lanes_below());
      indices[to] = static_cast<uint16_t>(i);
      put_entry(job.entries, job.value, entry + to, v);
      if (kFeedback && exact::is_finite(v)) x[i] = left_of(v, job.value);
    }
    const uint32_t taken = __popc(equals);
    ties -= taken < ties ? taken : ties;
    place += __popc(votes);
  }
  team.sync();
}

/// First entry of the vector's element `begin`, a multiple of the chunk.
__device__ __forceinline__ size_t entry_of(const ChunkJob& job, size_t begin) { return begin / job.chunk * job.c; }

// The sum of all ranks' shards for the elements begin … begin+n-1, into x, in rank order.
template <int kWarps>
__device__ void sum_unit(const ChunkJob& job, size_t begin, uint32_t n, float* x) {
  constexpr unsigned kThreads = kWarps * 32;
  const unsigned t = kWarps == 1 ? lane_id() : threadIdx.x;
  const Vector own(job.gradient, job.dtype);
  const size_t first = job.first - job.payload, second = job.second - job.payload;
  const size_t entry = entry_of(job, begin);
  const uint32_t whole = n / job.chunk * job.c, rest = n % job.chunk;
  const uint32_t entries = whole + (rest < job.c ? rest : job.c);
  for (uint32_t i = n + t; i < (n + kGroup - 1) / kGroup * kGroup; i += kThreads) x[i] = 0.0f;  // the last group's rest
  for (unsigned rank = 0; rank < job.ranks; ++rank) {
    if (rank == job.self) {
      for (uint32_t i = t; i < n; i += kThreads)
        x[i] = rank == 0 ? own.get(begin + i) : exact::add(x[i], own.get(begin + i));
    } else {
      if (rank == 0) {
        for (uint32_t i = t; i < n; i += kThreads) x[i] = 0.0f;
        Team<kWarps>::sync();
      }
      const std::byte* term = job.terms + rank * job.stride;
      const EntryValues values{term + first, job.value, job.codes_at};
      const uint16_t* indices = reinterpret_cast<const uint16_t*>(term + second) + entry;
      for (uint32_t k = t; k < entries; k += kThreads) {  // places are distinct: their chunks and indices rise
        float* to = x + k / job.c * job.chunk + indices[k];
        const float d = values[entry + k];
        *to = rank == 0 ? d : exact::add(*to, d);
      }
    }
    Team<kWarps>::sync();
  }
}

template <bool kFeedback, bool kSum, int kWarps>
__global__ void __launch_bounds__(kWarps == 1 ? kSmallTeams * 32 : kWarps * 32, kWarps == 1 ? 6 : 3)
    encode_chunks(ChunkJob job) {
  extern __shared__ float4 shared[];  // for each team: x, and a list of as many indices
  __shared__ uint32_t scratch[3 * kWarps];
  constexpr unsigned kTeams = kWarps == 1 ? kSmallTeams : 1;
  if constexpr (kSum) {
    if (!may_encode(job)) return;
  }
  const unsigned team_in_cta = kWarps == 1 ? threadIdx.x / 32 : 0;
  const size_t team_id = size_t{blockIdx.x} * kTeams + team_in_cta, teams = size_t{gridDim.x} * kTeams;
  const uint32_t unit = unit_of(job.chunk);
  const size_t unit_bytes = size_t{unit} * 6;
  std::byte* const room = job.spill != nullptr ? job.spill + team_id * unit_bytes
                                               : reinterpret_cast<std::byte*>(shared) + team_in_cta * unit_bytes;
  float* const x = reinterpret_cast<float*>(room);
  uint16_t* const list = reinterpret_cast<uint16_t*>(room + size_t{unit} * 4);
  const Team<kWarps> team{scratch};
  const Vector gradient(job.gradient, job.dtype);
  const bool fast_e = four_aligned(job.residual);
  const size_t units = job.count / unit + (job.count % unit != 0);

  for (size_t at = team_id; at < units; at += teams) {
    const size_t begin = at * unit;
    const uint32_t n = job.count - begin < unit ? static_cast<uint32_t>(job.count - begin) : unit;
    if constexpr (kSum) sum_unit<kWarps>(job, begin, n, x);
    // Each warp forms a run of groups, and remembers of each the greatest of its lanes' fours and whether it is kept.
    const uint32_t groups = (n + kGroup - 1) / kGroup, groups_each = (groups + kWarps - 1) / kWarps;
    const uint32_t group_begin = team.warp() * groups_each;
    const uint32_t group_end = groups < group_begin + groups_each ? groups : group_begin + groups_each;
    uint32_t kept = 0;  // a bit for each group of this warp: at most 16
    uint32_t peak[8] = {};
    for (uint32_t base = group_begin; base < group_end; base += 4) {
#pragma unroll
      for (unsigned j = 0; j < 4; ++j) {
        const uint32_t group = base + j;
        if (group >= group_end) break;
        const uint32_t from = group * kGroup, size = n - from < kGroup ? n - from : kGroup;
        float v[kPerLane];
        if constexpr (kSum) {
          load4(x + from + lane_id() * 4, v);
          load4(x + from + 128 + lane_id() * 4, v + 4);
        } else {
          gradient.load(begin + from, size, v);
        }
        if (form_x<kFeedback>(job.residual + begin + from, size, fast_e, job.flush, v))
          kept |= 1u << (group - group_begin);
        uint32_t greatest[2] = {};
#pragma unroll
        for (unsigned i = 0; i < kPerLane; ++i) greatest[i >> 2] = ::max(greatest[i >> 2], exact::mag(v[i]));
        if (warp_max(::max(greatest[0], greatest[1])) >= exact::kInfBits)
          note_non_finite(v, job.payload, job.non_finite);
        peak[2 * j] = ::max(peak[2 * j], codecs::topk_key(greatest[0]));
        peak[2 * j + 1] = ::max(peak[2 * j + 1], codecs::topk_key(greatest[1]));
        store_room(x + from, v);  // zeros behind the end too
      }
    }
    team.sync();
    const size_t entry = entry_of(job, begin);
    uint16_t* const indices = reinterpret_cast<uint16_t*>(job.second) + entry;
    if (job.chunk >= kGroup) {
      select_chunk<kWarps, kFeedback>(team, x, list, n, n < job.c ? n : job.c, groups_each * 2, peak, job, entry,
                                      indices);
    } else {
      for (uint32_t from = 0, to = 0; from < n; from += job.chunk, to += job.c) {
        const uint32_t length = n - from < job.chunk ? n - from : job.chunk;
        find_peaks(x + from, length, peak);
        select_chunk<kWarps, kFeedback>(team, x + from, list, length, length < job.c ? length : job.c, 2, peak, job,
                                        entry + to, indices + to);
      }
    }
    if constexpr (kFeedback) {
      for (uint32_t group = group_begin; group < group_end; ++group) {
        if ((kept >> (group - group_begin) & 1) != 0) continue;
        const uint32_t from = group * kGroup, size = n - from < kGroup ? n - from : kGroup;
        float* const e = job.residual + begin + from;
        float v[kPerLane];
        load4(x + from + lane_id() * 4, v);
        load4(x + from + 128 + lane_id() * 4, v + 4);
        store_residual(e, size, fast_e, v);
      }
    }
    team.sync();
  }
}

}  // namespace
}  // namespace gradgate::kernels::cuda
