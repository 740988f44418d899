// Joins the loops of this folder into one table: GRADGATE_LOOPS_TABLE names it, the including file's compile options decide what it runs on.
#pragma once

#include "kernels/cpu/loops/blocks.h"
#include "kernels/cpu/loops/topk.h"

namespace gradgate::kernels::cpu {
namespace {

template <class G, bool kFeedback>
uint64_t encode_from(const EncodeJob& job, size_t begin, size_t end, std::byte* scratch) {
  switch (job.spec.id) {
    case CodecId::none: return 0;
    case CodecId::bf16: return encode_blocks<CastBlock, G, kFeedback>(job, begin, end);
    case CodecId::int8: return encode_blocks<Int8Block, G, kFeedback>(job, begin, end);
    case CodecId::chunk_topk:
      return job.spec.value == DType::f32 ? encode_chunks<G, float, kFeedback>(job, begin, end, scratch)
                                          : encode_chunks<G, uint16_t, kFeedback>(job, begin, end, scratch);
  }
  return 0;
}

uint64_t encode_any(const EncodeJob& job, size_t begin, size_t end, std::byte* scratch) noexcept {
  if (job.spec.id == CodecId::none) return encode_none(job, begin, end);
  const bool feedback = job.residual != nullptr;
  if (job.dtype == DType::f32) {
    return feedback ? encode_from<float, true>(job, begin, end, scratch) : encode_from<float, false>(job, begin, end, scratch);
  }
  return feedback ? encode_from<uint16_t, true>(job, begin, end, scratch) : encode_from<uint16_t, false>(job, begin, end, scratch);
}

template <class O, bool kAdd>
void decode_into(const DecodeJob& job, size_t begin, size_t end) {
  switch (job.spec.id) {
    case CodecId::none:
      return job.gradient == DType::f32 ? decode_blocks<NoneBlock<float>, O, kAdd>(job, begin, end)
                                        : decode_blocks<NoneBlock<uint16_t>, O, kAdd>(job, begin, end);
    case CodecId::bf16: return decode_blocks<CastBlock, O, kAdd>(job, begin, end);
    case CodecId::int8: return decode_blocks<Int8Block, O, kAdd>(job, begin, end);
    case CodecId::chunk_topk:
      return job.spec.value == DType::f32 ? decode_chunks<float, O, kAdd>(job, begin, end) : decode_chunks<uint16_t, O, kAdd>(job, begin, end);
  }
}

void decode_any(const DecodeJob& job, size_t begin, size_t end) noexcept {
  if (job.spec.id == CodecId::none && job.scale == 1.0f && !job.add && job.dtype == job.gradient) return copy_none(job, begin, end);
  if (job.dtype == DType::f32) return job.add ? decode_into<float, true>(job, begin, end) : decode_into<float, false>(job, begin, end);
  return job.add ? decode_into<uint16_t, true>(job, begin, end) : decode_into<uint16_t, false>(job, begin, end);
}

void fold_any(const FoldJob& job, size_t begin, size_t end) noexcept {
  if (job.dtype == DType::f32) return fold_groups<float>(job, begin, end);
  return fold_groups<uint16_t>(job, begin, end);
}

}  // namespace

const Loops GRADGATE_LOOPS_TABLE = {GRADGATE_LOOPS_NAME, encode_any, decode_any, fold_any, read_sum_bytes, copy_bytes, axpy_floats};

}  // namespace gradgate::kernels::cpu
