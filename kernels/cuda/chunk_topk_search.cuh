// What chunk-topk's choice is made of: teams of warps, the search for a key that a wanted number of others reach, and
// the keys that are looked through, in registers.
#pragma once

#include "codecs/chunk_topk.h"
#include "kernels/cuda/group.cuh"

namespace gradgate::kernels::cuda {
namespace {

__device__ __forceinline__ uint32_t key_of(float x) { return codecs::topk_key(exact::mag(x)); }

/// `mask` moved up by a bit, which says whether the key falls short of t: the sign of their difference.
__device__ __forceinline__ uint32_t with_short(uint32_t mask, uint32_t key, uint32_t t) {
  return __funnelshift_l(key - t, mask, 1);
}
/// Marks in `mask` which of 4 to 32 neighbours reach `bound` in magnitude, a finite number or Inf: a bit for each, the
/// first highest. NaN does. `each`: how many, a power of two.
template <unsigned kFour = 0>
__device__ __forceinline__ void mark_reaching(const float* from, uint32_t each, float bound, uint32_t* mask) {
  if ((kFour & (kFour - 1)) == 0 && 4 * kFour >= each) return;
  float x[4];
  load4(from + 4 * kFour, x);
  constexpr uint32_t kFirst = 1u << (31 - 4 * kFour);
  asm("{\n .reg .pred p<4>;\n .reg .f32 m<4>;\n"
      " abs.f32 m0, %1;\n abs.f32 m1, %2;\n abs.f32 m2, %3;\n abs.f32 m3, %4;\n"
      " setp.geu.f32 p0, m0, %5;\n setp.geu.f32 p1, m1, %5;\n setp.geu.f32 p2, m2, %5;\n setp.geu.f32 p3, m3, %5;\n"
      " @p0 or.b32 %0, %0, %6;\n @p1 or.b32 %0, %0, %7;\n @p2 or.b32 %0, %0, %8;\n @p3 or.b32 %0, %0, %9;\n}"
      : "+r"(*mask)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(bound), "n"(kFirst), "n"(kFirst >> 1), "n"(kFirst >> 2),
        "n"(kFirst >> 3));
  if constexpr (kFour < 7) mark_reaching<kFour + 1>(from, each, bound, mask);
}

// A chunk in shared memory (or where it is spilled). Four places stay free after every 32, so that lanes may look at 32
// neighbours each, 16 bytes at a time, without bank conflicts.
struct ChunkRoom {
  static constexpr uint32_t kRow = 128 / 32 * 36;  ///< places of 128 elements
  float* first;

  __host__ __device__ static constexpr size_t bytes(uint32_t elements) { return elements / 32 * 36 * sizeof(float); }
  /// Where element i is among the places, less than 2^16, and which element a place holds.
  __device__ __forceinline__ static uint32_t place(uint32_t i) { return i + i / 32 * 4; }
  __device__ __forceinline__ static uint32_t element(uint32_t place) {
    return place - (place * 58255 >> 19 & ~3u);  // 58255 / 2^21: 1/36
  }
  __device__ __forceinline__ float* at(uint32_t i) const { return first + place(i); }
  __device__ __forceinline__ float& operator[](uint32_t i) const { return *at(i); }

  /// A lane's eight values of a group, the first of which is at `first`.
  __device__ __forceinline__ static void load(const float* first, float* v) {
    load4(first, v);
    load4(first + kRow, v + 4);
  }
  __device__ __forceinline__ static void store(float* first, const float* v) {
    float4* const to = reinterpret_cast<float4*>(first);
    to[0] = make_float4(v[0], v[1], v[2], v[3]);
    to[kRow / 4] = make_float4(v[4], v[5], v[6], v[7]);
  }
};

// Shared memory by which warps of a team tell each other something. Each of it is written once a chunk, or between
// barriers.
template <int kWarps>
struct TeamMemory {
  uint32_t top[kWarps * 32];  ///< of each lane
  uint32_t listed[kWarps], greater[kWarps], equal[kWarps], term[kWarps];
};

// Threads that work on one chunk. kWarps 1: every warp of the CTA is a team of its own.
template <int kWarps>
struct Team {
  TeamMemory<kWarps>* memory;

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
    if constexpr (kWarps > 1) {
      if (lane_id() == 0) memory->term[warp()] = v;
      __syncthreads();
      v = warp_sum(lane_id() < kWarps ? memory->term[lane_id()] : 0);
      __syncthreads();
    }
    return v;
  }
};

// Where the k-th greatest of some keys lies: at least k of them reach `key`, namely `reached`, and where those are more
// than allowed, fewer than k exceed it; `exceeding` is their number where the search was for k itself.
struct Threshold {
  uint32_t key, reached, exceeding;
};

inline constexpr uint32_t kOctave = 1u << 23;

__device__ __forceinline__ float root_of(uint32_t count) {
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(static_cast<float>(count)));
  return root;
}

// A key that k to `enough` reach, if there is one, between `low`, which k reach ({0, all} will do), and `above`, which
// none reaches. Keys are multiples of `spacing`, a power of two. count(t): how many reach t.
//
// Gradients crowd below their greatest: from 0, steps down from there double after the first one. Between two known
// counts a step goes to where the wanted one would be if their roots lay on a straight line, as those of a bell's tail
// nearly do; every fourth goes to the middle. Where k itself is wanted and a count is one more or less, the key between
// is looked for: count.from(t), the least that reaches t, or count.below(t), the greatest that does not.
template <class Count>
__device__ __forceinline__ Threshold find_threshold(Threshold low, uint32_t above, uint32_t spacing, uint32_t step,
                                                    uint32_t k, uint32_t enough, const Count& count) {
  constexpr bool kExact = requires { count.from(0u), count.below(0u); };
  uint32_t high = above, beyond = 0;
  for (uint32_t next = kOctave / 2; low.reached > enough && low.key == 0 && high > step;) {
    const uint32_t t = high - step, reached = count(t);
    if (reached >= k) {
      low = {t, reached, 0};
    } else {
      high = t, beyond = reached;
      step = next, next *= 2;
    }
  }
  if (low.reached <= enough) return low;
  const float wanted = root_of((k + enough) / 2);
  const uint32_t grid = held(0u - spacing);
  float low_root = root_of(low.reached), high_root = root_of(beyond);
  uint32_t last = low.reached;  // count
  const auto far = [&] { return kExact ? last - (k - 1) > 2 : low.reached > enough; };
  for (unsigned steps = 1; far() && high - low.key > spacing; ++steps) {
    const uint32_t gap = high - low.key;
    const float part = steps % 4 == 0 ? 0.5f : __fdividef(low_root - wanted, low_root - high_root);
    const uint32_t ahead = static_cast<uint32_t>(static_cast<float>(gap) * part) & grid;
    const uint32_t t = low.key + ::min(::max(ahead, spacing), gap - spacing);
    last = count(t);
    if (last >= k) {
      low = {t, last, 0}, low_root = root_of(last);
    } else {
      high = t, high_root = root_of(last);
    }
  }
  if constexpr (kExact) {
    if (far()) {  // equal ones
      low.exceeding = count(high);
    } else if (last < k) {
      low.key = count.below(high), low.reached = count(low.key), low.exceeding = last;
    } else {
      while (last > k) {  // once, or again where the least was none of them: the 0 behind the last one
        const uint32_t least = count.from(low.key);
        last = count(least + spacing);
        low = last < k ? Threshold{least, low.reached, last} : Threshold{least + spacing, last, 0};
      }
    }
  }
  return low;
}

// The keys of a chunk's list of places, which lies in a part for each warp, `stride` apart. Where they are few, every
// warp has all of them; else each has its own. The first of a lane are in registers, which hold nearly always all.
template <int kWarps>
class ListedKeys {
 public:
  static constexpr unsigned kHeld = kWarps == 1 ? 8 : 4, kFew = kWarps == 1 ? 5 : 4;

  /// listed: by this warp, whose part of the list is whole when all come here.
  __device__ ListedKeys(const Team<kWarps>& team, const ChunkRoom& x, const uint16_t* list, uint32_t stride,
                        uint32_t listed)
      : team_(team), x_(x), list_(list), stride_(stride), total_(listed), size_(listed) {
    if constexpr (kWarps > 1) {
      if (lane_id() == 0) team.memory->listed[team.warp()] = listed;
      __syncthreads();
      total_ = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        start_[w] = total_, shift_[w] = w * stride - total_;
        total_ += team.memory->listed[w];
      }
      if (whole()) size_ = total_;
    } else {
      __syncwarp();
    }
#pragma unroll
    for (unsigned j = 0; j < kHeld; ++j) key_[j] = 0;
#pragma unroll
    for (unsigned j = 0; j < kHeld; ++j) {
      if (in_doubt(j) && j * 32 >= size_) break;
      const uint32_t i = j * 32 + lane_id();
      key_[j] = held(i < size_ ? key(i) : 0);
    }
    // Where residuals take the place of x, nobody may still be reading the others' parts.
    if (kWarps > 1 && whole()) __syncthreads();
  }

  /// Of the warp's keys.
  __device__ uint32_t size() const { return size_; }
  /// Whether every warp has all keys.
  __device__ bool whole() const { return kWarps == 1 || total_ <= kHeld * 32; }

  // The first kRows rows of a warp's keys, 0 behind the last one.
  template <unsigned kRows>
  struct Rows {
    const uint32_t* key;

    /// How many reach t > 0; the least that does, t = 0 too, where a 0 behind the last one counts; the greatest that
    /// does not.
    __device__ __forceinline__ uint32_t operator()(uint32_t t) const {
      uint32_t mask = 0;
#pragma unroll
      for (unsigned j = 0; j < kRows; ++j) mask = with_short(mask, key[j], t);
      return kRows * 32 - warp_sum(__popc(mask));
    }
    __device__ __forceinline__ uint32_t from(uint32_t t) const {
      uint32_t more = ~0u;  // of the others the difference is greater than any
#pragma unroll
      for (unsigned j = 0; j < kRows; ++j) more = ::min(more, key[j] - t);
      return t + warp_min(more);
    }
    __device__ __forceinline__ uint32_t below(uint32_t t) const {
      uint32_t less = ~0u;
#pragma unroll
      for (unsigned j = 0; j < kRows; ++j) less = ::min(less, t - 1 - key[j]);
      return t - 1 - warp_min(less);
    }
  };

  /// How many of the warp's keys reach t > 0.
  __device__ __forceinline__ uint32_t reaching(uint32_t t) const {
    const uint32_t first = Rows<kHeld>{key_}(t);
    if (size_ <= kHeld * 32) return first;
    uint32_t n = 0;
    for (uint32_t i = kHeld * 32 + lane_id(); i < size_; i += 32) n += key(i) >= t;
    return first + warp_sum(n);
  }

  /// The k-th greatest of the team's keys, all of which reach `bound`: as a rule of few rows, which a search looks at
  /// without asking how many there are. `exceeding` holds where the list is whole.
  __device__ __forceinline__ Threshold find(uint32_t bound, uint32_t above, uint32_t spacing, uint32_t k) const {
    const auto among = [&](const auto& count) {
      return find_threshold({bound, total_, 0}, above, spacing, kOctave / 2, k, k, count);
    };
    if (total_ > k && total_ <= 32) return among(Rows<1>{key_});
    if (total_ > k && total_ <= kFew * 32) return among(Rows<kFew>{key_});
    if (!whole()) return among([&](uint32_t t) { return team_.sum(reaching(t)); });
    Threshold found = among([&](uint32_t t) { return reaching(t); });
    found.exceeding = reaching(found.key + 1);
    return found;
  }

  /// f(j, key) for the lane's key in every row j of 32; where there is none in the last row, it is 0.
  template <class F>
  __device__ __forceinline__ void each_row(const F& f) const {
#pragma unroll
    for (unsigned j = 0; j < kHeld; ++j) {
      if (j * 32 >= size_) return;
      f(j, key_[j]);
    }
    for (unsigned j = kHeld; j * 32 < size_; ++j) f(j, j * 32 + lane_id() < size_ ? key(j * 32 + lane_id()) : 0);
  }
  /// Place in the chunk's room that the warp's key i comes from.
  __device__ __forceinline__ uint32_t place(uint32_t i) const {
    if constexpr (kWarps == 1) return list_[i];
    uint32_t at = team_.warp() * stride_ + i;
    if (whole()) {
      at = i;
#pragma unroll
      for (int w = 1; w < kWarps; ++w) at = i >= start_[w] ? i + shift_[w] : at;
    }
    return list_[at];
  }

 private:
  /// Rows to look at before they are read: between them keys that are 0 do no harm.
  __device__ static constexpr bool in_doubt(unsigned j) { return j == 1 || j == 4 || j == kFew; }
  __device__ __forceinline__ uint32_t key(uint32_t i) const { return key_of(x_.first[place(i)]); }

  const Team<kWarps>& team_;
  ChunkRoom x_;
  const uint16_t* list_;
  uint32_t stride_, total_, size_;
  uint32_t key_[kHeld];
  uint32_t start_[kWarps], shift_[kWarps];  // of a warp's keys among all, and from there to their place in the list
};

}  // namespace
}  // namespace gradgate::kernels::cuda
