// Codecs whose parameter is a ratio: how it lies in a spec, and how many entries it means (docs/format.md §3).
#pragma once

#include <bit>
#include <cstdint>

#include "codecs/traits.h"

namespace gradgate::codecs {

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
