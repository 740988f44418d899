// chunk-topk: forming x of a unit, choosing (select.h), writing entries and the residual; decoding by scatter.
#pragma once

#include "kernels/cpu/loops.h"
#include "kernels/cpu/loops/entries.h"
#include "kernels/cpu/loops/select.h"

namespace gradgate::kernels::cpu {
namespace {

inline constexpr size_t kMaxGroups = 32768 / kGroupElements;

// e = x where x is finite: what a chunk's residual is before its entries are taken out.
GRADGATE_INLINE void carry_group(const Group& group, float* e, size_t n) {
  if (group.kept) return;
  if (group.max < kInf) {
    __builtin_memcpy(e, group.x, n * sizeof(float));
  } else {
    for (size_t i = 0; i < n; ++i) e[i] = exact::is_finite(group.x[i]) ? group.x[i] : e[i];
  }
}

// x of a unit of n elements into `x`, the residual carried; kept[] tells its zero groups.
template <class G, bool kFeedback>
GRADGATE_INLINE void form_unit(const G* g, float* e, size_t n, bool flush, float* x, bool* kept) {
  size_t i = 0;
  for (; n - i >= kGroupElements; i += kGroupElements) {
    prefetch_first_lot<kFeedback>(g + i);
    const Group group = form_group<G, kFeedback>(g + i, kFeedback ? e + i : nullptr, flush, x + i);
    prefetch_second_lot<kFeedback>(g + i, e + (kFeedback ? i : 0));
    if constexpr (kFeedback) {
      carry_group(group, e + i, kGroupElements);
      kept[i / kGroupElements] = group.kept;
    }
  }
  if (i < n) {
    PaddedGroup<G> pad(g + i, kFeedback ? e + i : nullptr, n - i);
    alignas(64) float room[kGroupElements];
    const Group group = form_group<G, kFeedback>(pad.g, pad.e, flush, room);
    __builtin_memcpy(x + i, group.x, (n - i) * sizeof(float));
    if constexpr (kFeedback) {
      carry_group(group, e + i, n - i);
      kept[i / kGroupElements] = group.kept;
    }
  }
}

template <class G, class V, bool kFeedback>
uint64_t encode_chunks(const EncodeJob& job, size_t begin, size_t end, std::byte* scratch) {
  const size_t c = job.spec.param0, chunk = job.spec.param1;
  const size_t unit = chunk > kGroupElements ? chunk : kGroupElements;
  const SelectScratch s = SelectScratch::carve(scratch, unit);
  // All chunks in front of `begin` are whole.
  V* value = values_of<V>(job, job.first) + begin / chunk * c;
  uint16_t* index = reinterpret_cast<uint16_t*>(job.second) + begin / chunk * c;
  uint64_t non_finite = 0;
  bool kept[kMaxGroups];
  for (; begin < end; begin += unit) {
    const size_t n = least(end - begin, unit);
    const G* g = static_cast<const G*>(job.source) + (begin - job.origin);
    float* e = kFeedback ? job.residual + (begin - job.origin) : nullptr;
    const float* x = s.x;
    if constexpr (!kFeedback && sizeof(G) == sizeof(float)) {
      x = g;
    } else {
      form_unit<G, kFeedback>(g, e, n, job.flush, s.x, kept);
    }
    for (size_t at = 0; at < n; at += chunk) {
      const size_t length = least(n - at, chunk), k = least(c, length);
      const bool finite = select(x + at, length, k, length == chunk, s);
      if (!finite) {
        for (size_t i = 0; i < length; ++i) non_finite += static_cast<uint64_t>(!exact::is_finite(x[at + i]));
      }
      for (size_t j = 0; j < k; ++j) {
        const size_t i = s.index[j];
        const float v = x[at + i];
        index[j] = s.index[j];
        narrow(v, value + j);
        if constexpr (kFeedback) {
          if (exact::is_finite(v) && !kept[(at + i) / kGroupElements]) e[at + i] = left_when_sent(v, value[j]);
        }
      }
      value += k;
      index += k;
    }
  }
  return non_finite;
}

template <class V, class O, bool kAdd>
void decode_chunks(const DecodeJob& job, size_t begin, size_t end) {
  const size_t c = job.spec.param0, chunk = job.spec.param1;
  const EntryValues<V> value(job.first, job.entries);
  size_t entry = begin / chunk * c;  // the first of the chunk
  const uint16_t* index = reinterpret_cast<const uint16_t*>(job.second) + entry;
  O* out = static_cast<O*>(job.out) + (begin - job.origin);
  if constexpr (kAdd) {
    for (; begin < end; begin += chunk) {
      const size_t k = least(c, end - begin);
      value.prefetch(entry);
      for (size_t j = 0; j < k; ++j) {
        narrow(exact::add(widen(out[index[j]]), exact::mul(value[entry + j], job.scale)), out + index[j]);
      }
      entry += k;
      index += k;
      out += chunk;
    }
    return;
  }
  constexpr size_t kPart = 1024;
  Sink<O, kPart> sink(out, job.stream);
  while (begin < end) {
    const size_t length = least(chunk, end - begin), k = least(c, length);
    size_t j = 0;
    for (size_t at = 0; at < length; at += kPart) {
      const size_t n = least(length - at, kPart);
      O* part = sink.place();
      clear(part, n * sizeof(O));
      for (; j < k && index[j] < at + n; ++j) narrow(exact::mul(value[entry + j], job.scale), part + (index[j] - at));
      sink.advance(n);
    }
    entry += k;
    index += k;
    begin += length;
  }
  sink.finish();
}

}  // namespace
}  // namespace gradgate::kernels::cpu
