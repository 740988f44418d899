// Codecs that treat each group of 256 on its own: the loop over groups, and none, bf16 and fp16. (Scaled blocks:
// scaled.h.)
#pragma once

#include "codecs/codecs.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/loops/floors.h"
#include "kernels/cpu/loops/group.h"

namespace gradgate::kernels::cpu {
namespace {

struct CastEncoder {
  using Unit = uint16_t;
  const EncodeJob& job;

  explicit CastEncoder(const EncodeJob& j) : job(j) {}
  Unit* start(size_t begin) const { return reinterpret_cast<uint16_t*>(job.first) + begin; }
  static constexpr size_t units(size_t n) { return n; }

  template <bool kFeedback>
  GRADGATE_INLINE void encode(size_t, const Group& group, uint16_t* code, float* e) const {
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
};

struct CastDecoder {
  const DecodeJob& job;
  explicit CastDecoder(const DecodeJob& j) : job(j) {}

  template <bool kAdd, class O>
  GRADGATE_INLINE void decode(size_t begin, size_t n, O* out) const {
    const uint16_t* code = reinterpret_cast<const uint16_t*>(job.first) + begin;
    prefetch_ahead(code, kGroupElements * 2);
    const float scale = job.scale;
    emit<kAdd>(out, n, [=](size_t i) { return exact::mul(codecs::widen_bf16(code[i]), scale); });
  }
};

// fp16: the scale is that of the whole vector, found by a pass before.
struct Fp16Encoder {
  using Unit = uint16_t;
  const EncodeJob& job;
  codecs::Fp16Scale scale;

  explicit Fp16Encoder(const EncodeJob& j) : job(j), scale(codecs::Fp16Scale::of(j.greatest)) {}
  Unit* start(size_t begin) const { return reinterpret_cast<uint16_t*>(job.second) + begin; }
  static constexpr size_t units(size_t n) { return n; }

  template <bool kFeedback>
  GRADGATE_INLINE void encode(size_t, const Group& group, uint16_t* code, float* e) const {
    const codecs::Fp16Scale s = scale;
    const float* x = group.x;
    for (size_t i = 0; i < kGroupElements; ++i) code[i] = s.element(x[i]);
    if constexpr (kFeedback) {
      const float step = exact::from_bits(s.stored);
      if (group.max < kInf) {
        for (size_t i = 0; i < kGroupElements; ++i) e[i] = exact::sub(x[i], codecs::fp16_value(code[i], step));
      } else {
        for (size_t i = 0; i < kGroupElements; ++i) {
          if (exact::is_finite(x[i])) e[i] = exact::sub(x[i], codecs::fp16_value(code[i], step));
        }
      }
    }
  }
};

struct Fp16Decoder {
  const DecodeJob& job;
  float step;
  explicit Fp16Decoder(const DecodeJob& j) : job(j) { __builtin_memcpy(&step, j.first, sizeof step); }

  template <bool kAdd, class O>
  GRADGATE_INLINE void decode(size_t begin, size_t n, O* out) const {
    const uint16_t* code = reinterpret_cast<const uint16_t*>(job.second) + begin;
    prefetch_ahead(code, kGroupElements * 2);
    emit<kAdd>(out, n, [=, s = step, scale = job.scale](size_t i) {
      return exact::mul(codecs::fp16_value(code[i], s), scale);
    });
  }
};

template <class Encoder, class G, bool kFeedback>
uint64_t encode_blocks(const EncodeJob& job, size_t begin, size_t end) {
  using Unit = typename Encoder::Unit;
  const Encoder encoder(job);
  const G* g = static_cast<const G*>(job.source) + (begin - job.origin);
  float* e = kFeedback ? job.residual + (begin - job.origin) : nullptr;
  Sink<Unit> sink(encoder.start(begin), job.stream);
  alignas(64) float room[kGroupElements];
  uint64_t non_finite = 0;
  for (; end - begin >= kGroupElements; begin += kGroupElements) {
    prefetch_first_lot<kFeedback>(g);
    const Group group = form_group<G, kFeedback>(g, e, job.flush, room);
    prefetch_second_lot<kFeedback>(g, e);
    if (group.max >= kInf) non_finite += count_non_finite(group.x);
    if (kFeedback && group.kept) {
      encoder.template encode<false>(begin, group, sink.place(), nullptr);
    } else {
      encoder.template encode<kFeedback>(begin, group, sink.place(), e);
    }
    sink.advance(encoder.units(kGroupElements));
    g += kGroupElements;
    if constexpr (kFeedback) e += kGroupElements;
  }
  if (begin < end) {
    const size_t n = end - begin;
    PaddedGroup<G> pad(g, e, n);
    alignas(64) Unit code[kGroupElements];
    const Group group = form_group<G, kFeedback>(pad.g, pad.e, job.flush, room);
    if (group.max >= kInf) non_finite += count_non_finite(group.x);
    if (kFeedback && group.kept) {
      encoder.template encode<false>(begin, group, code, nullptr);
    } else {
      encoder.template encode<kFeedback>(begin, group, code, pad.e);
      if constexpr (kFeedback) __builtin_memcpy(e, pad.e, n * sizeof(float));
    }
    __builtin_memcpy(sink.place(), code, encoder.units(n) * sizeof(Unit));
    sink.advance(encoder.units(n));
  }
  sink.finish();
  return non_finite;
}

template <class Decoder, class O, bool kAdd>
void decode_blocks(const DecodeJob& job, size_t begin, size_t end) {
  const Decoder decoder(job);
  Sink<O> sink(static_cast<O*>(job.out) + (begin - job.origin), !kAdd && job.stream);
  while (begin < end) {
    const size_t n = least(end - begin, kGroupElements);
    decoder.template decode<kAdd>(begin, n, sink.place());
    sink.advance(n);
    begin += n;
  }
  sink.finish();
}

// The greatest magnitude of the finite x, for codecs whose elements depend on it.
template <class G, bool kFeedback>
uint32_t greatest_finite(const EncodeJob& job, size_t begin, size_t end) {
  const G* g = static_cast<const G*>(job.source) + (begin - job.origin);
  const float* e = kFeedback ? job.residual + (begin - job.origin) : nullptr;
  alignas(64) float room[kGroupElements];
  int32_t greatest = 0;
  for (; begin < end; begin += kGroupElements, g += kGroupElements) {
    const size_t n = least(end - begin, kGroupElements);
    const auto look = [&](const Group& group) {
      int32_t max = group.max;
      if (max >= kInf) {
        max = 0;
        for (size_t i = 0; i < kGroupElements; ++i) {
          const int32_t m = magnitude(group.x[i]);
          max = m < kInf ? greater(max, m) : max;
        }
      }
      greatest = greater(greatest, max);
    };
    if (n == kGroupElements) {
      prefetch_first_lot<kFeedback>(g);
      const Group group = form_group<G, kFeedback>(g, e, job.flush, room);
      prefetch_second_lot<kFeedback>(g, e);
      look(group);
    } else {
      const PaddedGroup<G> pad(g, e, n);
      look(form_group<G, kFeedback>(pad.g, pad.e, job.flush, room));
    }
    if constexpr (kFeedback) e += kGroupElements;
  }
  return static_cast<uint32_t>(greatest);
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
struct NoneDecoder {
  const DecodeJob& job;
  explicit NoneDecoder(const DecodeJob& j) : job(j) {}

  template <bool kAdd, class O>
  GRADGATE_INLINE void decode(size_t begin, size_t n, O* out) const {
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
  if (job.stream && job.last) stream_end();
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
