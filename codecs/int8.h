// int8: one signed byte per element and an f32 scale per block of 256 (docs/format.md §3). Element code, for host and
// device.
#pragma once

#include "codecs/exact_math.h"
#include "codecs/traits.h"

namespace gradgate::codecs {

/// What a block is encoded with, from the greatest mag(x) in it.
struct Int8Encoder {
  uint32_t stored;  ///< bits of the scale in the payload
  float before;     ///< exact factor in front of the quantisation: 1, or 2^64 for blocks whose 127/a would overflow
  float inverse;    ///< 127/a after that factor; 0 for a block of zeros
  bool finite;      ///< false: the block has an Inf or a NaN, its scale is NaN and its codes are 0

  GRADGATE_HD static Int8Encoder of(uint32_t max_mag) {
    constexpr uint32_t kTinyBits = 0x0d800000u;  // 2^-100
    if (max_mag == 0) return {0, 1.0f, 0.0f, true};
    if (max_mag >= exact::kInfBits) return {exact::kNanBits, 1.0f, 0.0f, false};
    const bool tiny = max_mag < kTinyBits;
    const float before = tiny ? 0x1p64f : 1.0f;
    const float a = exact::mul(exact::from_bits(max_mag), before);
    uint32_t scale = exact::bits(exact::div(a, 127.0f));
    if (!exact::is_finite(exact::mul(127.0f, exact::from_bits(scale)))) scale -= 1;
    return {scale | (tiny ? 0x80000000u : 0u), before, exact::div(127.0f, a), true};
  }

  /// The code of x in a finite block. |x * inverse| <= 127 * (1 + 2^-22), so the nearest integer needs no limiting.
  GRADGATE_HD int32_t code(float x) const { return exact::round_even(exact::mul(exact::mul(x, before), inverse)); }
};

/// What a block is decoded with. A NaN scale makes every value of the block NaN.
struct Int8Decoder {
  float step, after;

  GRADGATE_HD static Int8Decoder of(uint32_t stored) {
    return {exact::from_bits(stored & exact::kMagMask), (stored >> 31) != 0 ? 0x1p-64f : 1.0f};
  }
  GRADGATE_HD float value(int32_t code) const { return exact::mul(exact::mul(static_cast<float>(code), step), after); }
};

template <>
struct Codec<CodecId::int8> {
  static constexpr size_t kBlock = 256;
  // A codec with these three, whose payload is a scale per block and a code per element, needs no loops of its own.
  using Encoder = Int8Encoder;
  using Decoder = Int8Decoder;
  using Code = int8_t;
  static constexpr const char* kGrammar = "int8[:ef]";
  static constexpr const char* kSummary = "one byte per element, f32 scale per 256";
  static constexpr bool kFeedback = true, kDefaultFeedback = false;
  static constexpr int kFidelity = 30;
  static constexpr Exchange kExchange = Exchange::two_shot;
  static constexpr unsigned kTravels = kByShards;

  static bool parse(std::string_view parameters, CodecSpec*, Message* why) noexcept {
    return no_parameters(parameters, "int8", why);
  }
  static void format(const CodecSpec&, Message* text) noexcept { text->format("int8"); }
  static bool valid(const CodecSpec& spec) noexcept { return plain_spec(spec); }
  static bool takes(DType gradient) noexcept { return widens_to_f32(gradient); }
  static WireSpec wire(const CodecSpec&, DType) noexcept { return {DType::f32, kBlock, 0}; }
  static size_t unit(const CodecSpec&) noexcept { return kBlock; }

  template <class Byte>
  static void layout(const CodecSpec&, DType, size_t count, Carver<Byte>& carver, Sections<Byte>* sections) noexcept {
    const size_t blocks = count / kBlock + (count % kBlock != 0);
    sections->first = carver.take(blocks, 4);
    sections->first_bytes = blocks * 4;
    sections->second = carver.take(count, 1);
    sections->second_bytes = count;
  }
};
static_assert(Codec<CodecId::int8>::kBlock == kGroup, "a zero group is a whole block");

}  // namespace gradgate::codecs
