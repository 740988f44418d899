// All codecs of gradgate/codec_list.def, and the questions that can be asked of any of them.
#pragma once

#include "codecs/cast_bf16.h"
#include "codecs/cast_fp16.h"
#include "codecs/chunk_topk.h"
#include "codecs/fp8.h"
#include "codecs/int4.h"
#include "codecs/int8.h"
#include "codecs/none.h"
#include "codecs/onebit.h"
#include "codecs/randk.h"
#include "codecs/topk.h"

namespace gradgate::codecs {

/// Calls f with the Codec of this id; `otherwise` for an id that is not in the list.
template <class F, class R>
R visit(CodecId id, R otherwise, F&& f) noexcept {
  switch (id) {
#define GRADGATE_CODEC(identifier, value, name) \
  case CodecId::identifier:                     \
    return f(Codec<CodecId::identifier>{});
#include "gradgate/codec_list.def"
#undef GRADGATE_CODEC
  }
  return otherwise;
}

/// Whether a spec could have come from parse_codec: known id, parameters in range, feedback only where there is a
/// residual.
bool valid_spec(const CodecSpec& spec) noexcept;
/// Header fields of a valid spec.
WireSpec wire_spec(const CodecSpec& spec, DType gradient) noexcept;

/// Sections of a payload at `base` (null: sizes only), and its size; 0 bytes where the codec does not take the dtype or
/// the size overflows.
template <class Byte>
size_t bind_payload(const CodecSpec& spec, DType gradient, size_t count, Byte* base,
                    Sections<Byte>* sections) noexcept {
  if (!valid_spec(spec)) return 0;
  Carver<Byte> carver(base);
  sections->header = carver.take(1, 32);
  return visit(spec.id, size_t{0}, [&](auto codec) -> size_t {
    if (!codec.takes(gradient)) return 0;
    codec.layout(spec, gradient, count, carver, sections);
    return carver.bytes();
  });
}

/// What payloads of this codec add up in, where they travel by all_reduce; nothing elsewhere. `none` is reduced dense,
/// without a payload.
inline Addends addends_of(const CodecSpec& spec, size_t count) noexcept {
  return visit(spec.id, Addends{}, [&](auto codec) -> Addends {
    if constexpr (requires { codec.addends(spec, count); }) {
      return codec.addends(spec, count);
    } else {
      return {};
    }
  });
}

}  // namespace gradgate::codecs
