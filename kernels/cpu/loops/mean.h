// Codecs with a mean magnitude per block of several groups, and sign bits (codecs/onebit.h): the block is formed whole,
// then looked at again in L1.
#pragma once

#include "kernels/cpu/loops/scaled.h"

namespace gradgate::kernels::cpu {
namespace {

// The tree of docs/format.md §3, onebit: halves added to halves, which is what registers do anyway.
template <class Scale>
GRADGATE_INLINE float pairwise_sum_1024(const float* x, const Scale& scale) {
  alignas(64) float s[256];
  for (size_t j = 0; j < 256; ++j) {
    s[j] = exact::add(exact::add(scale.magnitude(x[j]), scale.magnitude(x[j + 512])),
                      exact::add(scale.magnitude(x[j + 256]), scale.magnitude(x[j + 768])));
  }
  for (size_t length = 128; length > 0; length /= 2) {
    for (size_t j = 0; j < length; ++j) s[j] = exact::add(s[j], s[j + length]);
  }
  return s[0];
}

// Codes of 64 elements as a word.
template <class Encoder>
GRADGATE_INLINE uint64_t code_bits_64(const Encoder& encoder, const float* x) {
  alignas(64) int32_t q[64];
  for (size_t i = 0; i < 64; ++i) q[i] = encoder.code(x[i]);
  return at_least_64(q, -1, 1);
}

// A block on its way into a payload.
template <size_t kBlock>
struct FormedBlock {
  static constexpr size_t kParts = kBlock / kGroupElements;
  const float* x;
  uint32_t max = 0, live = 0, elements = 0;  // greatest magnitude; parts that are not zero, and how many elements
  bool kept[kParts] = {};
  uint64_t non_finite = 0;
};

template <size_t kBlock, class G, bool kFeedback>
GRADGATE_INLINE FormedBlock<kBlock> form_block(const G* g, const float* e, size_t n, bool flush, float* room) {
  constexpr bool kInPlace = !kFeedback && sizeof(G) == sizeof(float);
  FormedBlock<kBlock> block;
  block.x = room;
  if constexpr (kInPlace) {
    if (n == kBlock) block.x = g;
  }
  size_t at = 0;
  for (size_t part = 0; at < n; ++part, at += kGroupElements) {
    const size_t length = least(n - at, kGroupElements);
    Group group;
    if (length == kGroupElements) {
      prefetch_first_lot<kFeedback>(g + at);
      group = form_group<G, kFeedback>(g + at, kFeedback ? e + at : nullptr, flush, room + at);
      prefetch_second_lot<kFeedback>(g + at, e + (kFeedback ? at : 0));
      if (kInPlace && n != kBlock) __builtin_memcpy(room + at, group.x, sizeof(float) * kGroupElements);
    } else {
      const PaddedGroup<G> pad(g + at, kFeedback ? e + at : nullptr, length);
      group = form_group<G, kFeedback>(pad.g, pad.e, flush, room + at);
      if constexpr (kInPlace) {
        __builtin_memcpy(room + at, group.x, sizeof(float) * kGroupElements);
        group.x = room + at;  // it was in the padding, which ends here
      }
    }
    const uint32_t max = static_cast<uint32_t>(group.max);
    if (group.max >= kInf) block.non_finite += count_non_finite(group.x);
    block.max = max > block.max ? max : block.max;
    block.live |= (max != 0 ? 1u : 0u) << part;
    block.elements += max != 0 ? static_cast<uint32_t>(length) : 0u;
    block.kept[part] = group.kept;
  }
  if (at < kBlock) __builtin_memset(room + at, 0, (kBlock - at) * sizeof(float));
  return block;
}

template <class F, class G, bool kFeedback>
uint64_t encode_means(const EncodeJob& job, size_t begin, size_t end) {
  static_assert(F::kMean && F::kBlock == 1024 && F::kBits == 1);
  const G* g = static_cast<const G*>(job.source) + (begin - job.origin);
  float* e = kFeedback ? job.residual + (begin - job.origin) : nullptr;
  Sink<uint8_t> sink(reinterpret_cast<uint8_t*>(job.second) + begin / 8, job.stream);
  alignas(64) float room[F::kBlock];
  alignas(64) uint64_t word[F::kBlock / 64];
  uint64_t non_finite = 0;
  for (; begin < end; begin += F::kBlock) {
    const size_t n = least(end - begin, F::kBlock);
    const auto block = form_block<F::kBlock, G, kFeedback>(g, e, n, job.flush, room);
    non_finite += block.non_finite;
    const bool finite = block.max < exact::kInfBits;
    const float sum = finite && block.max != 0 ? pairwise_sum_1024(block.x, codecs::MeanScale::of(block.max)) : 0.0f;
    const auto encoder = F::Encoder::of(sum, block.max, block.live, block.elements);
    __builtin_memcpy(job.first + begin / F::kBlock * 4, &encoder.stored, 4);
    for (size_t w = 0; w < F::kBlock / 64; ++w)
      word[w] = finite && block.max != 0 ? code_bits_64(encoder, block.x + w * 64) : 0;
    if constexpr (kFeedback) {
      for (size_t at = 0; finite && at < n; at += kGroupElements) {
        if (block.kept[at / kGroupElements]) continue;
        const auto decoder = F::Decoder::of(encoder.stored, static_cast<uint32_t>(at / kGroupElements));
        const size_t to = least(n, at + kGroupElements);
        for (size_t i = at; i < to; ++i) e[i] = exact::sub(room[i], decoder.value(encoder.code(room[i])));
      }
      e += n;
    }
    __builtin_memcpy(sink.place(), word, codecs::code_bytes<F>(n));
    sink.advance(codecs::code_bytes<F>(n));
    g += n;
  }
  sink.finish();
  return non_finite;
}

}  // namespace
}  // namespace gradgate::kernels::cpu
