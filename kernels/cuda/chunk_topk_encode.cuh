// chunk-topk: a team (a warp for chunks up to 1024, a CTA of four or eight for longer ones) holds a chunk in shared
// memory, finds the c-th greatest magnitude and writes what comes first in the order, in ascending index order. One
// read of the gradient, and with feedback one read and one write of the residual.
//
// While x is formed, the greatest of every four neighbours stay in registers, and a search over those gives a bound
// that at least c elements reach. Then each lane looks through 32 neighbours, which makes a list of the elements that
// reach it, a few more than c, and the exact place is found among their keys, which registers hold again: where they
// are few, every warp of a team has all of them, and asks no other. Searches guess where the wanted count lies between
// two that are known, so that they take a few steps, however many are kept.
#pragma once

#include "codecs/codecs.h"
#include "kernels/cuda/blocks.cuh"
#include "kernels/cuda/chunk_topk_search.cuh"
#include "kernels/cuda/entries.cuh"

namespace gradgate::kernels::cuda {
namespace {

inline constexpr uint32_t kGroup = static_cast<uint32_t>(codecs::kGroup);
inline constexpr unsigned kSmallTeams = 4;  // warps a CTA, where a warp is a team

/// Warps of a team: the more elements a lane has, the less the search costs each; but long chunks leave room for few
/// CTAs.
__host__ __device__ constexpr int team_warps(uint32_t chunk) { return chunk <= 1024 ? 1 : chunk <= 8192 ? 4 : 8; }

/// Elements that a team forms at once: a chunk, or the group of several short ones.
__host__ __device__ constexpr uint32_t unit_of(uint32_t chunk) { return chunk > kGroup ? chunk : kGroup; }

/// What a team has in memory: x, and a list of as many places.
__host__ __device__ constexpr size_t team_bytes(uint32_t chunk) {
  return ChunkRoom::bytes(unit_of(chunk)) + unit_of(chunk) * sizeof(uint16_t);
}

/// Bytes of a value as it is written there: of int8 values first x is kept.
__host__ __device__ constexpr uint32_t value_width(DType value) { return value == DType::bf16 ? 2 : 4; }

struct ChunkJob : EncodeJob {
  uint32_t c, chunk;
  uint32_t unit;                                     ///< elements that a team forms at once
  uint32_t unit_entries, unit_values, unit_indices;  ///< their entries, and the bytes of their values and indices
  uint32_t room, list_at;                            ///< bytes that a team has in memory, and where its list begins
  size_t units;                                      ///< of the vector, the last one perhaps shorter
  size_t k;                                          ///< its entries
  DType value;                                       ///< type of the values
  size_t codes_at;                                   ///< of int8 values in a payload
  std::byte* entries;                                ///< where values go: section 0, or room for x in the workspace
  std::byte* spill;  ///< memory of the teams where shared memory is too small for a chunk, else null
};

// The greatest of every four neighbours of a chunk that is shorter than a group: two rows of 128, the second perhaps
// beyond the end.
__device__ __forceinline__ void find_peaks(const ChunkRoom& x, uint32_t length, uint32_t* peak) {
#pragma unroll
  for (unsigned j = 0; j < 8; ++j) peak[j] = 0;
#pragma unroll
  for (unsigned row = 0; row < 2; ++row) {
    const uint32_t i = row * 128 + lane_id() * 4;
    float v[4] = {};
    if (i < length) load4(x.at(i), v);
#pragma unroll
    for (unsigned s = 0; s < 4; ++s) {
      if (i + s < length) peak[row] = ::max(peak[row], key_of(v[s]));
    }
  }
}

// Places of the elements begin … end-1 whose key reaches `bound`, at most that of Inf, by a warp, in index order;
// returns how many. A lane looks at `each` neighbours, 4 to 32. kOnce: the warp looks at all of them at once.
template <bool kOnce>
__device__ __forceinline__ uint32_t list_candidates(const ChunkRoom& x, uint32_t begin, uint32_t end, uint32_t each,
                                                    uint32_t bound, uint16_t* list) {
  const float reach = exact::from_bits(held(bound));
  uint32_t listed = 0;
  for (; begin < end; begin += 32 * each) {
    const uint32_t first = begin + lane_id() * each, place = ChunkRoom::place(first);
    uint32_t mask = 0;
    if (first < end) {
      mark_reaching(x.first + place, each, reach, &mask);
      // Else zeros behind the end fall short.
      if (bound == 0 && held(end - first) < each) mask &= ~(~0u >> (end - first));
    }
    const uint32_t count = __popc(mask), upto = sum_up_to(count);
    uint16_t* to = list + (listed + upto - count);
    listed += __shfl_sync(kFull, upto, 31);
    while (mask != 0) {  // from the first neighbour's bit, the highest, on
      const int at = __clz(static_cast<int>(mask));
      *to++ = static_cast<uint16_t>(place + at);
      mask &= 0x7fffffffu >> at;
    }
    if (kOnce) break;
  }
  return listed;
}

// A key that k of the chunk's elements reach, and not many more: 0 where there is none, or where the list would be
// nearly everything anyway. Each warp owns rows_each rows of 128; peak: the greatest magnitudes of its lanes' fours, of
// rows 0, 8, 16 … in peak[0], and so on; greatest: of all the warp's.
template <int kWarps>
__device__ __forceinline__ uint32_t find_bound(const Team<kWarps>& team, const uint32_t* peak, uint32_t greatest,
                                               uint32_t rows_each, uint32_t k, uint32_t spacing, uint32_t* above) {
  uint32_t top[kWarps] = {};  // of a lane of each warp
#pragma unroll
  for (unsigned j = 0; j < 8; ++j) top[0] = ::max(top[0], peak[j]);
  if constexpr (kWarps > 1) {
    team.memory->top[threadIdx.x] = top[0];
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      top[w] = team.memory->top[w * 32 + lane_id()];
      greatest = ::max(greatest, top[w]);
    }
    greatest = warp_max(greatest);
  }
  *above = codecs::topk_key(greatest) + spacing;

  const uint32_t peaks = (rows_each < 8 ? rows_each : 8) * 32 * kWarps, enough = k + k / 4 + 8;
  if (k * 4 <= 32 * kWarps) {  // few: the greatest of each lane will do
    const auto reaching = [&](uint32_t t) {
      uint32_t mask = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) mask = with_short(mask, top[w], t);
      return 32 * kWarps - warp_sum(__popc(mask));
    };
    return find_threshold({0, 32 * kWarps, 0}, *above, spacing, kOctave * 3 / 8, k, enough, reaching).key;
  }
  if (k * 2 > peaks) return 0;
  const auto reaching = [&](uint32_t t) {
    uint32_t mask = 0;
#pragma unroll
    for (unsigned j = 0; j < 8; ++j) mask = with_short(mask, peak[j], t);
    return 256 * kWarps - team.sum(warp_sum(__popc(mask)));
  };
  const uint32_t step = k * 8 > peaks ? kOctave : kOctave / 2;  // many lie further below the greatest
  return find_threshold({0, 256 * kWarps, 0}, *above, spacing, step, k, enough, reaching).key;
}

// Values and indices of one chunk's entries; with feedback x of the chosen becomes their residual. Keys are multiples
// of `spacing`, as those of a gradient of few bits are, but that of NaN.
template <int kWarps, bool kFeedback>
__device__ void select_chunk(const Team<kWarps>& team, const ChunkRoom& x, uint16_t* list, uint32_t length, uint32_t k,
                             uint32_t rows_each, const uint32_t* peak, uint32_t greatest, uint32_t spacing,
                             const ChunkJob& job, std::byte* values, uint16_t* indices) {
  const unsigned lane = lane_id(), warp = team.warp();
  uint32_t above = 0, bound = 0;
  if (k < length) bound = ::min(find_bound(team, peak, greatest, rows_each, k, spacing, &above), exact::kInfBits);

  // Each warp lists a part of the chunk.
  const uint32_t part = job.chunk / kWarps, begin = warp * part, each = ::max(::min(part / 32, 32u), 4u);
  const uint32_t listed =
      list_candidates<kWarps == 1>(x, begin, ::min(begin + part, length), each, bound, list + begin);
  const ListedKeys<kWarps> keys(team, x, list, part, listed);

  // The c-th greatest of the list, exactly. As a rule there is a key that exactly k reach; else some equal ones are
  // left.
  spacing = held(above > exact::kInfBits + spacing ? 1 : spacing);  // Inf and NaN are next to each other
  const Threshold found = keys.find(bound, above, spacing, k);
  const bool untied = found.reached == k && found.key > 0;
  const uint32_t last = untied ? found.key - 1 : found.key;  // the greatest key that does not go for certain
  // Of the equal ones the first in index order are taken; what earlier warps take and write goes before.
  int ties = 0;  // fewer than none: they were taken
  uint32_t place = 0;
  if (!untied && keys.whole()) ties = k - found.exceeding;
  if (!keys.whole()) {
    const uint32_t greater = keys.reaching(last + 1);
    const uint32_t equal = untied ? 0 : (last == 0 ? keys.size() : keys.reaching(last)) - greater;
    if (lane == 0) team.memory->greater[warp] = greater, team.memory->equal[warp] = equal;
    __syncthreads();
    ties = k;
    for (int w = 0; w < kWarps; ++w) ties -= team.memory->greater[w];
    for (unsigned w = 0; w < warp; ++w) {
      const uint32_t taken = ::min(static_cast<uint32_t>(ties), team.memory->equal[w]);
      place += team.memory->greater[w] + taken;
      ties -= taken;
    }
  }
  keys.each_row([&](unsigned j, uint32_t key) {
    bool chosen = key > last;
    if (!untied) {
      // What stands behind the last key is no element: of a whole list, those come first, and there are enough.
      const bool tied = key == last && (keys.whole() || j * 32 + lane < keys.size());
      const unsigned equals = __ballot_sync(kFull, tied);
      chosen = chosen || (tied && static_cast<int>(__popc(equals & lanes_below())) < ties);
      ties -= __popc(equals);
    }
    const unsigned votes = __ballot_sync(kFull, chosen);
    if (chosen && (!keys.whole() || j % kWarps == warp)) {
      const uint32_t to = place + __popc(votes & lanes_below()), at = keys.place(j * 32 + lane);
      const float v = x.first[at];
      indices[to] = static_cast<uint16_t>(ChunkRoom::element(at));
      put_entry(values, job.value, to, v);
      if (kFeedback && exact::is_finite(v)) x.first[at] = left_of(v, job.value);
    }
    place += __popc(votes);
  });
  team.sync();
}

// The sum of all ranks' shards for the elements begin … begin+n-1, into x, in rank order; their first entry is `entry`.
template <int kWarps>
__device__ void sum_unit(const ChunkJob& job, size_t begin, uint32_t n, size_t entry, const ChunkRoom& x) {
  constexpr unsigned kThreads = kWarps * 32;
  const unsigned t = kWarps == 1 ? lane_id() : threadIdx.x;
  const Vector own(job.gradient, job.dtype);
  const size_t first = job.first - job.payload, second = job.second - job.payload;
  const uint32_t whole = n / job.chunk * job.c, rest = n % job.chunk;
  const uint32_t entries = whole + (rest < job.c ? rest : job.c);
  const auto each_element = [&](const auto& f) {  // f(element, where its x is) for the thread's
    float* at = x.at(t);
    for (uint32_t i = t; i < n; i += kThreads, at += ChunkRoom::kRow * kThreads / 128) f(i, at);
  };
  for (uint32_t i = n + t; i < (n + kGroup - 1) / kGroup * kGroup; i += kThreads) x[i] = 0.0f;  // the last group's rest
  for (unsigned rank = 0; rank < job.ranks; ++rank) {
    if (rank == job.self) {
      each_element(
          [&](uint32_t i, float* at) { *at = rank == 0 ? own.get(begin + i) : exact::add(*at, own.get(begin + i)); });
    } else {
      if (rank == 0) {
        each_element([](uint32_t, float* at) { *at = 0.0f; });
        Team<kWarps>::sync();
      }
      const std::byte* term = job.terms + rank * job.stride;
      const EntryValues values{term + first, job.value, job.codes_at};
      const uint16_t* indices = reinterpret_cast<const uint16_t*>(term + second) + entry;
      for (uint32_t k = t; k < entries; k += kThreads) {  // places are distinct: their chunks and indices rise
        float* const to = x.at(k / job.c * job.chunk + indices[k]);
        const float d = values[entry + k];
        *to = rank == 0 ? d : exact::add(*to, d);
      }
    }
    Team<kWarps>::sync();
  }
}

// Groups that a warp forms at once, and the lane's elements of them in whole ones of a gradient that is `fast`.
inline constexpr unsigned kRun = 4;
template <class T>
__device__ __forceinline__ void load_run(const T* from, float* v) {
#pragma unroll
  for (unsigned j = 0; j < 2 * kRun; ++j) load4(from + j * 128 + lane_id() * 4, v + j * 4);
}
__device__ __forceinline__ void load_run(const Vector& from, size_t begin, float* v) {
  if (from.dtype == DType::f32) {
    load_run(from.at<float>(begin), v);
  } else if (from.dtype == DType::bf16) {
    load_run(from.at<uint16_t>(begin), v);
  } else {
    load_run(from.at<codecs::F16>(begin), v);
  }
}

// CTAs of a processor: as many as registers allow without spilling.
template <bool kFeedback, int kWarps>
inline constexpr int kResident = kWarps == 8                ? 2
                                 : kWarps == 1 && kFeedback ? 4
                                                            : 5;

template <bool kFeedback, bool kSum, int kWarps>
__global__ void __launch_bounds__(kWarps == 1 ? kSmallTeams * 32 : kWarps * 32, kResident<kFeedback, kWarps>)
    encode_chunks(ChunkJob job) {
  extern __shared__ float4 shared[];
  __shared__ TeamMemory<kWarps> memory;
  constexpr unsigned kTeams = kWarps == 1 ? kSmallTeams : 1;
  if constexpr (kSum) {
    if (!may_encode(job)) return;
  }
  const unsigned team_in_cta = kWarps == 1 ? threadIdx.x / 32 : 0;
  const size_t team_id = size_t{blockIdx.x} * kTeams + team_in_cta, teams = size_t{gridDim.x} * kTeams;
  const uint32_t unit = job.unit;
  std::byte* const room = job.spill != nullptr ? job.spill + team_id * job.room
                                               : reinterpret_cast<std::byte*>(shared) + team_in_cta * job.room;
  const ChunkRoom x{reinterpret_cast<float*>(room)};
  uint16_t* const list = reinterpret_cast<uint16_t*>(room + job.list_at);
  const Team<kWarps> team{&memory};
  const Vector gradient(job.gradient, job.dtype);
  const bool fast_e = four_aligned(job.residual);
  const bool all_bits = kFeedback || kSum || job.dtype == DType::f32;
  const uint32_t spacing = all_bits ? 1 : job.dtype == DType::bf16 ? 1u << 16 : 1u << 13;

  for (size_t at = team_id; at < job.units; at += teams) {
    const size_t begin = at * unit;
    const uint32_t n = job.count - begin < unit ? static_cast<uint32_t>(job.count - begin) : unit;
    if constexpr (kSum) sum_unit<kWarps>(job, begin, n, at * job.unit_entries, x);
    // Each warp forms a run of groups, and remembers of each the greatest of its lanes' fours and whether it is kept.
    const uint32_t groups = (n + kGroup - 1) / kGroup, groups_each = (groups + kWarps - 1) / kWarps;
    const uint32_t group_begin = team.warp() * groups_each;
    const uint32_t group_end = groups < group_begin + groups_each ? groups : group_begin + groups_each;
    uint32_t kept = 0;  // a bit for each group of this warp: at most 16
    uint32_t peak[8] = {};
    float* to = x.at(group_begin * kGroup + lane_id() * 4);
    for (uint32_t base = group_begin; kWarps == 1 || base < group_end; base += kRun, to += 2 * kRun * ChunkRoom::kRow) {
      const auto form = [&](unsigned j, uint32_t from, uint32_t size, float* v) {
        if (form_x<kFeedback>(job.residual + begin + from, size, fast_e, job.flush, v))
          kept |= 1u << (base + j - group_begin);
        peak[2 * j] = ::max(peak[2 * j], max_mag_of_four(v));
        peak[2 * j + 1] = ::max(peak[2 * j + 1], max_mag_of_four(v + 4));
        ChunkRoom::store(to + 2 * j * ChunkRoom::kRow, v);  // zeros behind the end too
      };
      if (!kSum && gradient.fast && base + kRun <= group_end && n - base * kGroup >= kRun * kGroup) {
        float v[kRun * kPerLane];
        load_run(gradient, begin + base * kGroup, v);
#pragma unroll
        for (unsigned j = 0; j < kRun; ++j) form(j, (base + j) * kGroup, kGroup, v + j * kPerLane);
      } else {
#pragma unroll
        for (unsigned j = 0; j < kRun; ++j) {
          const uint32_t group = base + j;
          if (group >= group_end) break;
          const uint32_t from = group * kGroup, size = n - from < kGroup ? n - from : kGroup;
          float v[kPerLane];
          if constexpr (kSum) {
            ChunkRoom::load(to + 2 * j * ChunkRoom::kRow, v);
          } else {
            // Here, or places of a part of a group are worked out before the loop, where they are seldom wanted.
            gradient.load(begin + from, size, v, held(lane_id()));
          }
          form(j, from, size, v);
        }
      }
      if (kWarps == 1) break;  // a unit has no more
    }
    uint32_t top = 0;
#pragma unroll
    for (unsigned j = 0; j < 8; ++j) top = ::max(top, peak[j]);
    const uint32_t greatest = warp_max(top);
    if (greatest >= exact::kInfBits) {
      for (uint32_t group = group_begin; group < group_end; ++group) {
        float v[kPerLane];
        ChunkRoom::load(x.at(group * kGroup + lane_id() * 4), v);
        if (__any_sync(kFull, max_mag(v) >= exact::kInfBits)) note_non_finite(v, job.payload, job.non_finite);
      }
    }
    team.sync();
    // Sums of their own, for the compiler would rather add up the entry's number and these anew for every entry.
    uint16_t* const indices = reinterpret_cast<uint16_t*>(job.second + held(at * job.unit_indices));
    std::byte* const values = job.entries + held(at * job.unit_values);
    if (job.chunk >= kGroup) {
      select_chunk<kWarps, kFeedback>(team, x, list, n, n < job.c ? n : job.c, groups_each * 2, peak, greatest, spacing,
                                      job, values, indices);
    } else {
      for (uint32_t from = 0, to = 0; from < n; from += job.chunk, to += job.c) {
        const uint32_t length = n - from < job.chunk ? n - from : job.chunk;
        const ChunkRoom part{x.at(from)};
        find_peaks(part, length, peak);
        const uint32_t most = warp_max(::max(peak[0], peak[1]));
        select_chunk<kWarps, kFeedback>(team, part, list, length, length < job.c ? length : job.c, 2, peak, most,
                                        spacing, job, values + to * value_width(job.value), indices + to);
      }
    }
    if constexpr (kFeedback) {
      for (uint32_t group = group_begin; group < group_end; ++group) {
        if ((kept >> (group - group_begin) & 1) != 0) continue;
        const uint32_t from = group * kGroup, size = n - from < kGroup ? n - from : kGroup;
        float* const e = job.residual + begin + from;
        float v[kPerLane];
        ChunkRoom::load(x.at(from + lane_id() * 4), v);
        store_residual(e, size, fast_e, v);
      }
    }
    team.sync();
  }
}

// int8 values, once all entries are known: of x, a scale for every run of 256 and a code for each.
template <bool kFeedback>
__global__ void __launch_bounds__(kBlockThreads) quantize_entries(ChunkJob job) {
  if (!may_encode(job)) return;
  constexpr unsigned kEach = codecs::kScaleRun / 32;
  const float* const from = reinterpret_cast<const float*>(job.entries);
  const uint16_t* const index = reinterpret_cast<const uint16_t*>(job.second);
  const size_t runs = job.k / codecs::kScaleRun + (job.k % codecs::kScaleRun != 0);
  pad_scales(job.first, runs, job.codes_at);
  int8_t* const codes = reinterpret_cast<int8_t*>(job.first + job.codes_at);
  const size_t stride = size_t{gridDim.x} * kBlockWarps;
  for (size_t run = size_t{blockIdx.x} * kBlockWarps + threadIdx.x / 32; run < runs; run += stride) {
    const size_t begin = run * codecs::kScaleRun + lane_id();
    float x[kEach];
    uint32_t greatest = 0;
#pragma unroll
    for (unsigned j = 0; j < kEach; ++j) {
      x[j] = begin + 32 * j < job.k ? from[begin + 32 * j] : 0.0f;
      greatest = ::max(greatest, exact::is_finite(x[j]) ? exact::mag(x[j]) : 0u);
    }
    const auto encoder = codecs::EntryEncoder::of(warp_max(greatest));
    if (lane_id() == 0) reinterpret_cast<uint32_t*>(job.first)[run] = encoder.stored;
#pragma unroll
    for (unsigned j = 0; j < kEach; ++j) {
      const size_t i = begin + 32 * j;
      if (i >= job.k) break;
      put_code<kFeedback>(encoder, x[j], codes + i, [&] { return job.residual + i / job.c * job.chunk + index[i]; });
    }
  }
}

}  // namespace
}  // namespace gradgate::kernels::cuda
