// bf16: every element rounded to bf16 (docs/format.md §2, rule 7; the element code is codecs/bf16.h).
#pragma once

#include "codecs/bf16.h"
#include "codecs/traits.h"

namespace gradgate::codecs {

template <>
struct Codec<CodecId::bf16> {
  static constexpr const char* kGrammar = "bf16[:ef]";
  static constexpr const char* kSummary = "two bytes per element, sums in f32";
  static constexpr bool kFeedback = true, kDefaultFeedback = false;
  static constexpr int kFidelity = 20;
  static constexpr Exchange kExchange = Exchange::two_shot;
  static constexpr unsigned kTravels = kByShards | by(Exchange::all_reduce);

  static bool parse(std::string_view parameters, CodecSpec*, Message* why) noexcept {
    return no_parameters(parameters, "bf16", why);
  }
  static void format(const CodecSpec&, Message* text) noexcept { text->format("bf16"); }
  static bool valid(const CodecSpec& spec) noexcept { return plain_spec(spec); }
  static bool takes(DType gradient) noexcept { return gradient == DType::f32; }
  static WireSpec wire(const CodecSpec&, DType) noexcept { return {DType::bf16, 0, 0}; }
  static size_t unit(const CodecSpec&) noexcept { return kGroup; }

  template <class Byte>
  static void layout(const CodecSpec&, DType, size_t count, Carver<Byte>& carver, Sections<Byte>* sections) noexcept {
    sections->first = carver.take(count, 2);
    sections->first_bytes = count * 2;
  }

  /// bf16 has the range of f32, so sums need no scaling first.
  static Addends addends(const CodecSpec&, size_t count) noexcept { return {32, count, DType::bf16}; }
};

}  // namespace gradgate::codecs
