// int4: four bits per element and an f32 scale per block of 128; with hadamard of the block's rotation (docs/format.md
// §3). Element code, for host and device.
#pragma once

#include "codecs/philox.h"
#include "codecs/scaled.h"

namespace gradgate::codecs {

/// The signs of the rotations of a payload, from its header's step.
GRADGATE_HD PhiloxBlock rotation_signs(uint32_t step) { return philox4x32_10(step, 0, 0, 0, 0x61646148u, 0x6472616du); }
/// The sign of element j of a block, as the sign bit of a float.
GRADGATE_HD uint32_t rotation_sign(const PhiloxBlock& signs, uint32_t j) {
  return (signs.word[j / 32] >> (j % 32)) << 31;
}
/// One pair of the butterflies, which are taken for distances 64, 32, … 1.
GRADGATE_HD void butterfly(float* low, float* high) {
  const float a = *low, b = *high;
  *low = exact::add(a, b);
  *high = exact::sub(a, b);
}

/// What surrounds the butterflies, from the greatest mag(x) of a block that is finite and not zero.
struct Rotation {
  static constexpr size_t kBlock = 128;
  static constexpr uint32_t kHugeBits = 0x71800000u;  // 2^100: from here on the butterflies could overflow
  float before;                                       ///< exact factor in front: 2^64, 2^-64 or 1

  GRADGATE_HD static Rotation of(uint32_t max_mag) {
    return {max_mag < BlockScale::kTinyBits ? 0x1p64f : max_mag >= kHugeBits ? 0x1p-64f : 1.0f};
  }
  GRADGATE_HD float in(float x, uint32_t sign) const {
    return exact::from_bits(exact::bits(exact::mul(x, before)) ^ sign);
  }
};
struct Unrotation {
  static constexpr float kEven = 0x1p-7f;  ///< a rotation and its reverse make a block 128 times as great

  float after;

  /// Of the stored scale.
  GRADGATE_HD static Unrotation of(uint32_t stored) {
    const bool marked = (stored >> 31) != 0, below_one = (stored & exact::kMagMask) < 0x3f800000u;
    return {!marked ? 1.0f : below_one ? 0x1p-64f : 0x1p64f};
  }
  GRADGATE_HD float out(float z, uint32_t sign) const {
    const uint32_t d = exact::bits(exact::mul(exact::mul(z, kEven), after));
    const uint32_t limited = after > 1.0f && (d & exact::kMagMask) == exact::kInfBits ? d - 1 : d;
    return exact::from_bits(limited ^ sign);
  }
};

struct Int4Encoder : IntEncoder<7> {
  GRADGATE_HD static Int4Encoder of(uint32_t max_mag) { return {IntEncoder<7>::of(max_mag)}; }
  /// Of the rotated elements, whose greatest magnitude is max_mag.
  GRADGATE_HD static Int4Encoder rotated(uint32_t max_mag, const Rotation& rotation) {
    Int4Encoder encoder = of(max_mag);
    encoder.stored |= rotation.before != 1.0f ? 0x80000000u : 0u;
    return encoder;
  }
};
struct Int4Decoder : IntDecoder {
  GRADGATE_HD static Int4Decoder of(uint32_t stored, uint32_t /*part*/ = 0) { return {IntDecoder::of(stored)}; }
  /// Values of rotated elements: what the sign bit of the scale says comes after the butterflies.
  GRADGATE_HD static Int4Decoder rotated(uint32_t stored) { return of(stored & exact::kMagMask); }
};

template <bool kSr, bool kHadamard>
struct Int4Format : BlockFormat {
  static constexpr size_t kBlock = Rotation::kBlock, kBits = 4;
  static constexpr bool kStochastic = kSr, kRotated = kHadamard;
  using Encoder = Int4Encoder;
  using Decoder = Int4Decoder;
  using Code = int8_t;
};

template <>
struct Codec<CodecId::int4> {
  static constexpr const char* kGrammar = "int4[:hadamard][:sr][:noef]";
  static constexpr const char* kSummary = "four bits per element, f32 scale per 128 (hadamard: of the rotated block)";
  static constexpr bool kFeedback = true, kDefaultFeedback = true;
  static constexpr int kFidelity = 50;
  /// A rotation spreads outliers, so it never loses much more and often less; stochastic rounding doubles the variance.
  static int fidelity(const CodecSpec& spec) noexcept {
    return kFidelity - ((spec.param1 & 1) != 0 ? 2 : 0) + ((spec.param1 & 2) != 0 ? 5 : 0);
  }
  static constexpr Exchange kExchange = Exchange::two_shot;
  static constexpr unsigned kTravels = kByShards;

  // param1: bit 0 rotation, bit 1 stochastic rounding.
  static bool parse(std::string_view parameters, CodecSpec* spec, Message* why) noexcept {
    return parse_flags(parameters, "int4", {"hadamard", "sr"}, &spec->param1, why);
  }
  static void format(const CodecSpec& spec, Message* text) noexcept {
    format_flags("int4", {"hadamard", "sr"}, spec.param1, text);
  }
  static bool valid(const CodecSpec& spec) noexcept { return flags_spec(spec, 3); }
  static bool takes(DType gradient) noexcept { return widens_to_f32(gradient); }
  static WireSpec wire(const CodecSpec& spec, DType) noexcept { return {DType::f32, 128, spec.param1}; }
  static size_t unit(const CodecSpec&) noexcept { return kGroup; }

  template <class F>
  static decltype(auto) with_format(const CodecSpec& spec, F&& f) {
    switch (spec.param1) {
      case 0:
        return f(Int4Format<false, false>{});
      case 1:
        return f(Int4Format<false, true>{});
      case 2:
        return f(Int4Format<true, false>{});
      default:
        return f(Int4Format<true, true>{});
    }
  }
  template <class Byte>
  static void layout(const CodecSpec&, DType, size_t count, Carver<Byte>& carver, Sections<Byte>* sections) noexcept {
    scaled_layout<Int4Format<false, false>>(count, carver, sections);
  }
};

}  // namespace gradgate::codecs
