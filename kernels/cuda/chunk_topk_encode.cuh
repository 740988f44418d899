// chunk-topk: a team (a warp for chunks up to 1024, a CTA of four or eight for longer ones) holds a chunk in shared
// memory, finds the c-th greatest magnitude and writes what comes first in the order, in ascending index order. One
// read of the gradient, and with feedback one read and one write of the residual.
//
// The search never looks at every element twice: the greatest of every four consecutive elements stay in registers, and
// a search over those gives a bound that at least c elements reach. Elements that reach it (a few more than c) are
// listed, and the exact place is found among their keys, which registers hold again. Searches guess where the wanted
// count lies between two that are known, so that they take a few steps, however many are kept.
#pragma once

#include "codecs/chunk_topk.h"
#include "codecs/codecs.h"
#include "kernels/cuda/blocks.cuh"
#include "kernels/cuda/entries.cuh"
#include "kernels/cuda/group.cuh"
#include "kernels/cuda/run_places.cuh"

namespace gradgate::kernels::cuda {
namespace {

inline constexpr uint32_t kGroup = static_cast<uint32_t>(codecs::kGroup);
inline constexpr unsigned kSmallTeams = 4;  // warps a CTA, where a warp is a team

/// Warps of a team: the more elements a lane has, the less the search costs each; but long chunks leave room for few
/// CTAs.
__host__ __device__ constexpr int team_warps(uint32_t chunk) { return chunk <= 1024 ? 1 : chunk <= 8192 ? 4 : 8; }

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
  uint32_t* scratch;  ///< 2 * kWarps words of shared memory

  __device__ static unsigned warp() { return kWarps == 1 ? 0 : threadIdx.x / 32; }
  __device__ static void sync() {
    if constexpr (kWarps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
  /// Sum over the team's warps of a value that the lanes of each have in common.
  __device__ uint32_t sum(uint32_t v) const {
    if constexpr (kWarps > 1) v = warp_sum(of_warp(v)), __syncthreads();
    return v;
  }
  __device__ uint32_t max(uint32_t v) const {
    if constexpr (kWarps > 1) v = warp_max(of_warp(v)), __syncthreads();
    return v;
  }

 private:
  /// Lane w gets the value of warp w, the others 0.
  __device__ uint32_t of_warp(uint32_t v) const {
    if (lane_id() == 0) scratch[warp()] = v;
    __syncthreads();
    return lane_id() < kWarps ? scratch[lane_id()] : 0;
  }
};

// Where the k-th greatest of some keys lies: at least k of them reach `key`, namely `reached`, and where those are more
// than allowed, fewer than k exceed it.
struct Threshold {
  uint32_t key, reached;
};

inline constexpr uint32_t kUnknown = 0xffffffffu;

// A key that k to `enough` reach, if there is one, between `low`, which is too low ({0, kUnknown} will do), and
// `above`, which no key reaches. count(t): how many reach t. Gradients crowd below their greatest: from 0, steps down
// from there double. Between two known counts a step goes to where a straight line has the wanted one; where the step
// before has moved the same end as the one before it, to the middle.
template <class Count>
__device__ __forceinline__ Threshold find_threshold(Threshold low, uint32_t above, uint32_t k, uint32_t enough,
                                                    const Count& count) {
  uint32_t high = above, beyond = 0, step = 1u << 22;  // half an octave
  const float wanted = 0.5f * static_cast<float>(k + enough);
  while (low.reached > enough && low.key == 0 && high > step) {
    const uint32_t t = high - step, reached = count(t);
    if (reached >= k) {
      low = {t, reached};
    } else {
      high = t, beyond = reached;
      step *= 2;
    }
  }
  bool middle = low.key == 0;
  int moved = 0;  // the end of the last step: 1 low, -1 high
  while (low.reached > enough && high - low.key > 1) {
    uint32_t ahead = (high - low.key) / 2;
    if (!middle) {
      const float part = __fdividef(static_cast<float>(low.reached) - wanted, static_cast<float>(low.reached - beyond));
      ahead = static_cast<uint32_t>(static_cast<float>(high - low.key) * part);
      ahead = ahead < 1 ? 1 : ahead < high - low.key ? ahead : high - low.key - 1;
    }
    const uint32_t t = low.key + ahead, reached = count(t);
    const int end = reached >= k ? 1 : -1;
    if (end > 0) {
      low = {t, reached};
    } else {
      high = t, beyond = reached;
    }
    middle = low.key == 0 || (!middle && end == moved);
    moved = end;
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

// Indices of the elements whose key reaches `bound`, of at most 4 · kWords rows, in index order; returns how many. No
// key exceeds that of NaN, so magnitudes may stand for keys here.
template <unsigned kWords>
__device__ __forceinline__ uint32_t list_rows(const float* x, uint32_t row_begin, uint32_t row_end, uint32_t length,
                                              const uint32_t* peak, uint32_t bound, uint16_t* list) {
  using Places = RunPlaces<kWords>;
  uint32_t mask = 0;
#pragma unroll
  for (unsigned r = 0; r < Places::kRuns; ++r) {
    const uint32_t i = (row_begin + r) * 128 + lane_id() * 4;
    // A peak is that of several rows, where there are many.
    if (peak[r] < bound || row_begin + r >= row_end || i >= length) continue;
    float v[4];
    load4(x + i, v);
    uint32_t four = 0;
#pragma unroll
    for (unsigned s = 0; s < 4; ++s) four |= exact::mag(v[s]) >= bound ? 1u << s : 0u;
    mask |= (four & (1u << ::min(length - i, 4u)) - 1) << (Places::kRunBits * r);
  }
  const Places places(mask);
  places.for_marked(mask, [&](unsigned j, uint32_t to) {
    list[to] = static_cast<uint16_t>((row_begin + j / 4) * 128 + lane_id() * 4 + j % 4);
  });
  return places.total;
}
__device__ __forceinline__ uint32_t list_candidates(const float* x, uint32_t row_begin, uint32_t row_end,
                                                    uint32_t length, const uint32_t* peak, uint32_t bound,
                                                    uint16_t* list) {
  if (row_end <= row_begin + 4) return list_rows<1>(x, row_begin, row_end, length, peak, bound, list);
  uint32_t listed = 0;
  for (uint32_t row = row_begin; row < row_end; row += 8)
    listed += list_rows<2>(x, row, row_end, length, peak, bound, list + listed);
  return listed;
}

// The keys of a warp's part of the list: the first kHeld of a lane in registers, which hold nearly always all.
template <unsigned kHeld>
class ListedKeys {
 public:
  __device__ ListedKeys(const float* x, const uint16_t* list, uint32_t listed) : x_(x), list_(list), listed_(listed) {
#pragma unroll
    for (unsigned j = 0; j < kHeld; ++j) {
      if (j * 32 >= listed) break;
      const uint32_t i = j * 32 + lane_id();
      held_[j] = i < listed ? key_of(x[list[i]]) : 0;
    }
  }
  /// Calls f(key) for each of the lane's; keys that are 0 may stand for none.
  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
#pragma unroll
    for (unsigned j = 0; j < kHeld; ++j) {
      if (j * 32 >= listed_) return;
      f(held_[j]);
    }
    for (uint32_t i = kHeld * 32 + lane_id(); i < listed_; i += 32) f(key_of(x_[list_[i]]));
  }
  /// How many of the warp's reach t > 0.
  __device__ __forceinline__ uint32_t reaching(uint32_t t) const {
    uint32_t n = 0;
    each([&](uint32_t key) { n += key >= t; });
    return warp_sum(n);
  }

 private:
  const float* x_;
  const uint16_t* list_;
  uint32_t listed_, held_[kHeld];
};

// Values and indices of one chunk's entries; with feedback x of the chosen becomes their residual. Each warp owns
// rows_each rows of 128; peak: the greatest keys of its lanes' fours, of rows 0, 8, 16 … in peak[0], and so on.
template <int kWarps, bool kFeedback>
__device__ void select_chunk(const Team<kWarps>& team, float* x, uint16_t* list, uint32_t length, uint32_t k,
                             uint32_t rows_each, const uint32_t* peak, const ChunkJob& job, size_t entry,
                             uint16_t* indices) {
  const unsigned lane = lane_id(), warp = team.warp();
  const uint32_t rows = (length + 127) / 128;
  const uint32_t row_begin = warp * rows_each, row_end = rows < row_begin + rows_each ? rows : row_begin + rows_each;

  uint32_t top = 0;  // of the lane
#pragma unroll
  for (unsigned j = 0; j < 8; ++j) top = ::max(top, peak[j]);
  const uint32_t above = team.max(warp_max(top)) + 1;
  Threshold bound{0, kUnknown};
  const uint32_t peaks = (rows_each < 8 ? rows_each : 8) * 32 * kWarps, enough = k + k / 4 + 8;
  if (k * 4 <= 32 * kWarps && k < length) {  // few: the greatest of each lane will do
    bound = find_threshold(bound, above, k, enough, [&](uint32_t t) {
      return team.sum(static_cast<uint32_t>(__popc(__ballot_sync(kFull, top >= t))));
    });
  } else if (k * 2 <= peaks && k < length) {  // with fewer peaks the list would be nearly everything anyway
    bound = find_threshold(bound, above, k, enough, [&](uint32_t t) {
      uint32_t n = 0;
#pragma unroll
      for (unsigned j = 0; j < 8; ++j) n += peak[j] >= t;
      return team.sum(warp_sum(n));
    });
  }

  // Each warp's part of the list begins where its rows do.
  uint16_t* const mine = list + row_begin * 128;
  const uint32_t listed = list_candidates(x, row_begin, row_end, length, peak, bound.key, mine);
  team.sync();

  // The c-th greatest of the list, exactly. As a rule there is a key that exactly k reach; else some equal ones are
  // left.
  const ListedKeys<kWarps == 1 ? 8 : 4> keys(x, mine, listed);
  bound.reached = team.sum(listed);
  const Threshold found = find_threshold(bound, above, k, k, [&](uint32_t t) { return team.sum(keys.reaching(t)); });
  const bool untied = found.reached == k && found.key > 0;
  const uint32_t last = untied ? found.key - 1 : found.key;  // the greatest key that does not go for certain
  const uint32_t greater = kWarps == 1 && untied ? k : keys.reaching(last + 1);
  const uint32_t equal = untied ? 0 : last == 0 ? listed - greater : keys.reaching(last) - greater;
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
__global__ void __launch_bounds__(kWarps == 1 ? kSmallTeams * 32 : kWarps * 32, kWarps == 8 ? 2 : 5)
    encode_chunks(ChunkJob job) {
  extern __shared__ float4 shared[];  // for each team: x, and a list of as many indices
  __shared__ uint32_t scratch[2 * kWarps];
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
