// topk: the loops of kernels/cpu/topk.h, which encode.
#pragma once

#include "kernels/cpu/loops/topk.h"
#include "kernels/cpu/topk.h"

namespace gradgate::kernels::cpu {
namespace {

GRADGATE_INLINE int32_t topk_key_of(uint32_t value) {
  return static_cast<int32_t>(codecs::topk_key(value & exact::kMagMask));
}

// What stays of x when it is sent as a V.
template <class V>
GRADGATE_INLINE float left_of(float x) {
  V sent;
  narrow(x, &sent);
  return left_when_sent(x, sent);
}
// Candidates whose residual depends on whether they are sent: x is not finite nowhere else, and +0 leaves +0 either way
// (also in a zero group, whose residual is not touched).
GRADGATE_INLINE bool has_residual(uint32_t value) { return value != 0 && (value & exact::kMagMask) < exact::kInfBits; }

// Bit j: value j of 64 has a key of at least t (0 <= t < kTopkKeyEnd).
GRADGATE_INLINE uint64_t keys_at_least_64(const uint32_t* value, int32_t t) {
  return at_least_64(reinterpret_cast<const int32_t*>(value), 0x7fffffff, t);
}

size_t topk_count(const uint32_t* values, size_t n, int32_t t) noexcept {
  if (t <= 0) return n;
  if (t >= kTopkKeyEnd) return 0;
  size_t count = 0, i = 0;
  for (; n - i >= 64; i += 64) count += static_cast<size_t>(__builtin_popcountll(keys_at_least_64(values + i, t)));
  for (; i < n; ++i) count += static_cast<size_t>(topk_key_of(values[i]) >= t);
  return count;
}

// The c-th greatest key of n values.
int32_t topk_nth(const uint32_t* values, size_t n, size_t c) {
  int32_t low = 0, high = kTopkKeyEnd;  // at least c keys reach low, fewer reach high
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (topk_count(values, n, middle) >= c) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class G, bool kFeedback>
size_t topk_sample_of(const TopkJob& job, size_t step, size_t line, uint32_t* values) {
  const G* g = static_cast<const G*>(job.encode.source);
  size_t n = 0;
  for (size_t at = 0; at < job.count; at += step) {
    const size_t length = least(line, job.count - at);
    bool zero = true;
    for (size_t i = at; i < at + length; ++i) {
      const float v = widen(g[i]);
      zero = zero && v == 0.0f;
      float x = v;
      if constexpr (kFeedback) x = exact::is_finite(v) ? exact::add(v, job.encode.residual[i]) : v;
      values[n + i - at] = exact::bits(x);
    }
    // Most likely a zero group, which sends nothing.
    if (kFeedback && zero && !job.encode.flush) {
      for (size_t i = 0; i < length; ++i) values[n + i] = 0;
    }
    n += length;
  }
  return n;
}

// x of a block: 1024 elements, or what is left of the vector, padded with +0.
template <class G, bool kFeedback>
class TopkSource {
 public:
  TopkSource(const TopkJob& job, const TopkTask& task)
      : job_(job), task_(task), g_(static_cast<const G*>(job.encode.source)), e_(job.encode.residual) {}

  // x of whole blocks is the gradient itself; who reads it asks for what follows.
  static constexpr bool kInPlace = !kFeedback && sizeof(G) == sizeof(float);

  // Blocks are asked for in ascending order. kCarry: e becomes x, where x is finite; otherwise nothing is changed.
  template <bool kCarry>
  const float* load(size_t begin, size_t n) {
    if constexpr (kInPlace) {
      if (n == kTopkBlock) return g_ + begin;
    }
    for (size_t i = 0; i < n; i += kGroupElements)
      load_group<kCarry>(begin + i, least(n - i, kGroupElements), task_.x + i);
    for (size_t i = n; i < kTopkBlock; ++i) task_.x[i] = 0.0f;
    return task_.x;
  }
  // The candidates of the first collection in the chunk that begins.
  void begin_chunk(size_t candidates) { chunk_end_ = at_ + candidates; }

 private:
  template <bool kCarry>
  GRADGATE_INLINE void load_group(size_t begin, size_t n, float* x) {
    const G* g = g_ + begin;
    float* e = kFeedback ? e_ + begin : nullptr;
    prefetch_first_lot<kFeedback>(g);
    Group group;
    if (kFeedback && job_.again) {
      group.kept = carried(g, e, n, x);
      group.max = kInf;  // e stays where x is not finite
      // What was a candidate before had the residual of a sent element.
      const size_t place = begin % kTopkChunk;
      for (; at_ < chunk_end_ && task_.before.index[at_] < place + n; ++at_)
        x[task_.before.index[at_] - place] = exact::from_bits(task_.before.value[at_]);
    } else if (n == kGroupElements) {
      group = form_group<G, kFeedback>(g, e, job_.encode.flush, x);
      if (group.x != x) __builtin_memcpy(x, group.x, sizeof(float) * kGroupElements);
    } else {
      PaddedGroup<G> pad(g, e, n);
      alignas(64) float room[kGroupElements];
      group = form_group<G, kFeedback>(pad.g, pad.e, job_.encode.flush, room);
      __builtin_memcpy(x, group.x, n * sizeof(float));
    }
    prefetch_second_lot<kFeedback>(g, e);
    if constexpr (kCarry) {
      group.x = x;
      carry_group(group, e, n);
    }
  }

  // x where e is x already: all of it but zero groups and what is not finite, which is among the candidates.
  bool carried(const G* g, const float* e, size_t n, float* x) const {
    bool zero = !job_.encode.flush;
    for (size_t i = 0; i < n; ++i) {
      zero = zero && widen(g[i]) == 0.0f;
      x[i] = e[i];
    }
    if (zero) {
      for (size_t i = 0; i < n; ++i) x[i] = 0.0f;
    }
    return zero;
  }

  const TopkJob& job_;
  const TopkTask& task_;
  const G* g_;
  float* e_;
  size_t at_ = 0, chunk_end_ = 0;
};

// Of the n candidates of a chunk, moves those whose key is above `last` and the first *ties of those that equal it to
// `to`, which does not lie behind them. Returns how many. The others get their residual back where there is one (e, the
// chunk's).
GRADGATE_INLINE size_t keep_chunk(TopkBuffer from, size_t n, int32_t last, size_t* ties, float* e, TopkBuffer to) {
  size_t kept = 0;
  for (size_t i = 0; i < n; i += 64) {
    const size_t m = least(n - i, 64);
    const uint64_t all = ~uint64_t{0} >> (64 - m);
    uint64_t keep = last + 1 < kTopkKeyEnd ? keys_at_least_64(from.value + i, last + 1) & all : 0;
    uint64_t tie = keys_at_least_64(from.value + i, last) & all & ~keep;
    for (; tie != 0 && *ties > 0; tie &= tie - 1, --*ties) keep |= tie & -tie;
    if (e != nullptr) {
      for (uint64_t left = all & ~keep; left != 0; left &= left - 1) {
        const size_t j = i + static_cast<size_t>(__builtin_ctzll(left));
        if (has_residual(from.value[j])) e[from.index[j]] = exact::from_bits(from.value[j]);
      }
    }
    if (m == 64) {
      kept += compress_64(from.value + i, from.index + i, keep, to.value + kept, to.index + kept);
    } else {
      for (size_t j = i; j < n; ++j, keep >>= 1) {
        to.value[kept] = from.value[j];
        to.index[kept] = from.index[j];
        kept += keep & 1;
      }
    }
  }
  return kept;
}

// Keeps the job.entries best candidates; what comes later must be better than the last of them.
template <bool kFeedback>
__attribute__((noinline)) void keep_best(const TopkJob& job, TopkTask* task, size_t chunk) {
  const int32_t last = topk_nth(task->found.value, task->count, job.entries);
  size_t ties = job.entries - topk_count(task->found.value, task->count, last + 1);
  TopkBuffer from = task->found, to = task->found;
  for (size_t c = task->begin / kTopkChunk; c <= chunk; ++c) {
    float* e = kFeedback ? job.encode.residual + c * kTopkChunk : nullptr;
    const size_t n = job.candidates[c], kept = keep_chunk(from, n, last, &ties, e, to);
    job.candidates[c] = static_cast<uint32_t>(kept);
    from.value += n, from.index += n;
    to.value += kept, to.index += kept;
  }
  task->count = static_cast<size_t>(to.value - task->found.value);
  task->threshold = last + 1;
}

// The key of the job.entries-th greatest of the elements from `begin` to the end of the task, by a histogram of each
// third of the bits: whatever the values are, three passes find it. 0 where there are not so many.
template <class G, bool kFeedback>
__attribute__((noinline)) int32_t greatest_of_rest(const TopkJob& job, const TopkTask& task,
                                                   const TopkSource<G, kFeedback>& from, size_t begin) {
  if (task.end - begin < job.entries) return 0;
  uint32_t known = 0;  // the bits found so far
  size_t wanted = job.entries;
  for (const unsigned shift : {20u, 9u, 0u}) {
    const unsigned width = shift == 20 ? 11 : shift == 9 ? 11 : 9;
    size_t bins[2048] = {};
    TopkSource<G, kFeedback> source = from;
    for (size_t b = begin; b < task.end; b += kTopkBlock) {
      if (b > begin && b % kTopkChunk == 0 && job.again) source.begin_chunk(job.candidates[b / kTopkChunk]);
      const size_t n = least(kTopkBlock, task.end - b);
      const float* x = source.template load<false>(b, n);
      for (size_t i = 0; i < n; ++i) {
        const uint32_t key = static_cast<uint32_t>(topk_key_of(exact::bits(x[i])));
        if (key >> (shift + width) == known) ++bins[key >> shift & ((1u << width) - 1)];
      }
    }
    uint32_t bin = (1u << width) - 1;
    for (; bins[bin] < wanted; --bin) wanted -= bins[bin];
    known = known << width | bin;
  }
  return static_cast<int32_t>(known);
}

// Appends the elements of a block that reach the threshold; returns how many.
template <bool kPrefetch>
GRADGATE_INLINE size_t append_hits(const float* x, size_t n, size_t place, TopkTask* task) {
  const int32_t t = task->threshold;
  uint64_t word[kTopkBlock / 64];
  size_t start[kTopkBlock / 64], words = 0, most = 0;
  for (size_t i = 0; i < n; i += 64) {
    if constexpr (kPrefetch) prefetch_ahead(x + i, 256);
    uint64_t w = at_least_64(reinterpret_cast<const int32_t*>(x + i), 0x7fffffff, t);
    if (n - i < 64) w &= (uint64_t{1} << (n - i)) - 1;
    const auto hits = static_cast<size_t>(__builtin_popcountll(w));
    word[words] = w;
    start[words] = i;
    words += static_cast<size_t>(w != 0);
    most = hits > most ? hits : most;
  }
  // How many of 64 reach it differs from word to word, and a branch on it would be guessed wrong each time. So every
  // word writes as many as the fullest has, right or not, and what is not right is overwritten by the next word.
  uint32_t* value = task->found.value + task->count;
  uint16_t* index = task->found.index + task->count;
  size_t all = 0;
  most = (most + 3) / 4 * 4;
  for (size_t k = 0; k < words; ++k) {
    uint64_t w = word[k];
    const auto hits = static_cast<size_t>(__builtin_popcountll(w));
    const float* from = x + start[k];
    for (size_t j = 0; j < most; j += 4) {
      for (size_t l = 0; l < 4; ++l) {
        const auto i = static_cast<size_t>(__builtin_ctzll(w | uint64_t{1} << 63));
        value[all + j + l] = exact::bits(from[i]);
        index[all + j + l] = static_cast<uint16_t>(place + start[k] + i);
        w &= w - 1;
      }
    }
    all += hits;
  }
  task->count += all;
  return all;
}

template <class G, class V, bool kFeedback>
void topk_collect_as(const TopkJob& job, TopkTask* task) {
  constexpr unsigned kFillsBeforeHistogram = 3;
  constexpr bool kInPlace = TopkSource<G, kFeedback>::kInPlace;
  uint32_t* counts = job.candidates;
  TopkSource<G, kFeedback> source(job, *task);
  // What is not finite reaches any threshold up to Inf, so it is among the candidates from `counted` on.
  size_t counted = 0;
  const auto count_non_finite = [&] {
    if (task->threshold <= kInf)
      task->non_finite += topk_count(task->found.value + counted, task->count - counted, kInf);
  };
  for (size_t begin = task->begin; begin < task->end; begin += kTopkBlock) {
    const size_t chunk = begin / kTopkChunk, n = least(kTopkBlock, task->end - begin);
    if (begin % kTopkChunk == 0) {
      if (job.again) source.begin_chunk(counts[chunk]);
      counts[chunk] = 0;
    }
    if (task->count + kTopkBlock > job.capacity) {
      count_non_finite();
      keep_best<kFeedback>(job, task, chunk);
      counted = task->count;
      if (++task->fills == kFillsBeforeHistogram) {
        const int32_t rest = greatest_of_rest<G, kFeedback>(job, *task, source, begin);
        task->threshold = greater(task->threshold, rest);
      }
    }
    const float* x = source.template load<kFeedback>(begin, n);
    if (task->threshold > kInf) {
      for (size_t i = 0; i < n; ++i) task->non_finite += static_cast<uint64_t>(!exact::is_finite(x[i]));
      if (task->threshold >= kTopkKeyEnd) continue;
    }
    const size_t first = task->count, hits = append_hits<kInPlace>(x, n, begin % kTopkChunk, task);
    counts[chunk] += static_cast<uint32_t>(hits);
    if constexpr (kFeedback) {
      float* e = job.encode.residual + chunk * kTopkChunk;
      for (size_t j = first; j < first + hits; ++j) {
        const uint32_t v = task->found.value[j];
        if (has_residual(v)) e[task->found.index[j]] = left_of<V>(exact::from_bits(v));
      }
    }
  }
  count_non_finite();
}

size_t topk_choose(const TopkJob& job, const TopkTask& task, size_t* ties) noexcept {
  uint32_t* counts = reinterpret_cast<uint32_t*>(job.encode.first);
  const uint32_t* value = task.found.value;
  size_t entries = 0;
  for (size_t c = task.begin / kTopkChunk; c * kTopkChunk < task.end; ++c) {
    const size_t n = job.candidates[c], above = topk_count(value, n, job.last_key + 1);
    const size_t equal = least(topk_count(value, n, job.last_key) - above, *ties);
    *ties -= equal;
    counts[c] = static_cast<uint32_t>(above + equal);
    entries += above + equal;
    value += n;
  }
  return entries;
}

template <class V, bool kFeedback>
void topk_pack_as(const TopkJob& job, const TopkTask& task) {
  V* value = values_of<V>(job.encode, job.encode.second) + task.first_entry;
  uint16_t* index = reinterpret_cast<uint16_t*>(job.encode.third) + task.first_entry;
  TopkBuffer from = task.found;
  size_t ties = task.ties;
  for (size_t c = task.begin / kTopkChunk; c * kTopkChunk < task.end; ++c) {
    float* e = kFeedback ? job.encode.residual + c * kTopkChunk : nullptr;
    const size_t n = keep_chunk(from, job.candidates[c], job.last_key, &ties, e, from);
    for (size_t j = 0; j < n; ++j) narrow(exact::from_bits(from.value[j]), value + j);
    __builtin_memcpy(index, from.index, n * sizeof(uint16_t));
    value += n;
    index += n;
    from.value += job.candidates[c];
    from.index += job.candidates[c];
  }
}

size_t topk_gather(const uint32_t* values, size_t n, int32_t low, int32_t high, uint32_t* out) noexcept {
  size_t found = 0, i = 0;
  for (; n - i >= 64; i += 64) {
    uint64_t w = low > 0 ? keys_at_least_64(values + i, low) : ~uint64_t{0};
    if (high < kTopkKeyEnd) w &= ~keys_at_least_64(values + i, high);
    for (; w != 0; w &= w - 1) out[found++] = values[i + static_cast<size_t>(__builtin_ctzll(w))];
  }
  for (; i < n; ++i) {
    const int32_t key = topk_key_of(values[i]);
    if (key >= low && key < high) out[found++] = values[i];
  }
  return found;
}

template <class F>
void with_gradient(const TopkJob& job, const F& f) {
  switch (job.encode.dtype) {
    case DType::f32:
      return f(float{});
    case DType::bf16:
      return f(uint16_t{});
    default:
      return f(F16{});
  }
}

size_t topk_sample(const TopkJob& job, size_t step, size_t line, uint32_t* values) noexcept {
  size_t n = 0;
  with_gradient(job, [&](auto g) {
    n = job.encode.residual != nullptr ? topk_sample_of<decltype(g), true>(job, step, line, values)
                                       : topk_sample_of<decltype(g), false>(job, step, line, values);
  });
  return n;
}

template <class G>
void topk_collect_from(const TopkJob& job, TopkTask* task) {
  if (job.encode.residual == nullptr) return topk_collect_as<G, float, false>(job, task);
  if (job.encode.spec.value == DType::f32) return topk_collect_as<G, float, true>(job, task);
  if (job.encode.spec.value == DType::bf16) return topk_collect_as<G, uint16_t, true>(job, task);
  return topk_collect_as<G, Deferred, true>(job, task);
}

void topk_collect(const TopkJob& job, TopkTask* task) noexcept {
  with_gradient(job, [&](auto g) { topk_collect_from<decltype(g)>(job, task); });
}

template <bool kFeedback>
void topk_pack_values(const TopkJob& job, const TopkTask& task) {
  switch (job.encode.spec.value) {
    case DType::f32:
      return topk_pack_as<float, kFeedback>(job, task);
    case DType::bf16:
      return topk_pack_as<uint16_t, kFeedback>(job, task);
    default:
      return topk_pack_as<Deferred, kFeedback>(job, task);
  }
}

void topk_pack(const TopkJob& job, const TopkTask& task) noexcept {
  job.encode.residual != nullptr ? topk_pack_values<true>(job, task) : topk_pack_values<false>(job, task);
}

constexpr TopkLoops kTopkLoops = {topk_sample, topk_count, topk_gather, topk_collect, topk_choose, topk_pack};

}  // namespace
}  // namespace gradgate::kernels::cpu
