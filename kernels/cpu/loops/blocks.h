// Codecs that treat each group of 256 on its own: none, bf16, int8.
#pragma once

#include "codecs/codecs.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/loops/floors.h"
#include "kernels/cpu/loops/group.h"

namespace gradgate::kernels::cpu {
namespace {

// A codec with a scale per block of 256 and a code per element: C is its Codec, which brings Encoder, Decoder and Code.
template <class C>
struct ScaledBlock {
  using Unit = typename C::Code;
  static_assert(C::kBlock == kGroupElements);
  static GRADGATE_INLINE Unit* start(const EncodeJob& job, size_t begin) {
    return reinterpret_cast<Unit*>(job.second) + begin;
  }

  // Codes of a group, and with feedback its residual. e may be null without.
  template <bool kFeedback>
  static GRADGATE_INLINE void encode(const EncodeJob& job, size_t begin, const Group& group, Unit* code, float* e) {
    const typename C::Encoder block = C::Encoder::of(static_cast<uint32_t>(group.max));
    __builtin_memcpy(job.first + begin / kGroupElements * 4, &block.stored, 4);
    if (!block.finite) {
      for (size_t i = 0; i < kGroupElements; ++i) code[i] = 0;
      return;  // every d is NaN: the residual stays
    }
    const float* x = group.x;
    if constexpr (!kFeedback) {
      for (size_t i = 0; i < kGroupElements; ++i) code[i] = static_cast<Unit>(block.code(x[i]));
    } else {
      const typename C::Decoder decoder = C::Decoder::of(block.stored);
      for (size_t i = 0; i < kGroupElements; ++i) {
        const int32_t q = block.code(x[i]);
        code[i] = static_cast<Unit>(q);
        e[i] = exact::sub(x[i], decoder.value(q));
      }
    }
  }

  template <bool kAdd, class O>
  static GRADGATE_INLINE void decode(const DecodeJob& job, size_t begin, size_t n, O* out) {
    uint32_t stored;
    __builtin_memcpy(&stored, job.first + begin / kGroupElements * 4, 4);
    const typename C::Decoder decoder = C::Decoder::of(stored);
    const Unit* code = reinterpret_cast<const Unit*>(job.second) + begin;
    prefetch_ahead(code, kGroupElements * sizeof(Unit));
    const float scale = job.scale;
    emit<kAdd>(out, n, [=](size_t i) { return exact::mul(decoder.value(code[i]), scale); });
  }
};

struct CastBlock {
  using Unit = uint16_t;
  static GRADGATE_INLINE Unit* start(const EncodeJob& job, size_t begin) {
    return reinterpret_cast<uint16_t*>(job.first) + begin;
  }

  template <bool kFeedback>
  static GRADGATE_INLINE void encode(const EncodeJob&, size_t, const Group& group, uint16_t* code, float* e) {
    const float* x = group.x;
    if constexpr (!kFeedback) {
      for (size_t i = 0; i < kGroupElements; ++i) code[i] = codecs::round_bf16(x[i]);
    } else if (group.max < kInf) {
      for (size_t i = 0; i < kGroupElements; ++i) {
        const uint32_t rounded = codecs::rounded_bf16_bits(x[i]);
        code[i] = static_cast<uint16_t>(rounded >> 16);
        e[i] = exact::sub(x[i], exact::from_bits(rounded));
      }
    } else {
      for (size_t i = 0; i < kGroupElements; ++i) {
        code[i] = codecs::round_bf16(x[i]);
        if (exact::is_finite(x[i])) e[i] = exact::sub(x[i], codecs::widen_bf16(code[i]));
      }
    }
  }

  template <bool kAdd, class O>
  static GRADGATE_INLINE void decode(const DecodeJob& job, size_t begin, size_t n, O* out) {
    const uint16_t* code = reinterpret_cast<const uint16_t*>(job.first) + begin;
    prefetch_ahead(code, kGroupElements * 2);
    const float scale = job.scale;
    emit<kAdd>(out, n, [=](size_t i) { return exact::mul(codecs::widen_bf16(code[i]), scale); });
  }
};

template <class Block, class G, bool kFeedback>
uint64_t encode_blocks(const EncodeJob& job, size_t begin, size_t end) {
  const G* g = static_cast<const G*>(job.source) + (begin - job.origin);
  float* e = kFeedback ? job.residual + (begin - job.origin) : nullptr;
  Sink<typename Block::Unit> sink(Block::start(job, begin), job.stream);
  alignas(64) float room[kGroupElements];
  uint64_t non_finite = 0;
  for (; end - begin >= kGroupElements; begin += kGroupElements) {
    prefetch_ahead(g, kGroupElements * sizeof(G));
    if constexpr (kFeedback) prefetch_ahead(e, kGroupElements * sizeof(float));
    const Group group = form_group<G, kFeedback>(g, e, job.flush, room);
    if (group.max >= kInf) non_finite += count_non_finite(group.x);
    if (kFeedback && group.kept) {
      Block::template encode<false>(job, begin, group, sink.place(), nullptr);
    } else {
      Block::template encode<kFeedback>(job, begin, group, sink.place(), e);
    }
    sink.advance(kGroupElements);
    g += kGroupElements;
    if constexpr (kFeedback) e += kGroupElements;
  }
  if (begin < end) {
    const size_t n = end - begin;
    PaddedGroup<G> pad(g, e, n);
    typename Block::Unit code[kGroupElements];
    const Group group = form_group<G, kFeedback>(pad.g, pad.e, job.flush, room);
    if (group.max >= kInf) non_finite += count_non_finite(group.x);
    if (kFeedback && group.kept) {
      Block::template encode<false>(job, begin, group, code, nullptr);
    } else {
      Block::template encode<kFeedback>(job, begin, group, code, pad.e);
      if constexpr (kFeedback) __builtin_memcpy(e, pad.e, n * sizeof(float));
    }
    __builtin_memcpy(sink.place(), code, n * sizeof(typename Block::Unit));
    sink.advance(n);
  }
  sink.finish();
  return non_finite;
}

template <class Block, class O, bool kAdd>
void decode_blocks(const DecodeJob& job, size_t begin, size_t end) {
  Sink<O> sink(static_cast<O*>(job.out) + (begin - job.origin), !kAdd && job.stream);
  while (begin < end) {
    const size_t n = least(end - begin, kGroupElements);
    Block::template decode<kAdd>(job, begin, n, sink.place());
    sink.advance(n);
    begin += n;
  }
  sink.finish();
}

// none: bytes copied, Inf and NaN counted by their exponents.
template <class T, T kExponent>
uint64_t copy_counting(const EncodeJob& job, size_t begin, size_t end) {
  constexpr size_t kStep = 1024 / sizeof(T);
  const T* from = static_cast<const T*>(job.source) + (begin - job.origin);
  T* to = reinterpret_cast<T*>(job.first) + begin;
  size_t n = end - begin;
  uint64_t non_finite = 0;
  const auto copy_few = [&](size_t count) {
    for (size_t i = 0; i < count; ++i) {
      non_finite += static_cast<uint64_t>((from[i] & kExponent) == kExponent);
      to[i] = from[i];
    }
    from += count, to += count, n -= count;
  };
  copy_few(least(to_line(to) / sizeof(T), n));
  while (n >= kStep) {
    prefetch_ahead(from, 1024);
    T count = 0;  // at most 512: fits
    for (size_t i = 0; i < kStep; ++i)
      count = static_cast<T>(count + static_cast<T>((from[i] & kExponent) == kExponent));
    non_finite += count;
    if (job.stream) {
      stream_copy(to, from, 1024);
    } else {
      __builtin_memcpy(to, from, 1024);
    }
    from += kStep, to += kStep, n -= kStep;
  }
  copy_few(n);
  if (job.stream) stream_end();
  return non_finite;
}

// none over a sum: NaN made canonical, the sum rounded to the gradient's dtype.
template <class O>
uint64_t store_sum(const EncodeJob& job, size_t begin, size_t end) {
  const float* from = static_cast<const float*>(job.source) + (begin - job.origin);
  O* to = reinterpret_cast<O*>(job.first) + begin;
  uint64_t non_finite = 0;
  for (size_t i = 0; i < end - begin; ++i) {
    non_finite += static_cast<uint64_t>(!exact::is_finite(from[i]));
    narrow(from[i], to + i);
  }
  return non_finite;
}

uint64_t encode_none(const EncodeJob& job, size_t begin, size_t end) {
  if (job.sum) {
    return job.stored == DType::f32    ? store_sum<float>(job, begin, end)
           : job.stored == DType::bf16 ? store_sum<uint16_t>(job, begin, end)
                                       : store_sum<F16>(job, begin, end);
  }
  switch (job.dtype) {
    case DType::f32:
      return copy_counting<uint32_t, 0x7f800000u>(job, begin, end);
    case DType::bf16:
      return copy_counting<uint16_t, 0x7f80u>(job, begin, end);
    case DType::f16:
      return copy_counting<uint16_t, 0x7c00u>(job, begin, end);
    default:
      return copy_counting<uint64_t, 0x7ff0000000000000u>(job, begin, end);
  }
}

template <class G>
struct NoneBlock {
  template <bool kAdd, class O>
  static GRADGATE_INLINE void decode(const DecodeJob& job, size_t begin, size_t n, O* out) {
    const G* value = reinterpret_cast<const G*>(job.first) + begin;
    prefetch_ahead(value, kGroupElements * sizeof(G));
    const float scale = job.scale;
    emit<kAdd>(out, n, [=](size_t i) { return exact::mul(widen(value[i]), scale); });
  }
};

void copy_none(const DecodeJob& job, size_t begin, size_t end) {
  const size_t width = job.gradient == DType::f64 ? 8 : job.gradient == DType::f32 ? 4 : 2;
  const std::byte* from = job.first + begin * width;
  std::byte* to = static_cast<std::byte*>(job.out) + (begin - job.origin) * width;
  copy_bytes(to, from, (end - begin) * width, job.stream);
}

// A sum over ranks on its way out: scaled, rounded, around the caches where it is long.
template <class O>
void scale_sum(const float* sum, const SumJob& job, O* out, size_t count) {
  constexpr size_t kStep = 1024 / sizeof(O);
  const float scale = job.scale;
  const auto few = [&](size_t n) {
    for (size_t i = 0; i < n; ++i) narrow(exact::mul(sum[i], scale), out + i);
    sum += n, out += n, count -= n;
  };
  if (job.stream) {
    few(least(to_line(out) / sizeof(O), count));
    while (count >= kStep) {
      alignas(64) O line[kStep];
      for (size_t i = 0; i < kStep; ++i) narrow(exact::mul(sum[i], scale), line + i);
      stream_copy(out, line, 1024);
      sum += kStep, out += kStep, count -= kStep;
    }
  }
  few(count);
  if (job.stream) stream_end();
}

// fold_residual: a dense cast that sends everything.
template <class G>
void fold_groups(const FoldJob& job, size_t begin, size_t end) {
  G* g = static_cast<G*>(job.gradient);
  float* e = job.residual;
  for (; begin < end; begin += kGroupElements) {
    const size_t n = least(end - begin, kGroupElements);
    prefetch_ahead(g + begin, kGroupElements * sizeof(G));
    prefetch_ahead(e + begin, kGroupElements * sizeof(float));
    for (size_t i = begin; i < begin + n; ++i) {
      const float v = widen(g[i]);
      const float x = exact::is_finite(v) ? exact::add(v, e[i]) : v;
      G sent;
      narrow(x, &sent);
      g[i] = sent;
      e[i] = exact::is_finite(x) ? exact::sub(x, widen(sent)) : e[i];
    }
  }
}

}  // namespace
}  // namespace gradgate::kernels::cpu
