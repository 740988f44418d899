// topk:ratio: the greatest elements of a whole vector, with their places in chunks of 65,536 (docs/format.md §3).
// Element code, for host and device.
#pragma once

#include "codecs/chunk_topk.h"

namespace gradgate::codecs {

template <>
struct Codec<CodecId::topk> {
  static constexpr size_t kChunk = 65536;
  static constexpr const char* kGrammar = "topk:ratio[:f32|:bf16|:int8][:noef]";
  static constexpr const char* kSummary = "the greatest ratio (0 to 1) of all elements, exactly";
  static constexpr bool kFeedback = true, kDefaultFeedback = true;
  static constexpr int kFidelity = 65;
  static constexpr Exchange kExchange = Exchange::all_gather;
  static constexpr unsigned kTravels = by(Exchange::all_gather) | by(Exchange::hierarchical);

  static bool parse(std::string_view parameters, CodecSpec* spec, Message* why) noexcept;
  static void format(const CodecSpec& spec, Message* text) noexcept;
  static bool valid(const CodecSpec& spec) noexcept { return valid_ratio(spec) && is_value_type(spec.value); }
  static bool takes(DType gradient) noexcept { return widens_to_f32(gradient); }
  static WireSpec wire(const CodecSpec& spec, DType) noexcept { return {spec.value, spec.param0, spec.param1}; }
  static size_t unit(const CodecSpec&) noexcept { return kChunk; }

  /// Entries of a vector.
  static size_t entries(const CodecSpec& spec, size_t count) noexcept { return entries_of_ratio(spec, count); }
  static size_t chunks(size_t count) noexcept { return count / kChunk + (count % kChunk != 0); }

  /// Counts, values, indices.
  template <class Byte>
  static void layout(const CodecSpec& spec, DType, size_t count, Carver<Byte>& carver,
                     Sections<Byte>* sections) noexcept {
    const size_t k = entries(spec, count), c = chunks(count);
    sections->first = carver.take(c, 4);
    sections->first_bytes = c * 4;
    sections->second_bytes = value_bytes(spec.value, k);
    sections->second = carver.take(sections->second_bytes, 1);
    sections->third = carver.take(k, 2);
    sections->third_bytes = k * 2;
  }
};

}  // namespace gradgate::codecs
