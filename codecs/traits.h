// What a codec tells the rest of the library about itself: a specialisation of Codec per line of
// gradgate/codec_list.def, in a header of its own. docs/adding-a-codec.md lists the members.
#pragma once

#include <initializer_list>
#include <string_view>

#include "codecs/layout.h"
#include "gradgate/codec.h"

namespace gradgate::codecs {

/// Elements of a group (docs/format.md §2, rule 2), the same for all codecs.
inline constexpr size_t kGroup = 256;

/// Sets of exchanges, one bit each: what a codec's payload can travel by (Codec::kTravels).
constexpr unsigned by(Exchange exchange) noexcept {
  return static_cast<unsigned>(exchange) < 32 ? 1u << static_cast<unsigned>(exchange) : 0;
}
/// Codecs whose vectors can be cut into shards.
inline constexpr unsigned kByShards = by(Exchange::two_shot) | by(Exchange::all_gather) |
                                      by(Exchange::hierarchical);

/// The spec's part of a header.
struct WireSpec {
  DType value;
  uint32_t param0, param1;
};

template <CodecId id>
struct Codec;

/// For codecs without parameters: accepts only empty text, and says so.
bool no_parameters(std::string_view parameters, const char* name, Message* why) noexcept;
/// For codecs without parameters: the fields that must have their defaults do.
inline bool plain_spec(const CodecSpec& spec) noexcept {
  return spec.value == DType::f32 && spec.param0 == 0 && spec.param1 == 0;
}

/// For codecs whose parameters are switches: each of `flags` may stand in `parameters` once, in any order, and sets the
/// bit of its place in *bits. format_flags writes them in the order of the list.
bool parse_flags(std::string_view parameters, const char* name, std::initializer_list<const char*> flags,
                 uint32_t* bits, Message* why) noexcept;
void format_flags(const char* name, std::initializer_list<const char*> flags, uint32_t bits, Message* text) noexcept;
/// The switches are in param1.
inline bool flags_spec(const CodecSpec& spec, uint32_t known) noexcept {
  return spec.value == DType::f32 && spec.param0 == 0 && (spec.param1 & ~known) == 0;
}

}  // namespace gradgate::codecs
