// fp16: every element as an f16, all scaled by one power of two (docs/format.md §3). Element code, for host and device.
#pragma once

#include <cstddef>

#include "codecs/f16.h"
#include "codecs/traits.h"

namespace gradgate::codecs {

/// The power of two of a vector, from the greatest magnitude of its finite elements.
struct Fp16Scale {
  float in;         ///< 2^k
  uint32_t stored;  ///< bits of 2^-k

  GRADGATE_HD static Fp16Scale of(uint32_t max_mag) {
    // For a normal maximum of exponent field E, k = 14 - (E - 127), at most 126 so that 2^-k is normal; subnormals need
    // more than that anyway.
    const uint32_t exponent = max_mag >> 23, wanted = 268u - exponent;
    const uint32_t k_field = max_mag == 0 ? 127u : wanted < 253u ? wanted : 253u;
    return {exact::from_bits(k_field << 23), (254u - k_field) << 23};
  }
  /// f16 bits of x; finite elements stay below 2^15.
  GRADGATE_HD uint16_t element(float x) const {
    const uint32_t h = round_f16(exact::mul(x, in)), m = h & 0x7fffu;
    const uint32_t limited = (h & 0x8000u) | (m < 0x77ffu ? m : 0x77ffu);
    return static_cast<uint16_t>(exact::choose(exact::below_mask(m, 0x7c00u), limited, h));
  }
};
GRADGATE_HD float fp16_value(uint16_t element, float scale) { return exact::mul(widen_f16(element), scale); }

template <>
struct Codec<CodecId::fp16> {
  static constexpr const char* kGrammar = "fp16[:ef]";
  static constexpr const char* kSummary = "two bytes per element, one power of two for all, sums in f32";
  static constexpr bool kFeedback = true, kDefaultFeedback = false;
  static constexpr int kFidelity = 10;
  static constexpr Exchange kExchange = Exchange::two_shot;
  static constexpr unsigned kTravels = kByShards;

  /// Elements depend on the greatest finite magnitude of the vector: it is read once more, before, and this is written.
  static void put_vector(uint32_t max_mag, std::byte* first) noexcept {
    const uint32_t stored = Fp16Scale::of(max_mag).stored;
    __builtin_memcpy(first, &stored, sizeof stored);
  }

  static bool parse(std::string_view parameters, CodecSpec*, Message* why) noexcept {
    return no_parameters(parameters, "fp16", why);
  }
  static void format(const CodecSpec&, Message* text) noexcept { text->format("fp16"); }
  static bool valid(const CodecSpec& spec) noexcept { return plain_spec(spec); }
  static bool takes(DType gradient) noexcept { return gradient == DType::f32; }
  static WireSpec wire(const CodecSpec&, DType) noexcept { return {DType::f16, 0, 0}; }
  static size_t unit(const CodecSpec&) noexcept { return kGroup; }

  template <class Byte>
  static void layout(const CodecSpec&, DType, size_t count, Carver<Byte>& carver, Sections<Byte>* sections) noexcept {
    const size_t scales = count != 0;
    sections->first = carver.take(scales, 4);
    sections->first_bytes = scales * 4;
    sections->second = carver.take(count, 2);
    sections->second_bytes = count * 2;
  }
};

}  // namespace gradgate::codecs
