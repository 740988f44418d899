// int8: one signed byte per element and an f32 scale per block of 256 (docs/format.md §3). Element code, for host and
// device.
#pragma once

#include "codecs/scaled.h"

namespace gradgate::codecs {

using Int8Encoder = IntEncoder<127>;
using Int8Decoder = IntDecoder;

template <bool kSr>
struct Int8Format : BlockFormat {
  static constexpr size_t kBlock = 256, kBits = 8;
  static constexpr bool kStochastic = kSr;
  using Encoder = Int8Encoder;
  using Decoder = Int8Decoder;
  using Code = int8_t;
};

template <>
struct Codec<CodecId::int8> {
  static constexpr const char* kGrammar = "int8[:sr][:ef]";
  static constexpr const char* kSummary = "one byte per element, f32 scale per 256 (sr: rounded stochastically)";
  static constexpr bool kFeedback = true, kDefaultFeedback = false;
  static constexpr int kFidelity = 30;
  /// Stochastic rounding: an error of twice the variance, and still a third of fp8's.
  static int fidelity(const CodecSpec& spec) noexcept { return kFidelity + (spec.param1 != 0 ? 5 : 0); }
  static constexpr Exchange kExchange = Exchange::two_shot;
  static constexpr unsigned kTravels = kByShards;

  // param1: 1 for stochastic rounding.
  static bool parse(std::string_view parameters, CodecSpec* spec, Message* why) noexcept {
    return parse_flags(parameters, "int8", {"sr"}, &spec->param1, why);
  }
  static void format(const CodecSpec& spec, Message* text) noexcept { format_flags("int8", {"sr"}, spec.param1, text); }
  static bool valid(const CodecSpec& spec) noexcept { return flags_spec(spec, 1); }
  static bool takes(DType gradient) noexcept { return widens_to_f32(gradient); }
  static WireSpec wire(const CodecSpec& spec, DType) noexcept { return {DType::f32, 256, spec.param1}; }
  static size_t unit(const CodecSpec&) noexcept { return kGroup; }

  template <class F>
  static decltype(auto) with_format(const CodecSpec& spec, F&& f) {
    return spec.param1 == 0 ? f(Int8Format<false>{}) : f(Int8Format<true>{});
  }
  template <class Byte>
  static void layout(const CodecSpec&, DType, size_t count, Carver<Byte>& carver, Sections<Byte>* sections) noexcept {
    scaled_layout<Int8Format<false>>(count, carver, sections);
  }
};

}  // namespace gradgate::codecs
