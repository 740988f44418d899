// Values of the codecs that send some elements, in each of their types.
#pragma once

#include "codecs/codecs.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/loops/group.h"
#include "kernels/cpu/topk.h"

namespace gradgate::kernels::cpu {
namespace {

// Stands for an int8 value until the scale of its run is known: x itself.
struct Deferred {
  float x;
};
GRADGATE_INLINE void narrow(float v, Deferred* out) { out->x = v; }

// What is left of x once `sent` is. Nothing is sent yet of a deferred value.
template <class V>
GRADGATE_INLINE float left_when_sent(float x, V sent) {
  return exact::sub(x, widen(sent));
}
GRADGATE_INLINE float left_when_sent(float x, Deferred) { return x; }

// Where the values of a payload go; `section` is the one of values.
template <class V>
GRADGATE_INLINE V* values_of(const EncodeJob& job, std::byte* section) {
  if constexpr (sizeof(V) == sizeof(Deferred) && !__is_same(V, float)) {
    return reinterpret_cast<V*>(job.deferred);
  } else {
    return reinterpret_cast<V*>(section);
  }
}

// Reads the values of a payload by entry.
template <class V>
struct EntryValues {
  const V* value;
  EntryValues(const std::byte* section, size_t) : value(reinterpret_cast<const V*>(section)) {}
  GRADGATE_INLINE float operator[](size_t j) const { return widen(value[j]); }
  GRADGATE_INLINE void prefetch(size_t j) const { prefetch_ahead_second(value + j, 64); }
};
template <>
struct EntryValues<int8_t> {
  const uint32_t* scale;
  const int8_t* code;
  EntryValues(const std::byte* section, size_t entries)
      : scale(reinterpret_cast<const uint32_t*>(section)),
        code(reinterpret_cast<const int8_t*>(section + codecs::codes_offset(entries))) {}
  GRADGATE_INLINE float operator[](size_t j) const {
    return codecs::entry_value(scale[j / codecs::kScaleRun], code[j]);
  }
  GRADGATE_INLINE void prefetch(size_t j) const { prefetch_ahead_second(code + j, 64); }
};

// The elements of consecutive entries.
class EntryPlaces {
 public:
  EntryPlaces(const EncodeJob& job, size_t entry) {
    if (job.spec.id == CodecId::chunk_topk) {
      index_ = reinterpret_cast<const uint16_t*>(job.second) + entry;
      chunk_ = job.spec.param1, left_ = every_ = job.spec.param0;
      begin_ = entry / every_ * chunk_;
      left_ -= entry % every_;
    } else {
      index_ = reinterpret_cast<const uint16_t*>(job.third) + entry;
      counts_ = reinterpret_cast<const uint32_t*>(job.first);
      chunk_ = kTopkChunk;
      left_ = *counts_;
      while (left_ <= entry) {
        entry -= left_;
        begin_ += chunk_;
        left_ = *++counts_;
      }
      left_ -= entry;
    }
  }
  // The element of the next entry; one must be left.
  GRADGATE_INLINE size_t next() {
    while (left_ == 0) {
      begin_ += chunk_;
      left_ = counts_ != nullptr ? *++counts_ : every_;
    }
    --left_;
    return begin_ + *index_++;
  }

 private:
  const uint16_t* index_;
  const uint32_t* counts_ = nullptr;
  size_t chunk_, every_ = 0, begin_ = 0, left_ = 0;
};

template <bool kFeedback>
void quantize_as(const EncodeJob& job, size_t entries, size_t begin, size_t end) {
  std::byte* section = job.spec.id == CodecId::chunk_topk ? job.first : job.second;
  uint32_t* scale = reinterpret_cast<uint32_t*>(section);
  int8_t* code = reinterpret_cast<int8_t*>(section + codecs::codes_offset(entries));
  const float* x = job.deferred;
  if (begin == 0) {
    const size_t used = (entries + codecs::kScaleRun - 1) / codecs::kScaleRun * sizeof(float);
    __builtin_memset(section + used, 0, codecs::codes_offset(entries) - used);
  }
  [[maybe_unused]] EntryPlaces places(job, begin);
  for (; begin < end; begin += codecs::kScaleRun) {
    const size_t n = least(end - begin, codecs::kScaleRun);
    int32_t max = 0;
    for (size_t i = begin; i < begin + n; ++i) {
      const int32_t m = magnitude(x[i]);
      max = greater(max, m < kInf ? m : 0);
    }
    const auto encoder = codecs::EntryEncoder::of(static_cast<uint32_t>(max));
    scale[begin / codecs::kScaleRun] = encoder.stored;
    for (size_t i = begin; i < begin + n; ++i) code[i] = static_cast<int8_t>(encoder.entry(x[i]));
    if constexpr (kFeedback) {
      for (size_t i = begin; i < begin + n; ++i) {
        const size_t at = places.next();
        // A zero leaves a zero, or (in a zero group) the residual of before.
        if (magnitude(x[i]) != 0 && exact::is_finite(x[i]))
          job.residual[at] = exact::sub(x[i], codecs::entry_value(encoder.stored, code[i]));
      }
    }
  }
}

void quantize_any(const EncodeJob& job, size_t count, size_t begin, size_t end) noexcept {
  const size_t entries = job.spec.id == CodecId::chunk_topk
                             ? codecs::Codec<CodecId::chunk_topk>::entries(job.spec, count)
                             : codecs::Codec<CodecId::topk>::entries(job.spec, count);
  job.residual != nullptr ? quantize_as<true>(job, entries, begin, end) : quantize_as<false>(job, entries, begin, end);
}

}  // namespace
}  // namespace gradgate::kernels::cpu
