// The 32 bytes in front of every payload (docs/format.md §1), and the check of what arrives.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gradgate/codec.h"

namespace gradgate::codecs {

inline constexpr uint32_t kMagic = 0x31504747u;  // "GGP1"
inline constexpr uint8_t kVersion = 1;
inline constexpr uint8_t kFlagError = 1, kFlagNonFinite = 2;

struct WireHeader {
  uint32_t magic;
  uint8_t version, codec, value, flags;
  uint64_t count;
  uint32_t param0, param1, step, check;
};
static_assert(sizeof(WireHeader) == 32 && offsetof(WireHeader, count) == 8 && offsetof(WireHeader, check) == 28);

/// The header of a payload for `count` elements: all fields, flags zero.
WireHeader make_header(const CodecSpec& spec, DType gradient, uint64_t count, uint32_t step) noexcept;

/// FNV-1a over bytes 4-6 and 8-23.
uint32_t header_check(const WireHeader& header) noexcept;

/// Compares what arrived with what must arrive, field by field in the order of PayloadFault (magic … check).
PayloadFault check_header(const WireHeader& got, const WireHeader& expected) noexcept;

}  // namespace gradgate::codecs
