// Codecs with a scale per block and codes of 8, 4 or 1 bits (codecs/scaled.h), for any BlockFormat.
#pragma once

#include <type_traits>

#include "codecs/codecs.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/loops/group.h"
#include "kernels/cpu/loops/random.h"
#include "kernels/cpu/loops/rotate.h"

namespace gradgate::kernels::cpu {
namespace {

template <class F>
using SignsOf = std::conditional_t<F::kRotated, RotationSigns, NoSigns>;

// Calls put(i, q(i)) for the codes of a block, and packs them.
template <class F, class Quantise, class Put>
GRADGATE_INLINE void pack_block(uint8_t* __restrict code, Quantise q, Put put) {
  if constexpr (F::kBits == 8) {
    for (size_t i = 0; i < F::kBlock; ++i) {
      const int32_t value = q(i);
      code[i] = static_cast<uint8_t>(value);
      put(i, value);
    }
  } else {
    static_assert(F::kBits == 4);
    constexpr size_t kHalf = F::kBlock / 2;
    for (size_t j = 0; j < kHalf; ++j) {
      const int32_t low = q(j), high = q(j + kHalf);
      code[j] = static_cast<uint8_t>((low & 15) | (high << 4));
      put(j, low);
      put(j + kHalf, high);
    }
  }
}

// Encoding of blocks that are not longer than a group.
template <class F>
struct ScaledEncoder {
  using Unit = uint8_t;
  static_assert(F::kBlock <= kGroupElements && !F::kMean);

  const EncodeJob& job;
  [[no_unique_address]] SignsOf<F> signs;

  explicit ScaledEncoder(const EncodeJob& j) : job(j), signs(j.seed.step) {}
  Unit* start(size_t begin) const { return reinterpret_cast<Unit*>(job.second) + codecs::code_bytes<F>(begin); }
  static constexpr size_t units(size_t n) { return codecs::code_bytes<F>(n); }

  // Codes of a group, and with feedback its residual. e may be null without.
  template <bool kFeedback>
  GRADGATE_INLINE void encode(size_t begin, const Group& group, Unit* code, float* e) const {
    alignas(64) float u[F::kStochastic ? kGroupElements : 1];
    if constexpr (F::kStochastic) {
      if (group.max != 0) group_dither(job.seed, job.seed.first + begin, u);
    }
    for (size_t at = 0; at < kGroupElements; at += F::kBlock) {
      const float* x = group.x + at;
      const int32_t max = F::kBlock == kGroupElements ? group.max : max_magnitude<float, F::kBlock>(x);
      const uint32_t stored = block<kFeedback>(static_cast<uint32_t>(max), x, u + (F::kStochastic ? at : 0),
                                               code + units(at), kFeedback ? e + at : nullptr);
      __builtin_memcpy(job.first + (begin + at) / F::kBlock * 4, &stored, 4);
    }
  }

 private:
  template <bool kFeedback>
  GRADGATE_INLINE uint32_t block(uint32_t max, const float* __restrict x, const float* __restrict u,
                                 uint8_t* __restrict code, float* __restrict e) const {
    using Encoder = typename F::Encoder;
    if (max >= exact::kInfBits || max == 0) {
      __builtin_memset(code, 0, units(F::kBlock));
      if (kFeedback && max == 0) __builtin_memcpy(e, x, F::kBlock * sizeof(float));
      return Encoder::of(max).stored;  // where every d is NaN the residual stays
    }
    if constexpr (F::kRotated) {
      return rotated<kFeedback>(max, x, u, code, e);
    } else {
      const Encoder encoder = Encoder::of(max);
      const auto decoder = F::Decoder::of(encoder.stored);
      pack_block<F>(
          code, [&](size_t i) { return quantise(encoder, x[i], u, i); },
          [&](size_t i, int32_t q) {
            if constexpr (kFeedback) e[i] = exact::sub(x[i], decoder.value(q));
          });
      return encoder.stored;
    }
  }

  template <bool kFeedback>
  GRADGATE_INLINE uint32_t rotated(uint32_t max, const float* __restrict x, const float* __restrict u,
                                   uint8_t* __restrict code, float* __restrict e) const {
    const auto rotation = codecs::Rotation::of(max);
    alignas(64) float y[F::kBlock], z[F::kBlock];
    for (size_t i = 0; i < F::kBlock; ++i) y[i] = rotation.in(x[i], signs.sign[i]);
    butterflies(y);
    const auto encoder = F::Encoder::rotated(static_cast<uint32_t>(max_magnitude<float, F::kBlock>(y)), rotation);
    const auto decoder = F::Decoder::rotated(encoder.stored);
    pack_block<F>(
        code, [&](size_t i) { return quantise(encoder, y[i], u, i); },
        [&](size_t i, int32_t q) {
          if constexpr (kFeedback) z[i] = decoder.value(q);
        });
    if constexpr (kFeedback) {
      butterflies(z);
      const auto back = codecs::Unrotation::of(encoder.stored);
      for (size_t i = 0; i < F::kBlock; ++i) e[i] = exact::sub(x[i], back.out(z[i], signs.sign[i]));
    }
    return encoder.stored;
  }

  template <class Encoder>
  static GRADGATE_INLINE int32_t quantise(const Encoder& encoder, float v, const float* u, size_t i) {
    if constexpr (F::kStochastic) {
      return encoder.code(v, u[i]);
    } else {
      return encoder.code(v);
    }
  }
};

// Decoding a group of 256 at a time, of blocks of any length.
template <class F>
struct ScaledDecoder {
  const DecodeJob& job;
  [[no_unique_address]] SignsOf<F> signs;

  explicit ScaledDecoder(const DecodeJob& j) : job(j), signs(j.step) {}

  template <bool kAdd, class O>
  GRADGATE_INLINE void decode(size_t begin, size_t n, O* out) const {
    const uint8_t* code = reinterpret_cast<const uint8_t*>(job.second) + codecs::code_bytes<F>(begin);
    prefetch_ahead(code, codecs::code_bytes<F>(kGroupElements));
    if constexpr (F::kBits == 8) {
      const auto decoder = F::Decoder::of(stored(begin));
      const auto* typed = reinterpret_cast<const typename F::Code*>(code);
      emit<kAdd>(out, n, [=, scale = job.scale](size_t i) { return exact::mul(decoder.value(typed[i]), scale); });
    } else if constexpr (F::kBits == 4) {
      for (size_t at = 0; at < n; at += F::kBlock)
        halves<kAdd>(stored(begin + at), code + at / 2, least(n - at, F::kBlock), out + at);
    } else {
      static_assert(F::kBits == 1);
      const auto decoder = F::Decoder::of(stored(begin), static_cast<uint32_t>(begin % F::kBlock / kGroupElements));
      uint32_t word[kGroupElements / 32] = {};
      if (n == kGroupElements) {
        __builtin_memcpy(word, code, sizeof word);
      } else {
        __builtin_memcpy(word, code, (n + 7) / 8);
      }
      for (size_t at = 0; at < n; at += 32) {
        emit<kAdd, 32>(out + at, least(n - at, 32), [=, bits = word[at / 32], scale = job.scale](size_t i) {
          return exact::mul(decoder.value(static_cast<int32_t>(bits >> i & 1u)), scale);
        });
      }
    }
  }

 private:
  GRADGATE_INLINE uint32_t stored(size_t begin) const {
    uint32_t bits;
    __builtin_memcpy(&bits, job.first + begin / F::kBlock * 4, 4);
    return bits;
  }

  template <bool kAdd, class O>
  GRADGATE_INLINE void halves(uint32_t scale_bits, const uint8_t* __restrict code, size_t n, O* out) const {
    constexpr size_t kHalf = F::kBlock / 2;
    const auto low = [](uint8_t c) { return static_cast<int32_t>(static_cast<uint32_t>(c) << 28) >> 28; };
    const auto high = [](uint8_t c) { return static_cast<int32_t>(static_cast<uint32_t>(c) << 24) >> 28; };
    if constexpr (F::kRotated) {
      const auto decoder = F::Decoder::rotated(scale_bits);
      const auto back = codecs::Unrotation::of(scale_bits);
      alignas(64) float z[F::kBlock];
      for (size_t j = 0; j < kHalf; ++j) z[j] = decoder.value(low(code[j]));
      for (size_t j = 0; j < kHalf; ++j) z[j + kHalf] = decoder.value(high(code[j]));
      butterflies(z);
      const bool zero = scale_bits == 0;
      emit<kAdd, F::kBlock>(out, n, [&, scale = job.scale](size_t i) {
        return exact::mul(zero ? 0.0f : back.out(z[i], signs.sign[i]), scale);
      });
    } else {
      const auto decoder = F::Decoder::of(scale_bits);
      emit<kAdd, kHalf>(out, least(n, kHalf),
                        [=, scale = job.scale](size_t j) { return exact::mul(decoder.value(low(code[j])), scale); });
      if (n > kHalf) {
        emit<kAdd, kHalf>(out + kHalf, n - kHalf,
                          [=, scale = job.scale](size_t j) { return exact::mul(decoder.value(high(code[j])), scale); });
      }
    }
  }
};

}  // namespace
}  // namespace gradgate::kernels::cpu
