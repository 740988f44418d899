// Joins the loops of this folder into one table: GRADGATE_LOOPS_TABLE names it, the including file's compile options
// decide what it runs on.
#pragma once

#include "kernels/cpu/loops/blocks.h"
#include "kernels/cpu/loops/mean.h"
#include "kernels/cpu/loops/randk.h"
#include "kernels/cpu/loops/scaled.h"
#include "kernels/cpu/loops/topk.h"
#include "kernels/cpu/loops/vector_topk.h"
#include "kernels/cpu/loops/vector_topk_decode.h"

namespace gradgate::kernels::cpu {
namespace {

// Whether a codec has nothing but BlockFormats.
template <CodecId id>
inline constexpr bool kScaled = requires(const CodecSpec& spec, size_t (*f)(codecs::BlockFormat)) {
  codecs::Codec<id>::with_format(spec, f);
};

template <CodecId id, class G, bool kFeedback>
uint64_t encode_as(const EncodeJob& job, size_t begin, size_t end, std::byte* scratch) {
  if constexpr (kScaled<id>) {
    return codecs::Codec<id>::with_format(job.spec, [&](auto format) {
      using Format = decltype(format);
      if constexpr (Format::kMean) {
        return encode_means<Format, G, kFeedback>(job, begin, end);
      } else {
        return encode_blocks<ScaledEncoder<Format>, G, kFeedback>(job, begin, end);
      }
    });
  } else if constexpr (id == CodecId::bf16) {
    return encode_blocks<CastEncoder, G, kFeedback>(job, begin, end);
  } else if constexpr (id == CodecId::fp16) {
    return encode_blocks<Fp16Encoder, G, kFeedback>(job, begin, end);
  } else if constexpr (id == CodecId::chunk_topk) {
    switch (job.spec.value) {
      case DType::f32:
        return encode_chunks<G, float, kFeedback>(job, begin, end, scratch);
      case DType::bf16:
        return encode_chunks<G, uint16_t, kFeedback>(job, begin, end, scratch);
      default:
        return encode_chunks<G, Deferred, kFeedback>(job, begin, end, scratch);
    }
  } else if constexpr (id == CodecId::topk) {
    return 0;  // chooses over the whole vector: kernels/cpu/topk.cc
  } else if constexpr (id == CodecId::randk) {
    return job.spec.value == DType::f32 ? encode_sample<G, float, kFeedback>(job, begin, end)
                                        : encode_sample<G, uint16_t, kFeedback>(job, begin, end);
  } else {
    static_assert(id == CodecId::none, "a codec without loops");
    return encode_none(job, begin, end);
  }
}

template <CodecId id, class O, bool kAdd>
void decode_as(const DecodeJob& job, size_t begin, size_t end) {
  if constexpr (kScaled<id>) {
    codecs::Codec<id>::with_format(
        job.spec, [&](auto format) { decode_blocks<ScaledDecoder<decltype(format)>, O, kAdd>(job, begin, end); });
  } else if constexpr (id == CodecId::bf16) {
    decode_blocks<CastDecoder, O, kAdd>(job, begin, end);
  } else if constexpr (id == CodecId::fp16) {
    decode_blocks<Fp16Decoder, O, kAdd>(job, begin, end);
  } else if constexpr (id == CodecId::chunk_topk) {
    switch (job.spec.value) {
      case DType::f32:
        return decode_chunks<float, O, kAdd>(job, begin, end);
      case DType::bf16:
        return decode_chunks<uint16_t, O, kAdd>(job, begin, end);
      default:
        return decode_chunks<int8_t, O, kAdd>(job, begin, end);
    }
  } else if constexpr (id == CodecId::topk) {
    switch (job.spec.value) {
      case DType::f32:
        return decode_vector_topk<float, O, kAdd>(job, begin, end);
      case DType::bf16:
        return decode_vector_topk<uint16_t, O, kAdd>(job, begin, end);
      default:
        return decode_vector_topk<int8_t, O, kAdd>(job, begin, end);
    }
  } else if constexpr (id == CodecId::randk) {
    job.spec.value == DType::f32 ? decode_sample<float, O, kAdd>(job, begin, end)
                                 : decode_sample<uint16_t, O, kAdd>(job, begin, end);
  } else {
    static_assert(id == CodecId::none, "a codec without loops");
    switch (job.gradient) {
      case DType::f32:
        return decode_blocks<NoneDecoder<float>, O, kAdd>(job, begin, end);
      case DType::bf16:
        return decode_blocks<NoneDecoder<uint16_t>, O, kAdd>(job, begin, end);
      default:
        return decode_blocks<NoneDecoder<F16>, O, kAdd>(job, begin, end);
    }
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

template <class G>
uint64_t encode_gradient(const EncodeJob& job, size_t begin, size_t end, std::byte* scratch) {
  return job.residual != nullptr ? encode_from<G, true>(job, begin, end, scratch)
                                 : encode_from<G, false>(job, begin, end, scratch);
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
  switch (job.dtype) {
    case DType::f32:
      return encode_gradient<float>(job, begin, end, scratch);
    case DType::bf16:
      return encode_gradient<uint16_t>(job, begin, end, scratch);
    default:  // f16; anything else only `none` takes, which looks for itself
      return encode_gradient<F16>(job, begin, end, scratch);
  }
}

template <class O>
void decode_output(const DecodeJob& job, size_t begin, size_t end) {
  job.add ? decode_into<O, true>(job, begin, end) : decode_into<O, false>(job, begin, end);
}

void decode_any(const DecodeJob& job, size_t begin, size_t end) noexcept {
  if (job.spec.id == CodecId::none && job.scale == 1.0f && !job.add && job.dtype == job.gradient)
    return copy_none(job, begin, end);
  switch (job.dtype) {
    case DType::f32:
      return decode_output<float>(job, begin, end);
    case DType::bf16:
      return decode_output<uint16_t>(job, begin, end);
    default:
      return decode_output<F16>(job, begin, end);
  }
}

template <class G>
uint32_t greatest_of(const EncodeJob& job, size_t begin, size_t end) {
  return job.residual != nullptr ? greatest_finite<G, true>(job, begin, end)
                                 : greatest_finite<G, false>(job, begin, end);
}

uint32_t greatest_any(const EncodeJob& job, size_t begin, size_t end) noexcept {
  switch (job.dtype) {
    case DType::f32:
      return greatest_of<float>(job, begin, end);
    case DType::bf16:
      return greatest_of<uint16_t>(job, begin, end);
    default:
      return greatest_of<F16>(job, begin, end);
  }
}

void fold_any(const FoldJob& job, size_t begin, size_t end) noexcept {
  switch (job.dtype) {
    case DType::f32:
      return fold_groups<float>(job, begin, end);
    case DType::bf16:
      return fold_groups<uint16_t>(job, begin, end);
    default:
      return fold_groups<F16>(job, begin, end);
  }
}

void store_sum_any(const float* sum, const SumJob& job, void* out, size_t count) noexcept {
  switch (job.dtype) {
    case DType::f32:
      return scale_sum(sum, job, static_cast<float*>(out), count);
    case DType::bf16:
      return scale_sum(sum, job, static_cast<uint16_t*>(out), count);
    default:
      return scale_sum(sum, job, static_cast<F16*>(out), count);
  }
}

}  // namespace

const Loops GRADGATE_LOOPS_TABLE = {GRADGATE_LOOPS_NAME, &kTopkLoops, encode_any, quantize_any,
                                    greatest_any,        decode_any,  fold_any,   store_sum_any,
                                    read_sum_bytes,      copy_bytes,  axpy_floats};

}  // namespace gradgate::kernels::cpu
