// One group of 256 elements at a time: widening, x = g + e (docs/format.md §2, rules 1-3), and what becomes of decoded
// values.
#pragma once

#include "codecs/f16.h"
#include "kernels/cpu/loops/lanes.h"

namespace gradgate::kernels::cpu {
namespace {

using codecs::F16;

GRADGATE_INLINE float widen(float v) { return v; }
GRADGATE_INLINE float widen(uint16_t v) { return codecs::widen_bf16(v); }
GRADGATE_INLINE float widen(F16 v) { return codecs::widen_f16(v.bits); }
GRADGATE_INLINE void narrow(float v, float* out) { *out = exact::canonical(v); }
GRADGATE_INLINE void narrow(float v, uint16_t* out) { *out = codecs::round_bf16(v); }
GRADGATE_INLINE void narrow(float v, F16* out) { out->bits = codecs::round_f16(v); }

GRADGATE_INLINE int32_t magnitude(float v) {
  return static_cast<int32_t>(exact::mag(v));
}  // signed: SSE2 and AVX2 compare nothing else
GRADGATE_INLINE int32_t greater(int32_t a, int32_t b) { return a > b ? a : b; }
inline constexpr int32_t kInf = static_cast<int32_t>(exact::kInfBits);

// Asks for a later group in two lots: in front of form_group, and between it and the loop that follows. In one lot the
// lines of g and e would be more than the first cache can wait for, and the loops wait with it (a third of their time).
template <bool kFeedback, class G>
GRADGATE_INLINE void prefetch_first_lot(const G* g) {
  if constexpr (kFeedback) {
    prefetch_ahead(g, kGroupElements * sizeof(G));
  } else {
    prefetch_ahead_second(g, kGroupElements / 2 * sizeof(G));
  }
}
template <bool kFeedback, class G>
GRADGATE_INLINE void prefetch_second_lot(const G* g, const float* e) {
  if constexpr (kFeedback) {
    prefetch_ahead(e, kGroupElements * sizeof(float));
  } else {
    prefetch_ahead_second(g + kGroupElements / 2, kGroupElements / 2 * sizeof(G));
  }
}

// A group on its way into a payload.
struct Group {
  const float* x;     // 256 values; beyond the end of the vector +0
  int32_t max = 0;    // greatest magnitude of x
  bool kept = false;  // a zero group: its residual stays
};

template <class G, size_t kElements = kGroupElements>
GRADGATE_INLINE int32_t max_magnitude(const G* v) {
  int32_t max = 0;
  for (size_t i = 0; i < kElements; ++i) max = greater(max, magnitude(widen(v[i])));
  return max;
}

// Rule 3 for a group in which some g is not finite.
template <class G>
__attribute__((noinline)) int32_t add_around_non_finite(const G* g, const float* e, float* x) {
  int32_t max = 0;
  for (size_t i = 0; i < kGroupElements; ++i) {
    const float v = widen(g[i]);
    x[i] = exact::is_finite(v) ? exact::add(v, e[i]) : v;
    max = greater(max, magnitude(x[i]));
  }
  return max;
}

// Forms x of a full group into `room` (or finds it in place). e null: no feedback.
template <class G, bool kFeedback>
GRADGATE_INLINE Group form_group(const G* g, const float* e, bool flush, float* room) {
  Group group;
  if constexpr (!kFeedback) {
    if constexpr (sizeof(G) == sizeof(float)) {
      group.x = g;
      group.max = max_magnitude(g);
    } else {
      int32_t max = 0;
      for (size_t i = 0; i < kGroupElements; ++i) {
        room[i] = widen(g[i]);
        max = greater(max, magnitude(room[i]));
      }
      group.x = room;
      group.max = max;
    }
  } else {
    int32_t g_max = 0, x_max = 0;
    for (size_t i = 0; i < kGroupElements; ++i) {
      const float v = widen(g[i]);
      g_max = greater(g_max, magnitude(v));
      room[i] = exact::add(v, e[i]);
      x_max = greater(x_max, magnitude(room[i]));
    }
    if (g_max >= kInf) x_max = add_around_non_finite(g, e, room);
    if (g_max == 0 && !flush) {
      for (size_t i = 0; i < kGroupElements; ++i) room[i] = 0.0f;
      x_max = 0;
      group.kept = true;
    }
    group.x = room;
    group.max = x_max;
  }
  return group;
}

// Rare enough to be counted apart: only groups whose maximum says so are looked at again.
__attribute__((noinline)) uint64_t count_non_finite(const float* x) {
  uint64_t count = 0;
  for (size_t i = 0; i < kGroupElements; ++i) count += static_cast<uint64_t>(!exact::is_finite(x[i]));
  return count;
}

// The last group of a vector, padded with zeros, so that no loop has to know about ends.
template <class G>
struct PaddedGroup {
  alignas(64) G g[kGroupElements] = {};
  alignas(64) float e[kGroupElements] = {};

  PaddedGroup(const G* gradient, const float* residual, size_t n) {
    __builtin_memcpy(g, gradient, n * sizeof(G));
    if (residual != nullptr) __builtin_memcpy(e, residual, n * sizeof(float));
  }
};

// out[i] becomes value(i), or is added to; each rounded to the dtype of out.
template <bool kAdd, class O, class Value>
GRADGATE_INLINE void emit_n(O* out, size_t n, Value value) {
  for (size_t i = 0; i < n; ++i) {
    float v = value(i);
    if constexpr (kAdd) v = exact::add(widen(out[i]), v);
    narrow(v, out + i);
  }
}
template <bool kAdd, size_t kWhole = kGroupElements, class O, class Value>
GRADGATE_INLINE void emit(O* out, size_t n, Value value) {
  if (n == kWhole) {
    emit_n<kAdd>(out, kWhole, value);
  } else {
    emit_n<kAdd>(out, n, value);
  }
}

// Collects the output of consecutive groups in L1 and writes whole cache lines around the caches; or writes straight to
// its place. kStep: the most that is placed at once.
template <class T, size_t kStep = kGroupElements>
class Sink {
 public:
  Sink(T* dst, bool stream) : dst_(dst), stream_(stream) {
    // Until the first line starts, values pass through the front of the room like all others.
    if (stream) head_ = to_line(dst) / sizeof(T);
  }
  // Where the next n <= kStep values go.
  GRADGATE_INLINE T* place() { return stream_ ? room_ + filled_ : dst_; }
  GRADGATE_INLINE void advance(size_t n) {
    if (!stream_) {
      dst_ += n;
      return;
    }
    filled_ += n;
    if (filled_ >= kRoom) flush();
  }
  void finish() {
    if (!stream_) return;
    __builtin_memcpy(dst_, room_, filled_ * sizeof(T));
    stream_end();
  }

 private:
  static constexpr size_t kRoom = 8 * kGroupElements;

  void flush() {
    __builtin_memcpy(dst_, room_, head_ * sizeof(T));
    const size_t lines = (filled_ - head_) * sizeof(T) / 64 * 64 / sizeof(T);
    stream_copy(dst_ + head_, room_ + head_, lines * sizeof(T));
    dst_ += head_ + lines;
    filled_ -= head_ + lines;
    __builtin_memcpy(room_, room_ + head_ + lines, filled_ * sizeof(T));  // less than a line, from far behind
    head_ = 0;
  }

  T* dst_;
  size_t filled_ = 0, head_ = 0;
  bool stream_;
  alignas(64) T room_[kRoom + kStep];
};

}  // namespace
}  // namespace gradgate::kernels::cpu
