// The c elements of a chunk that come first in the order of docs/format.md §3 (greater key, then lower index). A lower
// bound for the c-th greatest key comes from the maxima of a few columns; one pass collects what reaches it, seldom
// many more than c; the rest is exact work on those candidates. Any exact method gives the same entries, so this one is
// chosen for speed alone.
#pragma once

#include "codecs/chunk_topk.h"
#include "kernels/cpu/loops/group.h"

namespace gradgate::kernels::cpu {
namespace {

// Arrays of one unit (a chunk, at least 256 elements), carved from the caller's workspace.
struct SelectScratch {
  float* x;            // what is chosen from, where it is not the gradient itself
  int32_t* keys;       // column maxima, or a key for every element
  int32_t* candidate;  // keys of the candidates
  uint16_t* index;     // their places, ascending

  static GRADGATE_INLINE SelectScratch carve(std::byte* scratch, size_t unit) {
    SelectScratch s;
    s.x = reinterpret_cast<float*>(scratch);
    s.keys = reinterpret_cast<int32_t*>(s.x + unit + 64);
    s.candidate = s.keys + unit + 64;
    s.index = reinterpret_cast<uint16_t*>(s.candidate + unit + 64);
    return s;
  }
};

// Greatest magnitudes of 64 columns: out[j] = max over r < rows of |x[r * stride + j]|.
GRADGATE_INLINE void column_maxima_64(const float* x, size_t rows, size_t stride, int32_t* out) {
  Lanes m[64 / kLanes] = {};
  for (size_t r = 0; r < rows; ++r, x += stride) {
    prefetch_ahead_second(x, 256);
    for (size_t j = 0; j < 64 / kLanes; ++j) {
      const Lanes v = load_lanes(x + j * kLanes) & 0x7fffffff;
      m[j] = v > m[j] ? v : m[j];
    }
  }
  __builtin_memcpy(out, m, sizeof m);
}

GRADGATE_INLINE int32_t max_of(const int32_t* v, size_t n) {
  int32_t max = -1;
  for (size_t i = 0; i < n; ++i) max = greater(max, v[i]);
  return max;
}

// The c-th greatest of n keys (n a multiple of 16, at most 64) by counting for each how many are greater: no branch
// depends on the values.
GRADGATE_INLINE int32_t nth_greatest_of_few(const int32_t* keys, size_t n, int32_t c) {
  constexpr int32_t kMost = 0x7fffffff;
  const Lanes most = kMost - Lanes{};
  Lanes least_kept = most;
  for (size_t b = 0; b < n; b += kLanes) {
    const Lanes v = load_lanes(keys + b);
    Lanes greater_count = {};
    for (size_t j = 0; j < n; ++j) greater_count -= (keys[j] > v);  // true is -1
    const Lanes kept = (greater_count < c) ? v : most;
    least_kept = kept < least_kept ? kept : least_kept;
  }
  int32_t nth = kMost;
  for (size_t i = 0; i < kLanes; ++i) nth = least_kept[i] < nth ? least_kept[i] : nth;
  return nth;
}

// Some t that at least c of the n keys reach (n a multiple of 64; at least c keys are >= 0), and not many more than c +
// slack where keys differ. max is the greatest key. With slack = 0 it is the c-th greatest key itself.
GRADGATE_INLINE int32_t lower_bound_by_bisection(const int32_t* keys, size_t n, size_t c, int32_t max, size_t slack) {
  if (count_at_least(keys, n, max) >= c) return max;
  int32_t low = 0, high = max;  // low: at least c keys reach it; high: fewer do
  // Most often it lies within three octaves of the greatest: look there first.
  const int32_t guess = max > (3 << 23) ? max - (3 << 23) : 0;
  if (count_at_least(keys, n, guess) >= c) {
    low = guess;
  } else {
    high = guess;
  }
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    const size_t count = count_at_least(keys, n, middle);
    const bool enough = count >= c;
    low = enough ? middle : low;
    high = enough ? high : middle;
    if (enough && count <= c + slack) break;
  }
  return low;
}

// Candidates: places where v[i] & mask >= t, ascending, with their keys; returns how many. `stop`: no more than these
// are needed.
GRADGATE_INLINE size_t collect(const int32_t* v, int32_t mask, size_t n, int32_t t, size_t stop, SelectScratch s) {
  size_t found = 0;
  for (size_t run = 0; run < n; run += 1024) {
    // Words of 64 with a hit, listed without branches; then one loop over all hits of the run, whose only surprise is
    // its end.
    uint64_t word[17];
    size_t start[17], words = 0, hits = 0;
    const size_t end = least(n, run + 1024);
    for (size_t i = run; i < end; i += 64) {
      const uint64_t w = at_least_64(v + i, mask, t);
      word[words] = w;
      start[words] = i;
      words += static_cast<size_t>(w != 0);
      hits += static_cast<size_t>(__builtin_popcountll(w));
    }
    word[words] = 1;
    uint64_t w = word[0];
    size_t at = 0;
    for (const size_t last = found + hits; found < last; ++found) {
      const size_t place = start[at] + static_cast<size_t>(__builtin_ctzll(w));
      s.candidate[found] = v[place] & mask;
      s.index[found] = static_cast<uint16_t>(place);
      w &= w - 1;
      const uint64_t following = word[at + 1];
      at += static_cast<size_t>(w == 0);
      w = w == 0 ? following : w;
    }
    if (found >= stop) return stop;
  }
  return found;
}

// Leaves the first c of m candidates in the order of the format, still ascending by index.
GRADGATE_INLINE void keep_first(SelectScratch s, size_t m, size_t c) {
  if (m == c) return;
  const size_t padded = (m + 63) & ~size_t{63};
  for (size_t i = m; i < padded; ++i) s.candidate[i] = -1;
  if (m <= 64) {
    const int32_t t = nth_greatest_of_few(s.candidate, (m + 15) & ~size_t{15}, static_cast<int32_t>(c));
    const uint64_t above = at_least_64(s.candidate, -1, t + 1);
    uint64_t ties = at_least_64(s.candidate, -1, t) & ~above;
    // Of the elements equal to the c-th greatest, those with the highest indices are too many.
    for (int extra = __builtin_popcountll(above | ties) - static_cast<int>(c); extra > 0; --extra)
      ties ^= uint64_t{1} << (63 - __builtin_clzll(ties));
    uint64_t keep = above | ties;
    for (size_t i = 0; i < c; ++i, keep &= keep - 1) s.index[i] = s.index[__builtin_ctzll(keep)];
    return;
  }
  const int32_t t = lower_bound_by_bisection(s.candidate, padded, c, max_of(s.candidate, padded), 0);
  size_t ties = c - count_at_least(s.candidate, padded, t + 1);  // so many of those equal to t, lowest index first
  size_t kept = 0;
  for (size_t i = 0; i < m; ++i) {
    const bool tie = s.candidate[i] == t && ties > 0;
    ties -= static_cast<size_t>(tie);
    s.index[kept] = s.index[i];
    kept += static_cast<size_t>(tie || s.candidate[i] > t);
  }
}

// Any chunk, at any length and with any values: a key for every element.
__attribute__((noinline)) void select_by_keys(const float* x, size_t length, size_t c, SelectScratch s) {
  for (size_t i = 0; i < length; ++i) s.keys[i] = static_cast<int32_t>(codecs::topk_key(exact::mag(x[i])));
  size_t padded = length;
  for (; padded % 64 != 0; ++padded) s.keys[padded] = -1;
  const int32_t max = max_of(s.keys, padded);
  const int32_t t = lower_bound_by_bisection(s.keys, padded, c, max, c / 8);
  keep_first(s, collect(s.keys, -1, padded, t, t == max ? c : length, s), c);
}

// Fills s.index with the c chosen of x[0 … length-1], ascending. Returns whether all of x is finite for certain.
GRADGATE_INLINE bool select(const float* x, size_t length, size_t c, bool whole, SelectScratch s) {
  if (c == length) {
    for (size_t i = 0; i < c; ++i) s.index[i] = static_cast<uint16_t>(i);
    return false;
  }
  // Two columns for each entry: about 1.4 c elements reach the c-th greatest maximum.
  size_t columns = 16;
  while (columns < 2 * c) columns *= 2;
  if (!whole || length < 128 || 2 * columns > length) {
    select_by_keys(x, length, c, s);
    return false;
  }
  const size_t wide = columns < 64 ? 64 : columns;
  for (size_t j = 0; j < wide; j += 64) column_maxima_64(x + j, length / wide, wide, s.keys + j);
  if (columns < 64) {
    for (size_t j = 0; j < 32; ++j) s.keys[j] = greater(s.keys[j], s.keys[j + 32]);
  }
  if (columns < 32) {
    for (size_t j = 0; j < 16; ++j) s.keys[j] = greater(s.keys[j], s.keys[j + 16]);
  }
  const int32_t max = max_of(s.keys, columns);
  if (max > kInf) {  // NaN: keys differ from magnitudes
    select_by_keys(x, length, c, s);
    return false;
  }
  const int32_t t = columns <= 64 ? nth_greatest_of_few(s.keys, columns, static_cast<int32_t>(c))
                                  : lower_bound_by_bisection(s.keys, columns, c, max, c / 8);
  keep_first(s, collect(reinterpret_cast<const int32_t*>(x), 0x7fffffff, length, t, t == max ? c : length, s), c);
  return max < kInf;
}

}  // namespace
}  // namespace gradgate::kernels::cpu
