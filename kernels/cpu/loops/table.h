// Joins the loops of this folder into one table: GRADGATE_LOOPS_TABLE names it, the including file's compile options
// decide what it runs on.
#pragma once

#include "kernels/cpu/loops/blocks.h"
#include "kernels/cpu/loops/topk.h"

namespace gradgate::kernels::cpu {
namespace {

template <CodecId id>
inline constexpr bool kScaled = requires {
  typename codecs::Codec<id>::Encoder;
};

template <CodecId id, class G, bool kFeedback>
uint64_t encode_as(const EncodeJob& job, size_t begin, size_t end, std::byte* scratch) {
  if constexpr (kScaled<id>) {
    return encode_blocks<ScaledBlock<codecs::Codec<id>>, G, kFeedback>(job, begin, end);
  } else if constexpr (id == CodecId::bf16) {
    return encode_blocks<CastBlock, G, kFeedback>(job, begin, end);
  } else if constexpr (id == CodecId::chunk_topk) {
    return job.spec.value == DType::f32 ? encode_chunks<G, float, kFeedback>(job, begin, end, scratch)
                                        : encode_chunks<G, uint16_t, kFeedback>(job, begin, end, scratch);
  } else {
    static_assert(id == CodecId::none, "a codec without loops");
    return encode_none(job, begin, end);
  }
}

template <CodecId id, class O, bool kAdd>
void decode_as(const DecodeJob& job, size_t begin, size_t end) {
  if constexpr (kScaled<id>) {
    decode_blocks<ScaledBlock<codecs::Codec<id>>, O, kAdd>(job, begin, end);
  } else if constexpr (id == CodecId::bf16) {
    decode_blocks<CastBlock, O, kAdd>(job, begin, end);
  } else if constexpr (id == CodecId::chunk_topk) {
    job.spec.value == DType::f32 ? decode_chunks<float, O, kAdd>(job, begin, end)
                                 : decode_chunks<uint16_t, O, kAdd>(job, begin, end);
  } else {
    static_assert(id == CodecId::none, "a codec without loops");
    job.gradient == DType::f32 ? decode_blocks<NoneBlock<float>, O, kAdd>(job, begin, end)
                               : decode_blocks<NoneBlock<uint16_t>, O, kAdd>(job, begin, end);
  }
}

template <class G, bool kFeedback>
uint64_t encode_from(const EncodeJob& job, size_t begin, size_t end, std::byte* scratch) {
  switch (job.spec.id) {
#define GRADGATE_CODEC(identifier, value, name) \
  case CodecId::identifier:                     \
    return encode_as<CodecId::identifier, G, kFeedback>(job, begin, end, scratch);
#include "gradgate/codec_list.def"
#undef GRADGATE_CODEC
  }
  return 0;
}

template <class O, bool kAdd>
void decode_into(const DecodeJob& job, size_t begin, size_t end) {
  switch (job.spec.id) {
#define GRADGATE_CODEC(identifier, value, name) \
  case CodecId::identifier:                     \
    return decode_as<CodecId::identifier, O, kAdd>(job, begin, end);
#include "gradgate/codec_list.def"
#undef GRADGATE_CODEC
  }
}

uint64_t encode_any(const EncodeJob& job, size_t begin, size_t end, std::byte* scratch) noexcept {
  const bool feedback = job.residual != nullptr;
  if (job.dtype == DType::f32) {
    return feedback ? encode_from<float, true>(job, begin, end, scratch)
                    : encode_from<float, false>(job, begin, end, scratch);
  }
  return feedback ? encode_from<uint16_t, true>(job, begin, end, scratch)
                  : encode_from<uint16_t, false>(job, begin, end, scratch);
}

void decode_any(const DecodeJob& job, size_t begin, size_t end) noexcept {
  if (job.spec.id == CodecId::none && job.scale == 1.0f && !job.add && job.dtype == job.gradient)
    return copy_none(job, begin, end);
  if (job.dtype == DType::f32)
    return job.add ? decode_into<float, true>(job, begin, end) : decode_into<float, false>(job, begin, end);
  return job.add ? decode_into<uint16_t, true>(job, begin, end) : decode_into<uint16_t, false>(job, begin, end);
}

void fold_any(const FoldJob& job, size_t begin, size_t end) noexcept {
  if (job.dtype == DType::f32) return fold_groups<float>(job, begin, end);
  return fold_groups<uint16_t>(job, begin, end);
}

}  // namespace

const Loops GRADGATE_LOOPS_TABLE = {GRADGATE_LOOPS_NAME, encode_any, decode_any, fold_any,
                                    read_sum_bytes,      copy_bytes, axpy_floats};

}  // namespace gradgate::kernels::cpu
