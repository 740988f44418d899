#include "kernels/cpu/topk.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "codecs/codecs.h"
#include "kernels/cpu/tasks.h"

namespace gradgate::kernels::cpu {
namespace {

using Topk = codecs::Codec<CodecId::topk>;
static_assert(kTopkChunk == Topk::kChunk);

constexpr size_t kSampleLine = 16;                // neighbours, one cache line of f32
constexpr size_t kSampleStep = 4096;              // one line in so many elements: 1/256
constexpr size_t kSmallSample = size_t{4} << 10;  // short vectors: about so many elements
constexpr size_t kRoom = size_t{256} << 10;       // values that are searched apart, once there are no more

size_t up(size_t n, size_t to) noexcept { return (n + to - 1) / to * to; }

size_t sample_step(size_t count) noexcept {
  const size_t dense = up(std::max<size_t>(count / kSmallSample * kSampleLine, kSampleLine), kSampleLine);
  return std::min(dense, kSampleStep);
}
size_t sample_size(size_t count) noexcept { return (count / sample_step(count) + 1) * kSampleLine; }

// How a vector is cut into tasks of whole chunks, and what the workspace holds. Made twice: to count, and to bind.
struct Plan {
  size_t tasks = 0, elements = 0, capacity = 0, kept = 0, bytes = 0;
  TopkTask* task = nullptr;
  uint32_t *candidates = nullptr, *room = nullptr;
  float* deferred = nullptr;  // int8 values: x of every entry
  std::byte* base;

  Plan(const CodecSpec& spec, size_t count, unsigned width, std::byte* memory) noexcept : base(memory) {
    const size_t chunks = Topk::chunks(count), entries = Topk::entries(spec, count);
    const size_t threads = std::max<size_t>(width, 1);
    const size_t per_task = (chunks + threads - 1) / threads;
    tasks = (chunks + per_task - 1) / per_task;
    elements = per_task * kTopkChunk;
    const size_t part = std::min(elements, count);
    // Half as many again as needed, so that filling up is rare and, where it happens, worth the work of choosing.
    capacity = std::min(entries + entries / 2 + 8 * kTopkBlock, part) + kTopkBlock;
    kept = std::min(entries, part);
    task = reinterpret_cast<TopkTask*>(take(tasks * sizeof(TopkTask)));
    candidates = reinterpret_cast<uint32_t*>(take(chunks * sizeof(uint32_t)));
    room = reinterpret_cast<uint32_t*>(take(std::max(sample_size(count), std::min(kRoom, count)) * sizeof(uint32_t)));
    if (spec.value == DType::u8) deferred = reinterpret_cast<float*>(take(entries * sizeof(float)));
    for (size_t i = 0; i < tasks; ++i) {
      TopkTask made;
      made.begin = i * elements;
      made.end = std::min(count, made.begin + elements);
      made.x = reinterpret_cast<float*>(take(kTopkBlock * sizeof(float)));
      made.found.value = reinterpret_cast<uint32_t*>(take((capacity + kTopkBeyond) * sizeof(uint32_t)));
      made.found.index = reinterpret_cast<uint16_t*>(take((capacity + kTopkBeyond) * sizeof(uint16_t)));
      made.before.value = reinterpret_cast<uint32_t*>(take(kept * sizeof(uint32_t)));
      made.before.index = reinterpret_cast<uint16_t*>(take(kept * sizeof(uint16_t)));
      if (base != nullptr) new (&task[i]) TopkTask(made);
    }
  }
  std::byte* take(size_t size) noexcept {
    std::byte* piece = base == nullptr ? nullptr : base + bytes;
    bytes += up(size, 64);
    return piece;
  }
};

// Calls f(task) for every task, in the environment of the format.
template <class F>
void for_each(const Executor& executor, const Plan& plan, const F& f) noexcept {
  struct Context {
    TopkTask* task;
    const F* f;
  } context{plan.task, &f};
  executor(
      plan.tasks,
      [](void* argument, size_t i) {
        const IeeeScope ieee;
        const Context& c = *static_cast<const Context*>(argument);
        (*c.f)(c.task[i]);
      },
      &context);
}

// A threshold that somewhat more than job.entries elements reach, as a sample has it.
int32_t sampled_threshold(const TopkLoops& loops, const TopkJob& job, uint32_t* room) noexcept {
  const size_t n = loops.sample(job, sample_step(job.count), kSampleLine, room);
  const double expected = static_cast<double>(job.entries) * static_cast<double>(n) / static_cast<double>(job.count);
  // Neighbours are alike, so a sample varies more than one of single elements would.
  const double wanted = expected * 1.04 + 5 * std::sqrt(expected) + 2;
  if (wanted >= static_cast<double>(n)) return 0;
  const auto c = static_cast<size_t>(wanted);
  int32_t low = 0, high = kTopkKeyEnd;
  while (high - low > 1 << 13) {  // a thousandth of a value is near enough
    const int32_t middle = low + (high - low) / 2;
    (loops.count(room, n, middle) >= c ? low : high) = middle;
  }
  return low;
}

// The key of the job.entries-th candidate, with *above greater ones. There are `found` candidates, at least so many,
// and all reach `floor`; the key is likely to be near `guess`.
int32_t last_key(const TopkLoops& loops, const TopkJob& job, const Plan& plan, int32_t floor, size_t found,
                 int32_t guess, size_t* above) noexcept {
  const auto reach = [&](int64_t t) {
    size_t n = 0;
    for (size_t i = 0; i < plan.tasks; ++i)
      n += loops.count(plan.task[i].found.value, plan.task[i].count, static_cast<int32_t>(t));
    return n;
  };
  // At least job.entries reach low, fewer reach high.
  int32_t low = floor, high = kTopkKeyEnd;
  size_t reach_low = found, reach_high = 0;
  // From the guess outwards, by steps that begin with 0.2 to 0.4 % of a value.
  bool up = true;
  for (int64_t step = 1 << 15, at = guess; at > low && at < high; at += up ? step : -step, step *= 2) {
    const size_t n = reach(at);
    if (at == guess) up = n >= job.entries;
    if (n < job.entries) {
      high = static_cast<int32_t>(at), reach_high = n;
    } else {
      low = static_cast<int32_t>(at), reach_low = n;
    }
  }
  const size_t room = std::min(kRoom, job.count);
  while (high - low > 1 && reach_low - reach_high > room) {
    const int32_t middle = low + (high - low) / 2;
    const size_t n = reach(middle);
    if (n < job.entries) {
      high = middle, reach_high = n;
    } else {
      low = middle, reach_low = n;
    }
  }
  if (high - low > 1) {
    size_t n = 0;
    for (size_t i = 0; i < plan.tasks; ++i)
      n += loops.gather(plan.task[i].found.value, plan.task[i].count, low, high, plan.room + n);
    const size_t beyond = reach_high;
    while (high - low > 1) {
      const int32_t middle = low + (high - low) / 2;
      const size_t m = beyond + loops.count(plan.room, n, middle);
      if (m < job.entries) {
        high = middle, reach_high = m;
      } else {
        low = middle;
      }
    }
  }
  *above = reach_high;
  return low;
}

}  // namespace

size_t topk_workspace_bytes(const CodecSpec& spec, size_t count, unsigned width) noexcept {
  return Plan(spec, count, width, nullptr).bytes;
}

uint64_t encode_topk(const Loops& table, const EncodeJob& encode, size_t count, const Executor& executor,
                     std::byte* workspace, uint32_t* threshold) noexcept {
  const TopkLoops& loops = *table.topk;
  const Plan plan(encode.spec, count, executor.width, workspace);
  TopkJob job;
  job.encode = encode;
  job.encode.deferred = plan.deferred;
  job.count = count;
  job.entries = Topk::entries(encode.spec, count);
  job.capacity = plan.capacity;
  job.candidates = plan.candidates;
  const IeeeScope ieee;
  int32_t first, guess;
  if (threshold != nullptr && *threshold > 0 && *threshold <= exact::kInfBits) {
    guess = static_cast<int32_t>(*threshold);
    first = std::max<int32_t>(guess - (1 << 18), 0);  // 1.5 to 3 % lower
  } else {
    first = std::min(sampled_threshold(loops, job, plan.room), static_cast<int32_t>(exact::kInfBits));
    guess = first + (1 << 16);  // what a sample takes too many
  }
  for (size_t i = 0; i < plan.tasks; ++i) plan.task[i].threshold = first;
  const auto collect = [&] {
    for_each(executor, plan, [&](TopkTask& task) { loops.collect(job, &task); });
    size_t found = 0;
    for (size_t i = 0; i < plan.tasks; ++i) found += plan.task[i].count;
    return found;
  };
  size_t found = collect();
  if (found < job.entries) {
    // The threshold was too high: once more, without one. No buffer can have filled up.
    job.again = encode.residual != nullptr;
    for (size_t i = 0; i < plan.tasks; ++i) {
      TopkTask& task = plan.task[i];
      std::copy_n(task.found.value, task.count, task.before.value);
      std::copy_n(task.found.index, task.count, task.before.index);
      task.count = 0;
      task.non_finite = 0;
      task.threshold = first = 0;
    }
    found = collect();
  }
  size_t above = 0;
  job.last_key = last_key(loops, job, plan, first, found, guess, &above);
  size_t ties = job.entries - above, entries = 0;
  uint64_t non_finite = 0;
  for (size_t i = 0; i < plan.tasks; ++i) {
    TopkTask& task = plan.task[i];
    task.first_entry = entries;
    task.ties = ties;
    entries += loops.choose(job, task, &ties);
    non_finite += task.non_finite;
  }
  for_each(executor, plan, [&](TopkTask& task) { loops.pack(job, task); });
  if (plan.deferred != nullptr) {
    for_each_task(executor, Split(job.entries, codecs::kScaleRun, executor.width), job.entries,
                  [&](size_t begin, size_t end, size_t) { table.quantize(job.encode, count, begin, end); });
  }
  if (threshold != nullptr) *threshold = static_cast<uint32_t>(job.last_key);
  return non_finite;
}

}  // namespace gradgate::kernels::cpu
