// The 32 bytes in front of every payload (docs/format.md §1), and the check of what arrives.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/exact_math.h"
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

/// Compares what arrived with what must arrive, field by field in the order of PayloadFault (magic … check). On the
/// device too: no hash is computed, since the expected check covers every field that is compared.
GRADGATE_HD PayloadFault check_header(const WireHeader& got, const WireHeader& expected) noexcept {
  if (got.magic != expected.magic) return PayloadFault::magic;
  if (got.version != expected.version) return PayloadFault::version;
  if (got.codec != expected.codec) return PayloadFault::codec;
  if (got.value != expected.value) return PayloadFault::value_dtype;
  if (got.count != expected.count) return PayloadFault::count;
  if (got.param0 != expected.param0 || got.param1 != expected.param1) return PayloadFault::parameter;
  const unsigned code = got.flags >> 4;
  const bool error = (got.flags & kFlagError) != 0;
  const bool flags_ok = (got.flags & 0x0c) == 0 && (error ? (got.flags & kFlagNonFinite) == 0 && code != 0 : code == 0);
  if (!flags_ok) return PayloadFault::flags;
  if (got.check != expected.check) return PayloadFault::check;
  return PayloadFault::none;
}

}  // namespace gradgate::codecs
