// fp8: one byte of floating point per element, e4m3 or e5m2, and an f32 scale per block of 256 (docs/format.md §3).
// Element code, for host and device.
#pragma once

#include "codecs/scaled.h"

namespace gradgate::codecs {

/// A float of one byte with kMantissa bits of fraction, whose least exponent (that of subnormals too) is kLeast.
template <int kMantissa, int kLeast, uint32_t kLargestCode>
struct Fp8 {
  static constexpr uint32_t kExponentShift = 23 - kMantissa;
  static constexpr uint32_t kBias = static_cast<uint32_t>(126 + kLeast) << 23;  // f32 bits of code 0's octave
  static constexpr uint32_t kLeastNormal = kBias + (1u << 23);
  static constexpr uint32_t kLargestBits = (kLargestCode << kExponentShift) + kBias;
  static constexpr uint32_t kBelowLeast = -(kLeastNormal >> kExponentShift) & 0x7fu;
  static_assert(kBelowLeast % 2 == 0);
  static constexpr float kLargest = __builtin_bit_cast(float, kLargestBits);

  /// |v| <= kLargest * (1 + 2^-22), which BlockScale::scaled keeps.
  GRADGATE_HD static uint32_t round(float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t both;  // the same code in one instruction, which makes two
    if constexpr (kMantissa == 3) {
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.0f), "f"(v));
    } else {
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(both) : "f"(0.0f), "f"(v));
    }
    return both;
#else
    const uint32_t b = exact::bits(v);
    const int32_t m = static_cast<int32_t>(b & exact::kMagMask);
    // The octave whose codes are as far apart as they are around v: that of v, or the least one. In the binade of
    // `rounder` floats are just as far apart, so the addition rounds v to a number of such steps, which it leaves in
    // the low bits. There too the octaves below the least one are taken off: their number is even, so ties still go to
    // even.
    const int32_t octave = greatest(m & static_cast<int32_t>(exact::kInfBits), static_cast<int32_t>(kLeastNormal));
    const int32_t rounder = octave + static_cast<int32_t>((kExponentShift << 23) + kBelowLeast);
    const float sum = exact::add(float_of(m), float_of(rounder));
    const uint32_t code = exact::bits(sum) + (static_cast<uint32_t>(octave) >> kExponentShift);
    return exact::choose(0x7fu, code, b >> 24);
#endif
  }
  GRADGATE_HD static float value(uint32_t code) {
#if defined(__CUDA_ARCH__)
    // Exponents of an f32 count from another start; a code's subnormals are an f32's first. (Which a CPU is slow with.)
    constexpr float kStart = __builtin_bit_cast(float, static_cast<uint32_t>(253 + kLeast) << 23);
    return exact::mul(exact::from_bits((code << 24 & 0x80000000u) | (code & 0x7fu) << kExponentShift), kStart);
#else
    const uint32_t m = code & 0x7fu, small = exact::below_mask(m, 1u << kMantissa);
    // A subnormal is what its mantissa adds to the least normal number.
    const uint32_t with = (m << kExponentShift) + exact::choose(small, kLeastNormal, kBias);
    const float size = exact::sub(exact::from_bits(with), exact::from_bits(small & kLeastNormal));
    return exact::from_bits((code & 0x80u) << 24 | exact::bits(size));
#endif
  }

 private:
  // Of signed integers: what every instruction set can compare.
  GRADGATE_HD static int32_t greatest(int32_t a, int32_t b) { return a > b ? a : b; }
  GRADGATE_HD static float float_of(int32_t bits) { return exact::from_bits(static_cast<uint32_t>(bits)); }
};
using E4m3 = Fp8<3, -6, 0x7e>;
using E5m2 = Fp8<2, -14, 0x7b>;
static_assert(E4m3::kLargest == 448.0f && E5m2::kLargest == 57344.0f);

template <class Float>
struct Fp8Encoder : BlockScale {
  GRADGATE_HD static Fp8Encoder of(uint32_t max_mag) { return {BlockScale::of(max_mag, Float::kLargest)}; }
  GRADGATE_HD int32_t code(float x) const { return static_cast<int32_t>(Float::round(scaled(x))); }
};
template <class Float>
struct Fp8Decoder : BlockStep {
  GRADGATE_HD static Fp8Decoder of(uint32_t stored, uint32_t /*part*/ = 0) { return {BlockStep::of(stored)}; }
  GRADGATE_HD float value(int32_t code) const { return times(Float::value(static_cast<uint32_t>(code))); }
};

template <class Float>
struct Fp8Format : BlockFormat {
  static constexpr size_t kBlock = 256, kBits = 8;
  using Encoder = Fp8Encoder<Float>;
  using Decoder = Fp8Decoder<Float>;
  using Code = uint8_t;
};

template <>
struct Codec<CodecId::fp8> {
  static constexpr const char* kGrammar = "fp8[:e5m2][:ef]";
  static constexpr const char* kSummary = "one byte of floating point per element, e4m3 or e5m2, f32 scale per 256";
  static constexpr bool kFeedback = true, kDefaultFeedback = false;
  static constexpr int kFidelity = 40;
  static int fidelity(const CodecSpec& spec) noexcept { return kFidelity + (spec.param1 != 0 ? 5 : 0); }
  static constexpr Exchange kExchange = Exchange::two_shot;
  static constexpr unsigned kTravels = kByShards;

  // param1: 1 for e5m2.
  static bool parse(std::string_view parameters, CodecSpec* spec, Message* why) noexcept {
    return parse_flags(parameters, "fp8", {"e5m2"}, &spec->param1, why);
  }
  static void format(const CodecSpec& spec, Message* text) noexcept {
    format_flags("fp8", {"e5m2"}, spec.param1, text);
  }
  static bool valid(const CodecSpec& spec) noexcept { return flags_spec(spec, 1); }
  static bool takes(DType gradient) noexcept { return widens_to_f32(gradient); }
  static WireSpec wire(const CodecSpec& spec, DType) noexcept { return {DType::f32, 256, spec.param1}; }
  static size_t unit(const CodecSpec&) noexcept { return kGroup; }

  template <class F>
  static decltype(auto) with_format(const CodecSpec& spec, F&& f) {
    return spec.param1 == 0 ? f(Fp8Format<E4m3>{}) : f(Fp8Format<E5m2>{});
  }
  template <class Byte>
  static void layout(const CodecSpec&, DType, size_t count, Carver<Byte>& carver, Sections<Byte>* sections) noexcept {
    scaled_layout<Fp8Format<E4m3>>(count, carver, sections);
  }
};

}  // namespace gradgate::codecs
