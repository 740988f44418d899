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

}  // namespace gradgate::codecs
