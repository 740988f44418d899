#include "examples/digits/dense_math.h"

#include <algorithm>

// x86-64 compilers build each product three times, for the vectors of SSE2, AVX2 and AVX-512, and the processor's widest is taken at
// run time. Elsewhere the compiler maps vectors of four floats to what there is. None of this changes a bit of any result.
#if defined(__x86_64__) && defined(__GNUC__)
#define GRADGATE_DIGITS_X86 1
#endif
#define GRADGATE_DIGITS_INLINE [[gnu::always_inline]] inline

namespace gradgate::digits {
namespace {

template <size_t kFloats>
struct VectorOf;
#define GRADGATE_DIGITS_VECTOR(floats)                                                        \
  template <>                                                                                 \
  struct VectorOf<floats> {                                                                   \
    typedef float Type __attribute__((vector_size(4 * floats)));                              \
    typedef float Unaligned __attribute__((vector_size(4 * floats), aligned(4), may_alias));  \
  }
GRADGATE_DIGITS_VECTOR(4);
GRADGATE_DIGITS_VECTOR(8);
GRADGATE_DIGITS_VECTOR(16);
#undef GRADGATE_DIGITS_VECTOR

// Vector width and the tiles that fit the registers that go with it; results depend on none of them.
template <size_t kFloats, size_t kTileRows, size_t kTileOut>
struct Isa {
  using Vector = typename VectorOf<kFloats>::Type;
  using Unaligned = typename VectorOf<kFloats>::Unaligned;
  static constexpr size_t kWidth = kFloats;
  static constexpr size_t kRows = kTileRows;
  static constexpr size_t kOut = kTileOut;
  static constexpr size_t kVectors = 2;
};

// y for kRows rows and kOut outputs: the products of each of the sixteen lanes are added in order, then the lanes by halves.
template <class I, size_t kRows, size_t kOut>
GRADGATE_DIGITS_INLINE void forward_tile(LayerShape s, const float* x, const float* weights, const float* bias,
                                         float* y) noexcept {
  constexpr size_t kParts = kLanes / I::kWidth;
  typename I::Vector sum[kRows][kOut][kParts] = {};
  for (size_t i = 0; i < s.in; i += kLanes) {
    for (size_t part = 0; part < kParts; ++part) {
      const size_t at = i + part * I::kWidth;
      typename I::Vector w[kOut];
      for (size_t o = 0; o < kOut; ++o) {
        w[o] = *reinterpret_cast<const typename I::Unaligned*>(weights + o * s.in + at);
      }
      for (size_t r = 0; r < kRows; ++r) {
        const typename I::Vector v = *reinterpret_cast<const typename I::Unaligned*>(x + r * s.in + at);
        for (size_t o = 0; o < kOut; ++o) sum[r][o][part] += v * w[o];
      }
    }
  }
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t o = 0; o < kOut; ++o) {
      float lanes[kLanes];
      for (size_t part = 0; part < kParts; ++part) {
        *reinterpret_cast<typename I::Unaligned*>(lanes + part * I::kWidth) = sum[r][o][part];
      }
      for (size_t half = kLanes / 2; half > 0; half /= 2) {
        for (size_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
      }
      y[r * s.out + o] = lanes[0] + bias[o];
    }
  }
}

template <class I, size_t kOut>
GRADGATE_DIGITS_INLINE void forward_rows(LayerShape s, const float* x, const float* weights, const float* bias,
                                         float* y) noexcept {
  size_t r = 0;
  for (; r + I::kRows <= s.rows; r += I::kRows) {
    forward_tile<I, I::kRows, kOut>(s, x + r * s.in, weights, bias, y + r * s.out);
  }
  for (; r < s.rows; ++r) forward_tile<I, 1, kOut>(s, x + r * s.in, weights, bias, y + r * s.out);
}

template <class I>
GRADGATE_DIGITS_INLINE void forward(LayerShape s, const float* x, const float* weights, const float* bias,
                                    float* y) noexcept {
  size_t o = 0;
  for (; o + I::kOut <= s.out; o += I::kOut) forward_rows<I, I::kOut>(s, x, weights + o * s.in, bias + o, y + o);
  for (; o < s.out; ++o) forward_rows<I, 1>(s, x, weights + o * s.in, bias + o, y + o);
}

// c[m][n] = a * b for a[m][k] of any strides and b[k][n], n a multiple of 16: both backward products. Terms are added in order of k.
struct Product {
  size_t m, n, k;
  const float* a;
  size_t a_row, a_column;  // strides of a, in floats
  const float* b;
  float* c;
};

template <class I, size_t kRows, size_t kVectors>
GRADGATE_DIGITS_INLINE void product_tile(const Product& p, size_t row, size_t column) noexcept {
  typename I::Vector sum[kRows][kVectors] = {};
  const float* a = p.a + row * p.a_row;
  const float* b = p.b + column;
  for (size_t k = 0; k < p.k; ++k, a += p.a_column, b += p.n) {
    typename I::Vector line[kVectors];
    for (size_t v = 0; v < kVectors; ++v) {
      line[v] = *reinterpret_cast<const typename I::Unaligned*>(b + v * I::kWidth);
    }
    for (size_t r = 0; r < kRows; ++r) {
      for (size_t v = 0; v < kVectors; ++v) sum[r][v] += line[v] * a[r * p.a_row];
    }
  }
  float* c = p.c + row * p.n + column;
  for (size_t r = 0; r < kRows; ++r) {
    for (size_t v = 0; v < kVectors; ++v) {
      *reinterpret_cast<typename I::Unaligned*>(c + r * p.n + v * I::kWidth) = sum[r][v];
    }
  }
}

template <class I, size_t kVectors>
GRADGATE_DIGITS_INLINE void product_columns(const Product& p, size_t column) noexcept {
  constexpr size_t kRows = 4;
  size_t row = 0;
  for (; row + kRows <= p.m; row += kRows) product_tile<I, kRows, kVectors>(p, row, column);
  for (; row < p.m; ++row) product_tile<I, 1, kVectors>(p, row, column);
}

template <class I>
GRADGATE_DIGITS_INLINE void product(const Product& p) noexcept {
  constexpr size_t kStep = I::kVectors * I::kWidth;
  size_t column = 0;
  for (; column + kStep <= p.n; column += kStep) product_columns<I, I::kVectors>(p, column);
  for (; column < p.n; column += I::kWidth) product_columns<I, 1>(p, column);
}

GRADGATE_DIGITS_INLINE void momentum(size_t count, float rate, float factor, const float* __restrict gradient,
                                     float* __restrict velocity, float* __restrict weights) noexcept {
  for (size_t i = 0; i < count; ++i) {
    velocity[i] = factor * velocity[i] + gradient[i];
    weights[i] -= rate * velocity[i];
  }
}

struct Kernels {
  void (*forward)(LayerShape, const float*, const float*, const float*, float*) noexcept;
  void (*product)(const Product&) noexcept;
  void (*momentum)(size_t, float, float, const float*, float*, float*) noexcept;
};

#define GRADGATE_DIGITS_KERNELS(name, attribute, ...)                                                      \
  attribute void forward_##name(LayerShape s, const float* x, const float* w, const float* b,              \
                                float* y) noexcept {                                                       \
    forward<__VA_ARGS__>(s, x, w, b, y);                                                                   \
  }                                                                                                        \
  attribute void product_##name(const Product& p) noexcept { product<__VA_ARGS__>(p); }                    \
  attribute void momentum_##name(size_t count, float rate, float factor, const float* gradient,            \
                                 float* velocity, float* weights) noexcept {                               \
    momentum(count, rate, factor, gradient, velocity, weights);                                            \
  }                                                                                                        \
  constexpr Kernels k_##name = {forward_##name, product_##name, momentum_##name}

using Isa4 = Isa<4, 1, 2>;
GRADGATE_DIGITS_KERNELS(portable, , Isa4);
#ifdef GRADGATE_DIGITS_X86
using Isa8 = Isa<8, 2, 2>;
using Isa16 = Isa<16, 4, 4>;
GRADGATE_DIGITS_KERNELS(avx2, __attribute__((target("avx2"))), Isa8);
GRADGATE_DIGITS_KERNELS(avx512, __attribute__((target("avx512f"))), Isa16);
#endif
#undef GRADGATE_DIGITS_KERNELS

const Kernels& kernels() noexcept {
#ifdef GRADGATE_DIGITS_X86
  static const Kernels& chosen = __builtin_cpu_supports("avx512f") ? k_avx512
                                 : __builtin_cpu_supports("avx2")  ? k_avx2
                                                                   : k_portable;
  return chosen;
#else
  return k_portable;
#endif
}

}  // namespace

void forward_product(LayerShape s, const float* x, const float* weights, const float* bias, float* y) noexcept {
  kernels().forward(s, x, weights, bias, y);
}

void backward_input(LayerShape s, const float* dy, const float* weights, float* dx) noexcept {
  kernels().product({.m = s.rows, .n = s.in, .k = s.out, .a = dy, .a_row = s.out, .a_column = 1, .b = weights, .c = dx});
}

void backward_weights(LayerShape s, const float* dy, const float* x, float* dweights, float* dbias) noexcept {
  kernels().product({.m = s.out, .n = s.in, .k = s.rows, .a = dy, .a_row = 1, .a_column = s.out, .b = x, .c = dweights});
  std::fill_n(dbias, s.out, 0.0f);
  for (size_t r = 0; r < s.rows; ++r) {
    for (size_t k = 0; k < s.out; ++k) dbias[k] += dy[r * s.out + k];
  }
}

void momentum_step(size_t count, float rate, float momentum, const float* gradient, float* velocity,
                   float* weights) noexcept {
  kernels().momentum(count, rate, momentum, gradient, velocity, weights);
}

}  // namespace gradgate::digits
