#include "codecs/header.h"

#include <cstring>

#include "codecs/codecs.h"

namespace gradgate::codecs {

uint32_t header_check(const WireHeader& header) noexcept {
  unsigned char bytes[sizeof header];
  std::memcpy(bytes, &header, sizeof header);
  uint32_t hash = 0x811c9dc5u;
  for (size_t i = 4; i < 24; ++i) {
    if (i == 7) continue;  // the flags say what happened, not what the payload is
    hash = (hash ^ bytes[i]) * 0x01000193u;
  }
  return hash;
}

WireHeader make_header(const CodecSpec& spec, DType gradient, uint64_t count, uint32_t step) noexcept {
  const WireSpec wire = wire_spec(spec, gradient);
  WireHeader header{};
  header.magic = kMagic;
  header.version = kVersion;
  header.codec = static_cast<uint8_t>(spec.id);
  header.value = static_cast<uint8_t>(wire.value);
  header.count = count;
  header.param0 = wire.param0;
  header.param1 = wire.param1;
  header.step = step;
  header.check = header_check(header);
  return header;
}

PayloadFault check_header(const WireHeader& got, const WireHeader& expected) noexcept {
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
