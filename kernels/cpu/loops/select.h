// The c elements of a chunk that come first in the order of docs/format.md §3 (greater key, then lower index). A lower bound for the c-th
// greatest key comes from the maxima of a few columns; one pass collects what reaches it, seldom more than a handful too many; the rest is
// exact work on those candidates. Any exact method gives the same entries, so this one is chosen for speed alone.
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
#if defined(__AVX512F__)
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  __m512i m[4] = {};
  for (size_t r = 0; r < rows; ++r, x += stride) {
    prefetch_ahead(x, 256);
    for (int j = 0; j < 4; ++j) m[j] = _mm512_max_epi32(m[j], _mm512_and_si512(_mm512_loadu_si512(x + 16 * j), mask));
  }
  for (int j = 0; j < 4; ++j) _mm512_storeu_si512(out + 16 * j, m[j]);
#elif defined(__AVX2__)
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  __m256i m[8] = {};
  for (size_t r = 0; r < rows; ++r, x += stride) {
    prefetch_ahead(x, 256);
    for (int j = 0; j < 8; ++j) {
      m[j] = _mm256_max_epi32(m[j], _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 8 * j)), mask));
    }
  }
  for (int j = 0; j < 8; ++j) _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8 * j), m[j]);
#else
  for (int j = 0; j < 64; ++j) out[j] = 0;
  for (size_t r = 0; r < rows; ++r, x += stride) {
    prefetch_ahead(x, 256);
    for (int j = 0; j < 64; ++j) out[j] = greater(out[j], magnitude(x[j]));
  }
#endif
}

GRADGATE_INLINE int32_t max_of(const int32_t* v, size_t n) {
  int32_t max = -1;
  for (size_t i = 0; i < n; ++i) max = greater(max, v[i]);
  return max;
}

// Some t that at least c of the n keys reach (c of them do reach 0), with not many more than c + slack reaching it where keys differ.
// max is the greatest key. With slack = 0 it is the c-th greatest key itself.
GRADGATE_INLINE int32_t lower_bound_for(const int32_t* keys, size_t n, size_t c, int32_t max, size_t slack) {
  if (count_at_least(keys, n, max) >= c) return max;
  int32_t low = 0, high = max;  // low: at least c keys reach it; high: fewer do
  // Maxima of many gradients lie within an eighth of the greatest: look there first.
  for (int32_t below = 3 << 23; below < max; below = below < (1 << 28) ? below * 4 : max) {
    const size_t count = count_at_least(keys, n, max - below);
    if (count >= c) {
      low = max - below;
      break;
    }
    high = max - below;
  }
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    const size_t count = count_at_least(keys, n, middle);
    if (count >= c) {
      low = middle;
      if (count <= c + slack) break;
    } else {
      high = middle;
    }
  }
  return low;
}

// Candidates in ascending order; returns how many. `stop`: as many as are needed, where all of them are equal.
GRADGATE_INLINE size_t collect(const int32_t* v, int32_t mask, size_t n, int32_t t, size_t stop, SelectScratch s) {
  size_t found = 0;
  for (size_t i = 0; i < n; i += 64) {
    uint64_t hits = at_least_64(v + i, mask, t);
    while (hits != 0) {
      const size_t at = i + static_cast<size_t>(__builtin_ctzll(hits));
      hits &= hits - 1;
      s.candidate[found] = v[at] & mask;
      s.index[found] = static_cast<uint16_t>(at);
      ++found;
    }
    if (found >= stop) return stop;
  }
  return found;
}

// Leaves the first c of m candidates in the order of the format, still ascending by index.
GRADGATE_INLINE void keep_first(SelectScratch s, size_t m, size_t c) {
  if (m == c) return;
  if (m - c <= 8 && m <= 64) {  // take the last in the order away, one by one
    for (; m > c; --m) {
      size_t last = 0;
      for (size_t i = 1; i < m; ++i) last = s.candidate[i] <= s.candidate[last] ? i : last;
      for (size_t i = last + 1; i < m; ++i) {
        s.candidate[i - 1] = s.candidate[i];
        s.index[i - 1] = s.index[i];
      }
    }
    return;
  }
  size_t padded = m;
  for (; padded % 64 != 0; ++padded) s.candidate[padded] = -1;
  const int32_t t = lower_bound_for(s.candidate, padded, c, max_of(s.candidate, padded), 0);
  size_t ties = c - count_at_least(s.candidate, padded, t + 1);  // so many of those equal to t, lowest index first
  size_t kept = 0;
  for (size_t i = 0; i < m; ++i) {
    const int32_t key = s.candidate[i];
    const bool keep = key > t || (key == t && ties > 0);
    if (key == t && ties > 0) --ties;
    s.index[kept] = s.index[i];
    kept += static_cast<size_t>(keep);
  }
}

// Any chunk, at any length and with any values: a key for every element.
__attribute__((noinline)) void select_by_keys(const float* x, size_t length, size_t c, SelectScratch s) {
  for (size_t i = 0; i < length; ++i) s.keys[i] = static_cast<int32_t>(codecs::topk_key(exact::mag(x[i])));
  size_t padded = length;
  for (; padded % 64 != 0; ++padded) s.keys[padded] = -1;
  const int32_t max = max_of(s.keys, padded);
  const int32_t t = lower_bound_for(s.keys, padded, c, max, c / 8);
  keep_first(s, collect(s.keys, -1, padded, t, t == max ? c : length, s), c);
}

// Fills s.index with the c chosen of x[0 … length-1], ascending. Returns whether all of x is finite for certain.
GRADGATE_INLINE bool select(const float* x, size_t length, size_t c, bool whole, SelectScratch s) {
  if (c == length) {
    for (size_t i = 0; i < c; ++i) s.index[i] = static_cast<uint16_t>(i);
    return false;
  }
  // Four columns for each entry give a bound that few elements too many reach.
  size_t columns = 64;
  while (columns < 4 * c) columns *= 2;
  if (!whole || 2 * columns > length) {
    select_by_keys(x, length, c, s);
    return false;
  }
  for (size_t j = 0; j < columns; j += 64) column_maxima_64(x + j, length / columns, columns, s.keys + j);
  const int32_t max = max_of(s.keys, columns);
  if (max > kInf) {  // NaN: keys differ from magnitudes
    select_by_keys(x, length, c, s);
    return false;
  }
  const int32_t t = lower_bound_for(s.keys, columns, c, max, c / 4);
  keep_first(s, collect(reinterpret_cast<const int32_t*>(x), 0x7fffffff, length, t, t == max ? c : length, s), c);
  return max < kInf;
}

}  // namespace
}  // namespace gradgate::kernels::cpu
