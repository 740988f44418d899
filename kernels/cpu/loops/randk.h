// randk: walking over the entries of a sample, encoding and decoding by it.
#pragma once

#include "codecs/codecs.h"
#include "kernels/cpu/loops.h"
#include "kernels/cpu/loops/topk.h"

namespace gradgate::kernels::cpu {
namespace {

// The numbers of 128 consecutive entries from `first` (a multiple of 128) on: a block in each lane.
__attribute__((noinline)) void fill_draws(const codecs::Sample& sample, uint64_t first, uint32_t* draw) {
  constexpr uint64_t kBlocks = codecs::kBlocksPerRun;
  const uint64_t base = first / codecs::kDrawsPerRun * kBlocks;
  for (uint64_t lane = 0; lane < kBlocks; ++lane) {
    const codecs::PhiloxBlock block = sample.draws(base + lane);
    for (uint64_t w = 0; w < 4; ++w) draw[w * kBlocks + lane] = block.word[w];
  }
}

// The entries of a sample by ascending element, from some element on.
class SampleWalk {
 public:
  SampleWalk(const codecs::Sample& sample, size_t begin)
      : sample_(sample), step_(sample.count / sample.entries), step_rest_(sample.count % sample.entries) {
    const uint64_t ring_start = sample.start(0);
    if (begin < ring_start) {
      // These elements belong to the last stratum, which reaches around; the walk itself begins at the first.
      const uint64_t last = sample.entries - 1;
      const uint64_t at = sample.index(last);
      around_ = at < ring_start && at >= begin;
      at_ = at;
      entry_ = last;
    } else {
      following_ = sample.stratum(begin);
    }
    const uint64_t product = following_ * sample.count + sample.shift;
    stratum_ = product / sample.entries;
    rest_ = product % sample.entries;
    if (following_ < sample.entries) fill_draws(sample, following_ / kRun * kRun, draw_);
    if (!around_) step();
    while (!done_ && at_ < begin) step();
  }

  // Whether an entry is left whose element is below `end`; it is entry() with element at().
  GRADGATE_INLINE bool before(size_t end) const { return !done_ && at_ < end; }
  size_t entry() const { return entry_; }
  size_t at() const { return at_; }
  GRADGATE_INLINE void advance() { step(); }

 private:
  static constexpr uint64_t kRun = codecs::kDrawsPerRun;

  GRADGATE_INLINE void step() {
    const uint64_t j = following_;
    if (j >= sample_.entries) {
      done_ = true;
      return;
    }
    uint64_t end = stratum_ + step_;
    rest_ += step_rest_;
    if (rest_ >= sample_.entries) {
      rest_ -= sample_.entries;
      ++end;
    }
    at_ = codecs::Sample::place(stratum_, end, draw_[j % kRun]);
    entry_ = j;
    done_ = at_ >= sample_.count;  // reached around: it has been, or is not asked for
    stratum_ = end;
    following_ = j + 1;
    if (following_ % kRun == 0 && following_ < sample_.entries) fill_draws(sample_, following_, draw_);
  }

  const codecs::Sample& sample_;
  const uint64_t step_, step_rest_;
  uint64_t following_ = 0, stratum_ = 0, rest_ = 0;  // the next entry and where its stratum begins
  size_t entry_ = 0, at_ = 0;
  bool around_ = false, done_ = false;
  alignas(64) uint32_t draw_[kRun];
};

// Strata that hold an x which is not finite.
__attribute__((noinline)) void mark_strata(const EncodeJob& job, const float* x, size_t begin, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    if (exact::is_finite(x[i])) continue;
    const uint64_t j = job.sample->stratum(begin + i);
    __atomic_fetch_or(&job.marked[j / 32], 1u << (j % 32), __ATOMIC_RELAXED);
  }
}

template <class G, class V, bool kFeedback>
uint64_t encode_sample(const EncodeJob& job, size_t begin, size_t end) {
  const G* g = static_cast<const G*>(job.source) + (begin - job.origin);
  float* e = kFeedback ? job.residual + (begin - job.origin) : nullptr;
  V* value = reinterpret_cast<V*>(job.second);
  SampleWalk walk(*job.sample, begin);
  alignas(64) float room[kGroupElements];
  uint64_t non_finite = 0;
  for (; begin < end; begin += kGroupElements, g += kGroupElements) {
    const size_t n = least(end - begin, kGroupElements);
    const auto take = [&](const Group& group) {
      if (group.max >= kInf) {
        non_finite += count_non_finite(group.x);
        mark_strata(job, group.x, begin, n);
      }
      if constexpr (!kFeedback) {
        for (; walk.before(begin + n); walk.advance()) narrow(group.x[walk.at() - begin], value + walk.entry());
      } else {
        size_t entry[kGroupElements];
        uint16_t place[kGroupElements];
        size_t found = 0;
        for (; walk.before(begin + n); walk.advance(), ++found) {
          entry[found] = walk.entry();
          place[found] = static_cast<uint16_t>(walk.at() - begin);
          narrow(group.x[place[found]], value + walk.entry());
          job.before[walk.entry()] = e[place[found]];
        }
        carry_group(group, e, n);
        for (size_t k = 0; k < found && !group.kept; ++k) {
          const float x = group.x[place[k]];
          if (exact::is_finite(x)) e[place[k]] = exact::sub(x, widen(value[entry[k]]));
        }
      }
    };
    if (n == kGroupElements) {
      prefetch_first_lot<kFeedback>(g);
      const Group group = form_group<G, kFeedback>(g, e, job.flush, room);
      prefetch_second_lot<kFeedback>(g, e);
      take(group);
    } else {
      const PaddedGroup<G> pad(g, e, n);
      take(form_group<G, kFeedback>(pad.g, pad.e, job.flush, room));
    }
    if constexpr (kFeedback) e += kGroupElements;
  }
  return non_finite;
}

template <class V, class O, bool kAdd>
void decode_sample(const DecodeJob& job, size_t begin, size_t end) {
  codecs::SampleWords words;
  __builtin_memcpy(&words, job.first, sizeof words);
  const codecs::Sample sample(words, job.count, job.entries);
  const V* value = reinterpret_cast<const V*>(job.second);
  SampleWalk walk(sample, begin);
  constexpr size_t kPart = 1024;
  Sink<O, kPart> sink(static_cast<O*>(job.out) + (begin - job.origin), !kAdd && job.stream);
  for (; begin < end; begin += kPart) {
    const size_t n = least(kPart, end - begin);
    O* part = sink.place();
    if constexpr (!kAdd) clear(part, n * sizeof(O));
    for (; walk.before(begin + n); walk.advance()) {
      O* out = part + (walk.at() - begin);
      const float v = exact::mul(widen(value[walk.entry()]), job.scale);
      narrow(kAdd ? exact::add(widen(*out), v) : v, out);
    }
    sink.advance(n);
  }
  sink.finish();
}

}  // namespace
}  // namespace gradgate::kernels::cpu
