// onebit: the sign of every element and the mean magnitude of every block of 1024 (docs/format.md §3). Element code,
// for host and device.
#pragma once

#include "codecs/scaled.h"

namespace gradgate::codecs {

/// The factor in front of the sum of a block's magnitudes, from the greatest of them.
struct MeanScale {
  static constexpr uint32_t kHugeBits = 0x71800000u;  // 2^100: sums of so great elements are scaled down
  float before;

  GRADGATE_HD static MeanScale of(uint32_t max_mag) {
    return {max_mag < BlockScale::kTinyBits ? 0x1p64f : max_mag >= kHugeBits ? 0x1p-24f : 1.0f};
  }
  /// A term of the sum.
  GRADGATE_HD float magnitude(float x) const {
    return exact::from_bits(exact::bits(exact::mul(x, before)) & exact::kMagMask);
  }
};

struct OnebitEncoder {
  static constexpr uint32_t kParts = 15;  // the low bits of a scale: which groups of 256 are not zero
  uint32_t stored;
  bool finite;

  /// From the sum of MeanScale::magnitude over the block, the greatest mag(x), the parts that are not zero and the
  /// number of their elements.
  GRADGATE_HD static OnebitEncoder of(float sum, uint32_t max_mag, uint32_t parts, uint32_t elements) {
    if (max_mag == 0) return {0, true};
    if (max_mag >= exact::kInfBits) return {exact::kNanBits | parts, false};
    const float before = MeanScale::of(max_mag).before;
    float mean = exact::div(sum, static_cast<float>(static_cast<int32_t>(elements)));
    if (before < 1.0f) {
      mean = exact::mul(mean, 0x1p24f);
      if (exact::bits(mean) > max_mag) mean = exact::from_bits(max_mag);  // roundings could carry it to Inf
    }
    return {(exact::bits(mean) & ~kParts) | parts | (before > 1.0f ? 0x80000000u : 0u), true};
  }
  GRADGATE_HD int32_t code(float x) const { return static_cast<int32_t>(exact::bits(x) >> 31); }
};

struct OnebitDecoder {
  uint32_t magnitude, signs;  // bits of the mean, and the bits that a sign may set: none in a zero part, which is +0

  /// Of the elements of part 0 … 3 of a block.
  GRADGATE_HD static OnebitDecoder of(uint32_t stored, uint32_t part) {
    const float mean = exact::from_bits(stored & exact::kMagMask & ~OnebitEncoder::kParts);
    const float scaled = exact::mul(mean, (stored >> 31) != 0 ? 0x1p-64f : 1.0f);
    const bool zero = (stored >> part & 1u) == 0;
    return {zero ? 0u : exact::bits(scaled), zero ? 0u : 0x80000000u};
  }
  GRADGATE_HD float value(int32_t code) const {
    return exact::from_bits(magnitude | ((static_cast<uint32_t>(code) << 31) & signs));
  }
};

struct OnebitFormat : BlockFormat {
  static constexpr size_t kBlock = 1024, kBits = 1;
  static constexpr bool kMean = true;
  using Encoder = OnebitEncoder;
  using Decoder = OnebitDecoder;
};

template <>
struct Codec<CodecId::onebit> {
  static constexpr const char* kGrammar = "onebit[:noef]";
  static constexpr const char* kSummary = "one bit per element, f32 mean magnitude per 1024";
  static constexpr bool kFeedback = true, kDefaultFeedback = true;
  static constexpr int kFidelity = 80;
  static constexpr Exchange kExchange = Exchange::two_shot;
  static constexpr unsigned kTravels = kByShards;

  static bool parse(std::string_view parameters, CodecSpec*, Message* why) noexcept {
    return no_parameters(parameters, "onebit", why);
  }
  static void format(const CodecSpec&, Message* text) noexcept { text->format("onebit"); }
  static bool valid(const CodecSpec& spec) noexcept { return plain_spec(spec); }
  static bool takes(DType gradient) noexcept { return widens_to_f32(gradient); }
  static WireSpec wire(const CodecSpec&, DType) noexcept { return {DType::f32, 1024, 0}; }
  static size_t unit(const CodecSpec&) noexcept { return OnebitFormat::kBlock; }

  template <class F>
  static decltype(auto) with_format(const CodecSpec&, F&& f) {
    return f(OnebitFormat{});
  }
  template <class Byte>
  static void layout(const CodecSpec&, DType, size_t count, Carver<Byte>& carver, Sections<Byte>* sections) noexcept {
    scaled_layout<OnebitFormat>(count, carver, sections);
  }
};

}  // namespace gradgate::codecs
