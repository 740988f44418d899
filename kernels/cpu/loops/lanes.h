// What the loops need beyond plain C++: prefetch, stores that go around the caches, and masks of comparisons.
// Everything here and in the other files of this folder has internal linkage: each instruction set has its own copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/bf16.h"
#include "codecs/exact_math.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace gradgate::kernels::cpu {
namespace {

#define GRADGATE_INLINE inline __attribute__((always_inline))

inline constexpr size_t kGroupElements = 256;

// One register of integers.
#if defined(__AVX512F__)
inline constexpr size_t kLanes = 16;
#elif defined(__AVX2__)
inline constexpr size_t kLanes = 8;
#else
inline constexpr size_t kLanes = 4;
#endif
typedef int32_t Lanes __attribute__((vector_size(kLanes * 4)));

GRADGATE_INLINE Lanes load_lanes(const void* p) {
  Lanes v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

GRADGATE_INLINE size_t least(size_t a, size_t b) { return a < b ? a : b; }

// The hardware's streams stop at page ends; asking one page ahead keeps them going. Addresses past the end are
// harmless.
inline constexpr size_t kAhead = 4096;
GRADGATE_INLINE void prefetch_ahead(const void* from, size_t bytes) {
  const char* p = static_cast<const char*>(from) + kAhead;
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 3);
}
// The same into the second cache only. The first has few places for lines on their way, and work behind a request that
// finds none waits: where there is much work per line, it had better find its lines one cache further away.
GRADGATE_INLINE void prefetch_ahead_second(const void* from, size_t bytes) {
  const char* p = static_cast<const char*>(from) + kAhead;
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// Zeros of a few KiB that stay in the first cache. Compilers make `rep stos` of a memset or a loop of this length, and
// that takes several times as long to start as these stores take; the empty statement keeps them from it.
GRADGATE_INLINE void clear(void* dst, size_t bytes) {
  char* to = static_cast<char*>(dst);
  for (; bytes >= 64; bytes -= 64, to += 64) {
    __builtin_memset(to, 0, 64);
    asm volatile("" : : : "memory");
  }
  __builtin_memset(to, 0, bytes);
}

// Stores around the caches; dst and bytes are multiples of 64. Whole cache lines only: a line left half written is
// written twice, or worse.
GRADGATE_INLINE void stream_copy(void* dst, const void* src, size_t bytes) {
#if defined(__SSE2__)
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  for (size_t i = 0; i < bytes; i += 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
#elif defined(__AVX__)
    for (size_t j = i; j < i + 64; j += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + j),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + j)));
    }
#else
    for (size_t j = i; j < i + 64; j += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + j), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
    }
#endif
  }
#else
  __builtin_memcpy(dst, src, bytes);
#endif
}
// Bytes from p to the next multiple of 64.
GRADGATE_INLINE size_t to_line(const void* p) { return (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64; }

// Stores around the caches become visible to other threads only after this.
GRADGATE_INLINE void stream_end() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Bit j: v[j] & mask >= t, of 64 signed integers. With mask = 0x7fffffff over the bits of floats it compares
// magnitudes.
GRADGATE_INLINE uint64_t at_least_64(const int32_t* v, int32_t mask, int32_t t) {
  uint64_t found = 0;
#if defined(__AVX512F__)
  const __m512i m = _mm512_set1_epi32(mask), threshold = _mm512_set1_epi32(t);
  __mmask16 part[4];
  for (int i = 0; i < 4; ++i)
    part[i] = _mm512_cmpge_epi32_mask(_mm512_and_si512(_mm512_loadu_si512(v + 16 * i), m), threshold);
  found = _mm512_kunpackd(_mm512_kunpackw(part[3], part[2]), _mm512_kunpackw(part[1], part[0]));
#elif defined(__AVX2__)
  const __m256i m = _mm256_set1_epi32(mask), below = _mm256_set1_epi32(t - 1);
  for (int i = 0; i < 8; ++i) {
    const __m256i a = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + 8 * i)), m);
    const int bits = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(a, below)));
    found |= static_cast<uint64_t>(static_cast<uint32_t>(bits)) << (8 * i);
  }
#elif defined(__SSE2__)
  const __m128i m = _mm_set1_epi32(mask), below = _mm_set1_epi32(t - 1);
  for (int i = 0; i < 16; ++i) {
    const __m128i a = _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(v + 4 * i)), m);
    const int bits = _mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(a, below)));
    found |= static_cast<uint64_t>(static_cast<uint32_t>(bits)) << (4 * i);
  }
#else
  uint32_t any = 0;
  for (int i = 0; i < 64; ++i) any |= static_cast<uint32_t>((v[i] & mask) >= t);
  if (any == 0) return 0;
  for (int i = 0; i < 64; ++i) found |= static_cast<uint64_t>((v[i] & mask) >= t) << i;
#endif
  return found;
}

// Moves those of 64 entries whose bit is set in `kept` to the front, in order; returns how many. `to` may be the
// entries themselves or lie before them: nothing behind the 64 is written, and nothing before it was read.
GRADGATE_INLINE size_t compress_64(const uint32_t* value, const uint16_t* index, uint64_t kept, uint32_t* to_value,
                                   uint16_t* to_index) {
  size_t n = 0;
#if defined(__AVX512F__)
  for (int i = 0; i < 4; ++i) {
    const auto mask = static_cast<__mmask16>(kept >> (16 * i));
    const __m512i v = _mm512_loadu_si512(value + 16 * i);
    const __m512i p = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(index + 16 * i)));
    _mm512_storeu_si512(to_value + n, _mm512_maskz_compress_epi32(mask, v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to_index + n),
                        _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(mask, p)));
    n += static_cast<size_t>(__builtin_popcount(mask));
  }
#else
  for (int i = 0; i < 64; ++i, kept >>= 1) {
    to_value[n] = value[i];
    to_index[n] = index[i];
    n += kept & 1;
  }
#endif
  return n;
}

// How many of the n (a multiple of 64) integers are >= t.
GRADGATE_INLINE size_t count_at_least(const int32_t* v, size_t n, int32_t t) {
#if defined(__POPCNT__)
  size_t count = 0;
  for (size_t i = 0; i < n; i += 64) count += static_cast<size_t>(__builtin_popcountll(at_least_64(v + i, -1, t)));
  return count;
#else
  uint32_t count = 0;
  for (size_t i = 0; i < n; ++i) count += static_cast<uint32_t>(v[i] >= t);
  return count;
#endif
}

// A large copy around the caches, any alignment.
GRADGATE_INLINE void stream_bytes(std::byte* dst, const std::byte* src, size_t bytes) {
  const size_t head = least(to_line(dst), bytes);
  __builtin_memcpy(dst, src, head);
  dst += head, src += head, bytes -= head;
  for (; bytes >= 1024; bytes -= 1024) {
    prefetch_ahead(src, 1024);
    stream_copy(dst, src, 1024);
    dst += 1024, src += 1024;
  }
  stream_end();
  __builtin_memcpy(dst, src, bytes);
}

}  // namespace
}  // namespace gradgate::kernels::cpu
