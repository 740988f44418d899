#include "kernels/cpu/randk.h"

#include <atomic>
#include <cstring>

#include "codecs/codecs.h"
#include "kernels/cpu/tasks.h"

namespace gradgate::kernels::cpu {
namespace {

using Randk = codecs::Codec<CodecId::randk>;

// A bit per stratum, then e of every entry's element.
size_t mark_bytes(size_t entries) noexcept { return round_up((entries + 31) / 32 * sizeof(uint32_t), 64); }

// NaN in the place of a finite value; its element keeps the e that it had.
void spoil(const EncodeJob& job, size_t entry) noexcept {
  if (job.residual != nullptr) job.residual[job.sample->index(entry)] = job.before[entry];
  if (job.spec.value == DType::f32) {
    float* value = reinterpret_cast<float*>(job.second) + entry;
    if (exact::is_finite(*value)) *value = exact::from_bits(exact::kNanBits);
  } else {
    uint16_t* value = reinterpret_cast<uint16_t*>(job.second) + entry;
    if (exact::is_finite(codecs::widen_bf16(*value))) *value = 0x7fc0;
  }
}

}  // namespace

size_t randk_workspace_bytes(const CodecSpec& spec, size_t count) noexcept {
  const size_t entries = Randk::entries(spec, count);
  return mark_bytes(entries) + round_up(entries * sizeof(float), 64);
}

uint64_t encode_randk(const Loops& loops, const EncodeJob& encode, size_t count, const Executor& executor,
                      std::byte* workspace) noexcept {
  const size_t entries = Randk::entries(encode.spec, count);
  const codecs::SampleWords words = codecs::SampleWords::of(encode.seed);
  const codecs::Sample sample(words, count, entries);
  std::memcpy(encode.first, &words, sizeof words);
  EncodeJob job = encode;
  job.sample = &sample;
  job.marked = reinterpret_cast<uint32_t*>(workspace);
  job.before = reinterpret_cast<float*>(workspace + mark_bytes(entries));
  std::memset(job.marked, 0, mark_bytes(entries));
  std::atomic<uint64_t> non_finite{0};
  for_each_task(executor, Split(count, shard_alignment(job.spec), executor.width), count,
                [&](size_t begin, size_t end, size_t) {
                  non_finite.fetch_add(loops.encode(job, begin, end, nullptr), std::memory_order_relaxed);
                });
  if (non_finite.load() != 0) {
    for (size_t j = 0; j < entries; ++j) {
      if ((job.marked[j / 32] >> (j % 32) & 1u) != 0) spoil(job, j);
    }
  }
  return non_finite.load();
}

}  // namespace gradgate::kernels::cpu
