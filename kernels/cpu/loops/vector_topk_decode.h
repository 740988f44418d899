// topk: decoding, and adding up. Entries of the elements begin … end-1 are found by a cursor.
#pragma once

#include "kernels/cpu/loops/topk.h"
#include "kernels/cpu/topk.h"

namespace gradgate::kernels::cpu {
namespace {

template <class V, class O, bool kAdd>
void decode_vector_topk(const DecodeJob& job, size_t begin, size_t end) {
  const uint32_t* counts = reinterpret_cast<const uint32_t*>(job.first);
  const EntryValues<V> value(job.second, job.entries);
  const uint16_t* index = reinterpret_cast<const uint16_t*>(job.third);
  TopkCursor own;
  TopkCursor* at = job.cursor;
  if (at == nullptr) {  // begin is a multiple of the chunk
    own = topk_cursor(job.first, begin);
    at = &own;
  }
  // Sums have whole tiles in the first cache, and the fewer runs of entries end, the fewer ends are guessed wrong.
  constexpr size_t kPart = kAdd ? 4096 : 1024, kTogether = 4;
  const float scale = job.scale;
  Sink<O, kPart> sink(static_cast<O*>(job.out) + (begin - job.origin), !kAdd && job.stream);
  while (begin < end) {
    const size_t place = begin % kTopkChunk, n = least(kPart, end - begin);
    if (place == 0) at->chunk_end = at->entry + counts[begin / kTopkChunk];
    O* part = sink.place();
    if constexpr (!kAdd) clear(part, n * sizeof(O));
    const auto put = [&](size_t j) {
      O* out = part + (index[j] - place);
      const float v = exact::mul(value[j], scale);
      narrow(kAdd ? exact::add(widen(*out), v) : v, out);
    };
    size_t j = at->entry;
    const size_t chunk_end = at->chunk_end, to = place + n;
    // Several at a time: their indices ascend, so the last tells for all of them.
    for (; j + kTogether <= chunk_end && index[j + kTogether - 1] < to; j += kTogether) {
      // Payloads that are added up are more streams than the hardware follows.
      prefetch_ahead_second(index + j, 64);
      value.prefetch(j);
      for (size_t i = 0; i < kTogether; ++i) put(j + i);
    }
    for (; j < chunk_end && index[j] < to; ++j) put(j);
    at->entry = j;
    sink.advance(n);
    begin += n;
  }
  sink.finish();
}

}  // namespace
}  // namespace gradgate::kernels::cpu
