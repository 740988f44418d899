// What block codecs share: a scale per block and a code of 8, 4 or 1 bits per element (docs/format.md §3, scaled
// blocks). Element code, for host and device.
#pragma once

#include "codecs/exact_math.h"
#include "codecs/traits.h"

namespace gradgate::codecs {

/// A block codec describes each of its variants by a struct like this one, and hands the one of a spec to
/// Codec::with_format. The loops do the rest.
struct BlockFormat {
  // Also needed: kBlock (128, 256 or 1024 elements), kBits (8, 4 or 1) per code, Encoder and Decoder. Codes of 4 bits
  // are two's complement; element j and j + kBlock/2 share byte j.
  static constexpr bool kStochastic = false;  ///< Encoder::code takes a dither too
  static constexpr bool kRotated = false;     ///< codes are of the block's rotation: Encoder is made by Rotation
  static constexpr bool kMean = false;        ///< Encoder is made from a sum of magnitudes, codes are sign bits
};

/// Bytes of codes for the elements of a vector.
template <class Format>
constexpr size_t code_bytes(size_t count) noexcept {
  if constexpr (Format::kBits == 4)
    return (count / Format::kBlock + (count % Format::kBlock != 0)) * Format::kBlock / 2;
  if constexpr (Format::kBits == 1) return count / 8 + (count % 8 != 0);
  return count;
}

/// Sections of a scaled codec: an f32 per block, then the codes.
template <class Format, class Byte>
void scaled_layout(size_t count, Carver<Byte>& carver, Sections<Byte>* sections) noexcept {
  const size_t blocks = count / Format::kBlock + (count % Format::kBlock != 0), codes = code_bytes<Format>(count);
  sections->first = carver.take(blocks, 4);
  sections->first_bytes = blocks * 4;
  sections->second = carver.take(codes, 1);
  sections->second_bytes = codes;
}

/// What a block is encoded with, from the greatest mag(x) in it; `largest` is the greatest value of a code.
struct BlockScale {
  static constexpr uint32_t kTinyBits = 0x0d800000u;  // 2^-100: below, largest / a could overflow

  uint32_t stored;  ///< bits of the scale in the payload
  float before;     ///< exact factor in front of the quantisation: 1, or 2^64 for tiny blocks
  float inverse;    ///< largest/a after that factor; 0 for a block of zeros
  bool finite;      ///< false: the block has an Inf or a NaN, its scale is NaN and its codes are 0

  GRADGATE_HD static BlockScale of(uint32_t max_mag, float largest) {
    if (max_mag == 0) return {0, 1.0f, 0.0f, true};
    if (max_mag >= exact::kInfBits) return {exact::kNanBits, 1.0f, 0.0f, false};
    const bool tiny = max_mag < kTinyBits;
    const float before = tiny ? 0x1p64f : 1.0f;
    const float a = exact::mul(exact::from_bits(max_mag), before);
    uint32_t scale = exact::bits(exact::div(a, largest));
    if (!exact::is_finite(exact::mul(largest, exact::from_bits(scale)))) scale -= 1;
    return {scale | (tiny ? 0x80000000u : 0u), before, exact::div(largest, a), true};
  }
  /// x in units of a code's value: at most largest * (1 + 2^-22) in magnitude.
  GRADGATE_HD float scaled(float x) const { return exact::mul(exact::mul(x, before), inverse); }
};

/// What a block is decoded with. A NaN scale makes every value of the block NaN.
struct BlockStep {
  float step, after;

  GRADGATE_HD static BlockStep of(uint32_t stored) {
    return {exact::from_bits(stored & exact::kMagMask), (stored >> 31) != 0 ? 0x1p-64f : 1.0f};
  }
  GRADGATE_HD float times(float value) const { return exact::mul(exact::mul(value, step), after); }
};

/// Integer codes -kLargest … kLargest.
template <int kLargest>
struct IntEncoder : BlockScale {
  GRADGATE_HD static IntEncoder of(uint32_t max_mag) { return {BlockScale::of(max_mag, float{kLargest})}; }
  /// The code of x in a finite block, by itself or with stochastic rounding.
  GRADGATE_HD int32_t code(float x) const { return rounded(scaled(x)); }
  GRADGATE_HD int32_t code(float x, float dither) const { return rounded(scaled(x), dither); }

  /// Of v = scaled(x). The nearest integer needs no limiting; |dither| < 1/2 may carry the greatest elements one too
  /// far.
  GRADGATE_HD static int32_t rounded(float v) { return exact::round_even(v); }
  GRADGATE_HD static int32_t rounded(float v, float dither) {
    const int32_t q = exact::round_even(exact::add(v, dither));
    return q > kLargest ? kLargest : q < -kLargest ? -kLargest : q;
  }
};
struct IntDecoder : BlockStep {
  GRADGATE_HD static IntDecoder of(uint32_t stored, uint32_t /*part*/ = 0) { return {BlockStep::of(stored)}; }
  GRADGATE_HD float value(int32_t code) const { return times(static_cast<float>(code)); }
};

}  // namespace gradgate::codecs
