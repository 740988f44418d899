// Codecs that send some elements: their values as int8; a ratio as parameter, how it lies in a spec, and how many
// entries it means (docs/format.md §3).
#pragma once

#include <bit>
#include <cstdint>

#include "codecs/scaled.h"
#include "codecs/traits.h"

namespace gradgate::codecs {

/// Entries that share a scale where values are int8 codes.
inline constexpr size_t kScaleRun = 256;

/// The section of k values: f32 or bf16; or, for DType::u8, a scale per run of entries and then int8 codes.
constexpr size_t codes_offset(size_t k) noexcept {
  return ((k / kScaleRun + (k % kScaleRun != 0)) * sizeof(float) + 15) & ~size_t{15};
}
/// Its bytes; SIZE_MAX where they overflow.
constexpr size_t value_bytes(DType value, size_t k) noexcept {
  if (value == DType::u8) return k > SIZE_MAX / 2 ? SIZE_MAX : codes_offset(k) + k;
  return k > SIZE_MAX / 4 ? SIZE_MAX : k * dtype_bytes(value);
}
constexpr bool is_value_type(DType value) noexcept {
  return value == DType::f32 || value == DType::bf16 || value == DType::u8;
}
/// "f32", "bf16" or "int8" into a value type; an error names the codec and the text.
bool parse_value_type(std::string_view text, const char* name, DType* value, Message* why) noexcept;
/// ":bf16", ":int8", or nothing for f32.
const char* value_type_suffix(DType value) noexcept;

/// A scale and codes of int8 values. `code` of what is not finite is kNotFinite.
struct EntryEncoder : IntEncoder<127> {
  static constexpr int32_t kNotFinite = -128;
  /// From the greatest magnitude of the finite entries.
  GRADGATE_HD static EntryEncoder of(uint32_t max_mag) { return {IntEncoder<127>::of(max_mag)}; }
  GRADGATE_HD int32_t entry(float x) const { return exact::is_finite(x) ? code(x) : kNotFinite; }
};
GRADGATE_HD float entry_value(uint32_t scale, int32_t code) {
  return code == EntryEncoder::kNotFinite ? exact::from_bits(exact::kNanBits) : IntDecoder::of(scale).value(code);
}

/// The ratio: a double, whose halves are the two parameters. Its bits are in range where 0 < ratio <= 1.
inline bool valid_ratio(const CodecSpec& spec) noexcept {
  const uint64_t bits = static_cast<uint64_t>(spec.param1) << 32 | spec.param0;
  return bits > 0 && bits <= std::bit_cast<uint64_t>(1.0);
}
/// min(n, max(1, ratio · n)), the product rounded to a double and then to a whole number, half away from zero; whatever
/// rounding the caller has set.
size_t entries_of_ratio(const CodecSpec& spec, size_t count) noexcept;

/// A decimal number above 0 and up to 1 into the two parameters; an error names the codec, the text and the range.
bool parse_ratio(std::string_view text, const char* name, CodecSpec* spec, Message* why) noexcept;
/// The shortest text that is the same double.
Message ratio_text(const CodecSpec& spec) noexcept;

}  // namespace gradgate::codecs
