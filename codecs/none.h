// none: the gradient's own bytes (docs/format.md §3).
#pragma once

#include "codecs/traits.h"

namespace gradgate::codecs {

template <>
struct Codec<CodecId::none> {
  static constexpr const char* kGrammar = "none";
  static constexpr const char* kSummary = "the gradient as it is";
  static constexpr bool kFeedback = false, kDefaultFeedback = false;
  static constexpr int kFidelity = 0;
  static constexpr Exchange kExchange = Exchange::all_reduce;
  static constexpr unsigned kTravels = by(Exchange::all_reduce) | kByShards;

  static bool parse(std::string_view parameters, CodecSpec*, Message* why) noexcept {
    return no_parameters(parameters, "none", why);
  }
  static void format(const CodecSpec&, Message* text) noexcept { text->format("none"); }
  static bool valid(const CodecSpec& spec) noexcept { return plain_spec(spec); }
  static bool takes(DType gradient) noexcept {
    return gradient == DType::f32 || gradient == DType::bf16 || gradient == DType::f16 || gradient == DType::f64;
  }
  static WireSpec wire(const CodecSpec&, DType gradient) noexcept { return {gradient, 0, 0}; }
  static size_t unit(const CodecSpec&) noexcept { return kGroup; }

  template <class Byte>
  static void layout(const CodecSpec&, DType gradient, size_t count, Carver<Byte>& carver,
                     Sections<Byte>* sections) noexcept {
    sections->first = carver.take(count, dtype_bytes(gradient));
    sections->first_bytes = count * dtype_bytes(gradient);
  }
};

}  // namespace gradgate::codecs
