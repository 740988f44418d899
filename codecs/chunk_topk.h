// chunk-topk:c/B: the c greatest of every B elements, with their places (docs/format.md §3). Element code, for host and
// device.
#pragma once

#include "codecs/bf16.h"
#include "codecs/exact_math.h"
#include "codecs/sparse.h"

namespace gradgate::codecs {

/// Order of choice: greater key first, on ties the lower index. All NaN have the same key, above Inf.
GRADGATE_HD uint32_t topk_key(uint32_t magnitude) {
  return magnitude > exact::kInfBits ? exact::kInfBits + 1 : magnitude;
}

/// The value sent for a chosen x, as f32 bits (NaN canonical) or bf16 bits.
GRADGATE_HD uint32_t topk_value_f32(float x) { return exact::bits(exact::canonical(x)); }
GRADGATE_HD uint16_t topk_value_bf16(float x) { return round_bf16(x); }

template <>
struct Codec<CodecId::chunk_topk> {
  static constexpr uint32_t kMinChunk = 32, kMaxChunk = 32768;
  static constexpr const char* kGrammar = "chunk-topk:c/B[:f32|:bf16|:int8][:noef]";
  static constexpr const char* kSummary = "the c greatest of every B elements (B a power of two, 32 to 32768)";
  static constexpr bool kFeedback = true, kDefaultFeedback = true;
  static constexpr int kFidelity = 60;
  static constexpr Exchange kExchange = Exchange::two_shot;
  static constexpr unsigned kTravels = kByShards;

  static bool parse(std::string_view parameters, CodecSpec* spec, Message* why) noexcept;
  static void format(const CodecSpec& spec, Message* text) noexcept;
  static bool valid(const CodecSpec& spec) noexcept {
    return spec.param1 >= kMinChunk && spec.param1 <= kMaxChunk && (spec.param1 & (spec.param1 - 1)) == 0 &&
           spec.param0 >= 1 && spec.param0 <= spec.param1 && is_value_type(spec.value);
  }
  static bool takes(DType gradient) noexcept { return widens_to_f32(gradient); }
  static WireSpec wire(const CodecSpec& spec, DType) noexcept { return {spec.value, spec.param0, spec.param1}; }
  static size_t unit(const CodecSpec& spec) noexcept { return spec.param1 > kGroup ? spec.param1 : kGroup; }

  /// Entries of a vector, or of its first `count` elements where `count` is a multiple of B.
  static size_t entries(const CodecSpec& spec, size_t count) noexcept {
    const size_t last = count % spec.param1;
    return count / spec.param1 * spec.param0 + (last < spec.param0 ? last : spec.param0);
  }

  template <class Byte>
  static void layout(const CodecSpec& spec, DType, size_t count, Carver<Byte>& carver,
                     Sections<Byte>* sections) noexcept {
    const size_t k = entries(spec, count);
    sections->first_bytes = value_bytes(spec.value, k);
    sections->first = carver.take(sections->first_bytes, 1);
    sections->second = carver.take(k, 2);
    sections->second_bytes = k * 2;
  }
};

}  // namespace gradgate::codecs
