#include "examples/digits/dense_math.h"

#include <algorithm>

// One clone an instruction set, chosen when the program starts. Sanitizers cannot run the resolver that early (the build says so),
// and only glibc's loader knows it.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__) && \
    !defined(GRADGATE_DIGITS_ONE_ISA)
#define GRADGATE_DIGITS_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define GRADGATE_DIGITS_CLONES
#endif
#define GRADGATE_DIGITS_INLINE [[gnu::always_inline]] inline

namespace gradgate::digits {
namespace {

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef float Unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

// Tiles are as large as the registers of the widest clone allow: loads are then shared by enough arithmetic to hide them.
constexpr size_t kTileRows = 4;
constexpr size_t kTileOut = 4;
constexpr size_t kTileVectors = 2;

// y for kRows rows and kOut outputs: products of the same lane are added in order, then lanes by halves.
template <size_t kRows, size_t kOut>
GRADGATE_DIGITS_INLINE void forward_tile(LayerShape s, const float* x, const float* weights, const float* bias,
                                         float* y) noexcept {
  Vector sum[kRows][kOut] = {};
  for (size_t i = 0; i < s.in; i += kLanes) {
    Vector w[kOut];
    for (size_t o = 0; o < kOut; ++o) w[o] = *reinterpret_cast<const Unaligned*>(weights + o * s.in + i);
    for (size_t r = 0; r < kRows; ++r) {
      const Vector v = *reinterpret_cast<const Unaligned*>(x + r * s.in + i);
      for (size_t o = 0; o < kOut; ++o) sum[r][o] += v * w[o];
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t o = 0; o < kOut; ++o) {
      float lanes[kLanes];
      *reinterpret_cast<Unaligned*>(lanes) = sum[r][o];
      for (size_t half = kLanes / 2; half > 0; half /= 2) {
        for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
      }
      y[r * s.out + o] = lanes[0] + bias[o];
    }
  }
}

template <size_t kOut>
GRADGATE_DIGITS_INLINE void forward_rows(LayerShape s, const float* x, const float* weights, const float* bias,
                                         float* y) noexcept {
  size_t r = 0;
  for (; r + kTileRows <= s.rows; r += kTileRows) {
    forward_tile<kTileRows, kOut>(s, x + r * s.in, weights, bias, y + r * s.out);
  }
  for (; r < s.rows; ++r) forward_tile<1, kOut>(s, x + r * s.in, weights, bias, y + r * s.out);
}

// dx for kRows rows and kVectors vectors of inputs: outputs are added in order.
template <size_t kRows, size_t kVectors>
GRADGATE_DIGITS_INLINE void input_tile(LayerShape s, const float* dy, const float* weights, float* dx) noexcept {
  Vector sum[kRows][kVectors] = {};
  for (size_t o = 0; o < s.out; ++o) {
    Vector w[kVectors];
    for (size_t v = 0; v < kVectors; ++v) w[v] = *reinterpret_cast<const Unaligned*>(weights + o * s.in + v * kLanes);
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t v = 0; v < kVectors; ++v) sum[r][v] += w[v] * dy[r * s.out + o];
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t v = 0; v < kVectors; ++v) *reinterpret_cast<Unaligned*>(dx + r * s.in + v * kLanes) = sum[r][v];
  }
}

template <size_t kVectors>
GRADGATE_DIGITS_INLINE void input_rows(LayerShape s, const float* dy, const float* weights, float* dx) noexcept {
  size_t r = 0;
  for (; r + kTileRows <= s.rows; r += kTileRows) {
    input_tile<kTileRows, kVectors>(s, dy + r * s.out, weights, dx + r * s.in);
  }
  for (; r < s.rows; ++r) input_tile<1, kVectors>(s, dy + r * s.out, weights, dx + r * s.in);
}

// dweights for kOut outputs and kVectors vectors of inputs: rows are added in order.
template <size_t kOut, size_t kVectors>
GRADGATE_DIGITS_INLINE void weight_tile(LayerShape s, const float* dy, const float* x, float* dweights) noexcept {
  Vector sum[kOut][kVectors] = {};
  for (size_t r = 0; r < s.rows; ++r) {
    Vector v[kVectors];
    for (size_t i = 0; i < kVectors; ++i) v[i] = *reinterpret_cast<const Unaligned*>(x + r * s.in + i * kLanes);
    for (size_t o = 0; o < kOut; ++o) {
      for (size_t i = 0; i < kVectors; ++i) sum[o][i] += v[i] * dy[r * s.out + o];
    }
  }
  for (size_t o = 0; o < kOut; ++o) {
    for (size_t i = 0; i < kVectors; ++i) *reinterpret_cast<Unaligned*>(dweights + o * s.in + i * kLanes) = sum[o][i];
  }
}

template <size_t kOut>
GRADGATE_DIGITS_INLINE void weight_columns(LayerShape s, const float* dy, const float* x, float* dweights) noexcept {
  size_t i = 0;
  for (; i + kTileVectors * kLanes <= s.in; i += kTileVectors * kLanes) {
    weight_tile<kOut, kTileVectors>(s, dy, x + i, dweights + i);
  }
  for (; i < s.in; i += kLanes) weight_tile<kOut, 1>(s, dy, x + i, dweights + i);
}

}  // namespace

GRADGATE_DIGITS_CLONES
void forward_product(LayerShape s, const float* x, const float* weights, const float* bias, float* y) noexcept {
  size_t o = 0;
  for (; o + kTileOut <= s.out; o += kTileOut) forward_rows<kTileOut>(s, x, weights + o * s.in, bias + o, y + o);
  for (; o < s.out; ++o) forward_rows<1>(s, x, weights + o * s.in, bias + o, y + o);
}

GRADGATE_DIGITS_CLONES
void backward_input(LayerShape s, const float* dy, const float* weights, float* dx) noexcept {
  size_t i = 0;
  for (; i + kTileVectors * kLanes <= s.in; i += kTileVectors * kLanes) {
    input_rows<kTileVectors>(s, dy, weights + i, dx + i);
  }
  for (; i < s.in; i += kLanes) input_rows<1>(s, dy, weights + i, dx + i);
}

GRADGATE_DIGITS_CLONES
void backward_weights(LayerShape s, const float* dy, const float* x, float* dweights, float* dbias) noexcept {
  size_t o = 0;
  for (; o + kTileOut <= s.out; o += kTileOut) weight_columns<kTileOut>(s, dy + o, x, dweights + o * s.in);
  for (; o < s.out; ++o) weight_columns<1>(s, dy + o, x, dweights + o * s.in);
  std::fill_n(dbias, s.out, 0.0f);
  for (size_t r = 0; r < s.rows; ++r) {
    for (size_t k = 0; k < s.out; ++k) dbias[k] += dy[r * s.out + k];
  }
}

GRADGATE_DIGITS_CLONES
void momentum_step(size_t count, float rate, float momentum, const float* __restrict gradient,
                   float* __restrict velocity, float* __restrict weights) noexcept {
  for (size_t i = 0; i < count; ++i) {
    velocity[i] = momentum * velocity[i] + gradient[i];
    weights[i] -= rate * velocity[i];
  }
}

}  // namespace gradgate::digits
