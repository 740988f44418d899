#include "kernels/cpu/calls.h"

#include <atomic>
#include <cstring>
#include <new>
#include <utility>

#include "codecs/codecs.h"
#include "codecs/header.h"
#include "kernels/arguments.h"
#include "kernels/cpu/randk.h"
#include "kernels/cpu/tasks.h"
#include "kernels/cpu/topk.h"

namespace gradgate::kernels::cpu {
namespace {

using codecs::kGroup;

constexpr size_t kSumElements = 4096;  // a tile of reduce_encode: 16 KiB of f32 stay in L1
constexpr size_t kWorkAlign = 64;

size_t tile_elements(const CodecSpec& spec) noexcept {
  const size_t unit = shard_alignment(spec);
  return unit > kSumElements ? unit : kSumElements;
}
// int8 values of chunk-topk: x of every entry, behind the tasks' scratch (topk has its own plan).
size_t deferred_bytes(const CodecSpec& spec, size_t count) noexcept {
  if (spec.id != CodecId::chunk_topk || spec.value != DType::u8) return 0;
  return round_up(codecs::Codec<CodecId::chunk_topk>::entries(spec, count) * sizeof(float), kWorkAlign);
}
size_t task_bytes(const CodecSpec& spec) noexcept {
  return round_up(tile_elements(spec) * sizeof(float) + scratch_bytes(spec), kWorkAlign);
}

// decode_sum: two tiles small enough for the first cache, of which one is summed while the other is stored; the
// sections of each payload, and for topk a cursor into it.
struct SumPlan {
  Split split;
  size_t tile, stride;

  SumPlan(const CodecSpec& spec, size_t count, size_t ranks, unsigned width) noexcept
      : split(count, shard_alignment(spec), width),
        tile(spec.id == CodecId::topk ? kSumElements : tile_elements(spec)) {
    const size_t cursors = ranks * (sizeof(codecs::Sections<const std::byte>) + sizeof(TopkCursor));
    stride = round_up(2 * tile * sizeof(float) + cursors, kWorkAlign);
  }
};

std::byte* aligned_workspace(Bytes workspace) noexcept {
  return reinterpret_cast<std::byte*>(round_up(reinterpret_cast<uintptr_t>(workspace.data()), kWorkAlign));
}

// What encode and reduce_encode ask of their buffers alike; on success the sections of the payload are bound.
Status check_encode(const CodecSpec& spec, ConstVec gradient, const float* residual, Bytes payload, Bytes workspace,
                    unsigned width, const Seed& seed, codecs::Sections<std::byte>* sections) noexcept {
  if (!codecs::valid_spec(spec)) return StatusCode::invalid_argument;
  if (seed.first % kGroup != 0 && gradient.count != 0) return StatusCode::invalid_argument;
  if (!codec_takes(spec, gradient.dtype)) return StatusCode::unsupported;
  if (!readable(gradient.data, gradient.count, gradient.dtype) || !aligned(residual, sizeof(float)))
    return StatusCode::invalid_argument;
  if (spec.id == CodecId::none && residual != nullptr) return StatusCode::invalid_argument;
  const size_t bytes = payload_bytes(spec, gradient.dtype, gradient.count);
  if (bytes == 0) return StatusCode::invalid_argument;
  if (payload.size() < bytes) return {StatusCode::payload_too_small, static_cast<int64_t>(bytes)};
  if (payload.data() == nullptr || !aligned(payload.data(), codecs::kSectionAlign)) return StatusCode::invalid_argument;
  const size_t scratch = workspace_bytes(spec, gradient.dtype, gradient.count, width);
  if (workspace.size() < scratch) return {StatusCode::workspace_too_small, static_cast<int64_t>(scratch)};
  if (scratch > 0 && workspace.data() == nullptr) return StatusCode::invalid_argument;
  const size_t gradient_bytes = gradient.count * dtype_bytes(gradient.dtype);
  const size_t residual_bytes = residual == nullptr ? 0 : gradient.count * sizeof(float);
  if (overlap(payload.data(), bytes, gradient.data, gradient_bytes) ||
      overlap(payload.data(), bytes, residual, residual_bytes) ||
      overlap(payload.data(), bytes, workspace.data(), scratch) ||
      overlap(residual, residual_bytes, gradient.data, gradient_bytes) ||
      overlap(workspace.data(), scratch, gradient.data, gradient_bytes) ||
      overlap(workspace.data(), scratch, residual, residual_bytes)) {
    return StatusCode::invalid_argument;
  }
  codecs::bind_payload(spec, gradient.dtype, gradient.count, payload.data(), sections);
  return {};
}

// How many elements a payload has entries for; 0 for codecs that send all.
size_t entries_of(const CodecSpec& spec, size_t count) noexcept {
  return codecs::visit(spec.id, size_t{0}, [&](auto codec) -> size_t {
    if constexpr (requires { codec.entries(spec, count); }) {
      return codec.entries(spec, count);
    } else {
      return 0;
    }
  });
}

// Zeros from the end of a section to the next multiple of 16.
void clear_padding(std::byte* section, size_t bytes) noexcept {
  if (section != nullptr) std::memset(section + bytes, 0, round_up(bytes, codecs::kSectionAlign) - bytes);
}

void finish_payload(const CodecSpec& spec, ConstVec gradient, Seed seed, uint64_t non_finite,
                    const codecs::Sections<std::byte>& sections, EncodeStats* stats) noexcept {
  codecs::WireHeader header = codecs::make_header(spec, gradient.dtype, gradient.count, seed.step);
  if (non_finite != 0) header.flags |= codecs::kFlagNonFinite;
  std::memcpy(sections.header, &header, sizeof header);
  clear_padding(sections.first, sections.first_bytes);
  clear_padding(sections.second, sections.second_bytes);
  clear_padding(sections.third, sections.third_bytes);
  if (stats != nullptr) stats->non_finite = non_finite;
}

EncodeJob encode_job(const CodecSpec& spec, ConstVec source, float* residual, size_t payload_size,
                     const codecs::Sections<std::byte>& sections, const Seed& seed) noexcept {
  EncodeJob job;
  job.spec = spec;
  job.seed = seed;
  job.source = source.data;
  job.residual = residual;
  job.dtype = source.dtype;
  job.stored = source.dtype;
  job.stream = payload_size >= kStreamBytes;
  job.first = sections.first;
  job.second = sections.second;
  job.third = sections.third;
  return job;
}

// Codecs whose elements depend on the greatest magnitude of the whole vector have a pass of their own to find it.
bool needs_greatest(const CodecSpec& spec) noexcept {
  return codecs::visit(spec.id, false, [](auto codec) {
    return requires { codec.put_vector(0u, nullptr); };
  });
}

// The second step of int8 values: by runs of entries, once all of them are there.
void quantize(const Loops& loops, const EncodeJob& job, size_t count, const Executor& executor) noexcept {
  const size_t entries = codecs::Codec<CodecId::chunk_topk>::entries(job.spec, count);
  for_each_task(executor, Split(entries, codecs::kScaleRun, executor.width), entries,
                [&](size_t begin, size_t end, size_t) { loops.quantize(job, count, begin, end); });
}

class Greatest {
 public:
  void take(uint32_t mag) noexcept {
    uint32_t seen = greatest_.load(std::memory_order_relaxed);
    while (seen < mag && !greatest_.compare_exchange_weak(seen, mag, std::memory_order_relaxed)) {
    }
  }
  uint32_t value() const noexcept { return greatest_.load(); }

 private:
  std::atomic<uint32_t> greatest_{0};
};

void put_greatest(const CodecSpec& spec, const Greatest& greatest, const codecs::Sections<std::byte>& sections,
                  EncodeJob* job) noexcept {
  job->greatest = greatest.value();
  codecs::visit(spec.id, 0, [&](auto codec) {
    if constexpr (requires { codec.put_vector(0u, nullptr); }) codec.put_vector(job->greatest, sections.first);
    return 0;
  });
}

uint32_t step_of(const std::byte* header) noexcept {
  codecs::WireHeader read;
  std::memcpy(&read, header, sizeof read);
  return read.step;
}

}  // namespace

Status encode(const Loops& loops, const CodecSpec& spec, const EncodeArgs& args, EncodeStats* stats) noexcept {
  codecs::Sections<std::byte> sections;
  GRADGATE_TRY(check_encode(spec, args.gradient, args.residual, args.payload, args.workspace, args.executor.width,
                            args.seed, &sections));
  const size_t count = args.gradient.count;
  EncodeJob job = encode_job(spec, args.gradient, args.residual, payload_bytes(spec, args.gradient.dtype, count),
                             sections, args.seed);
  job.flush = args.flush;
  std::byte* const workspace = aligned_workspace(args.workspace);
  if (spec.id == CodecId::topk && count > 0) {
    const uint64_t seen = encode_topk(loops, job, count, args.executor, workspace, args.threshold);
    finish_payload(spec, args.gradient, args.seed, seen, sections, stats);
    return {};
  }
  if (spec.id == CodecId::randk && count > 0) {
    const uint64_t seen = encode_randk(loops, job, count, args.executor, workspace);
    finish_payload(spec, args.gradient, args.seed, seen, sections, stats);
    return {};
  }
  const size_t stride = task_bytes(spec);
  const Split split(count, shard_alignment(spec), args.executor.width);
  if (deferred_bytes(spec, count) > 0) job.deferred = reinterpret_cast<float*>(workspace + split.tasks * stride);
  if (needs_greatest(spec) && count > 0) {
    Greatest greatest;
    for_each_task(args.executor, split, count,
                  [&](size_t begin, size_t end, size_t) { greatest.take(loops.greatest(job, begin, end)); });
    put_greatest(spec, greatest, sections, &job);
  }
  std::atomic<uint64_t> non_finite{0};
  for_each_task(args.executor, split, count, [&](size_t begin, size_t end, size_t index) {
    non_finite.fetch_add(loops.encode(job, begin, end, workspace + index * stride), std::memory_order_relaxed);
  });
  if (job.deferred != nullptr) quantize(loops, job, count, args.executor);
  finish_payload(spec, args.gradient, args.seed, non_finite.load(), sections, stats);
  return {};
}

Status decode(const Loops& loops, const CodecSpec& spec, const DecodeArgs& args) noexcept {
  if (!codecs::valid_spec(spec)) return StatusCode::invalid_argument;
  if (!codec_takes(spec, args.gradient)) return StatusCode::unsupported;
  const Vec out = args.out;
  if (spec.id == CodecId::none) {
    if (out.dtype != args.gradient) return StatusCode::invalid_argument;
    const bool copies = args.scale == 1.0f && args.into == Into::store;
    if (!copies && !widens_to_f32(out.dtype)) return StatusCode::unsupported;
  } else if (!widens_to_f32(out.dtype)) {
    return StatusCode::unsupported;
  }
  if (!readable(out.data, out.count, out.dtype)) return StatusCode::invalid_argument;
  GRADGATE_TRY(check_payload(spec, args.gradient, out.count, args.payload));
  const size_t out_bytes = out.count * dtype_bytes(out.dtype);
  if (overlap(args.payload.data(), args.payload.size(), out.data, out_bytes)) return StatusCode::invalid_argument;
  codecs::Sections<const std::byte> sections;
  codecs::bind_payload(spec, args.gradient, out.count, args.payload.data(), &sections);
  DecodeJob job;
  job.spec = spec;
  job.gradient = args.gradient;
  job.first = sections.first;
  job.second = sections.second;
  job.third = sections.third;
  job.count = out.count;
  job.entries = entries_of(spec, out.count);
  job.step = step_of(sections.header);
  job.out = out.data;
  job.dtype = out.dtype;
  job.scale = args.scale;
  job.add = args.into == Into::add;
  job.stream = !job.add && out_bytes >= kStreamBytes;
  for_each_task(args.executor, Split(out.count, shard_alignment(spec), args.executor.width), out.count,
                [&](size_t begin, size_t end, size_t) { loops.decode(job, begin, end); });
  return {};
}

Status decode_sum(const Loops& loops, const CodecSpec& spec, const DecodeSumArgs& args) noexcept {
  if (!codecs::valid_spec(spec)) return StatusCode::invalid_argument;
  if (!codec_takes(spec, args.gradient)) return StatusCode::unsupported;
  const Vec out = args.out;
  if (!widens_to_f32(args.gradient) || !widens_to_f32(out.dtype)) return StatusCode::unsupported;
  if (args.payloads.empty() || !readable(out.data, out.count, out.dtype)) return StatusCode::invalid_argument;
  const size_t out_bytes = out.count * dtype_bytes(out.dtype);
  const size_t scratch = decode_sum_bytes(spec, args.gradient, out.count, args.payloads.size(), args.executor.width);
  if (args.workspace.size() < scratch) return {StatusCode::workspace_too_small, static_cast<int64_t>(scratch)};
  if (scratch > 0 && args.workspace.data() == nullptr) return StatusCode::invalid_argument;
  if (overlap(args.workspace.data(), scratch, out.data, out_bytes)) return StatusCode::invalid_argument;
  for (const ConstBytes& payload : args.payloads) {
    GRADGATE_TRY(check_payload(spec, args.gradient, out.count, payload));
    if (overlap(payload.data(), payload.size(), out.data, out_bytes) ||
        overlap(payload.data(), payload.size(), args.workspace.data(), scratch))
      return StatusCode::invalid_argument;
  }
  const SumJob job{out.dtype, args.scale, out_bytes >= kStreamBytes};
  const SumPlan plan(spec, out.count, args.payloads.size(), args.executor.width);
  const size_t entries = entries_of(spec, out.count);
  std::byte* const workspace = aligned_workspace(args.workspace);
  const size_t element = dtype_bytes(out.dtype);
  for_each_task(args.executor, plan.split, out.count, [&](size_t begin, size_t end, size_t index) {
    std::byte* const own = workspace + index * plan.stride;
    const size_t ranks = args.payloads.size();
    float* sum = reinterpret_cast<float*>(own);
    float* before = sum + plan.tile;  // the tile that was summed last
    auto* const sections = reinterpret_cast<codecs::Sections<const std::byte>*>(own + 2 * plan.tile * sizeof(float));
    auto* const cursors = reinterpret_cast<TopkCursor*>(sections + ranks);
    for (size_t rank = 0; rank < ranks; ++rank) {
      codecs::Sections<const std::byte>* parts = new (&sections[rank]) codecs::Sections<const std::byte>;
      codecs::bind_payload(spec, args.gradient, out.count, args.payloads[rank].data(), parts);
      if (spec.id == CodecId::topk) new (&cursors[rank]) TopkCursor(topk_cursor(parts->first, begin));
    }
    const auto part_of_tile = [&](size_t rank) { return plan.tile * rank / ranks / kGroup * kGroup; };
    // Elements first … last-1 of the tile that begins at element `at`.
    const auto store = [&](const float* tile, size_t at, size_t first, size_t last) {
      SumJob part = job;
      part.last = at + last == end;
      loops.store_sum(tile + first, part, static_cast<std::byte*>(out.data) + (at + first) * element, last - first);
    };
    for (size_t at = begin; at < end; at += plan.tile) {
      const size_t to = end - at < plan.tile ? end : at + plan.tile;
      for (size_t rank = 0; rank < ranks; ++rank) {
        const codecs::Sections<const std::byte>& parts = sections[rank];
        DecodeJob term;
        term.spec = spec;
        term.entries = entries;
        term.gradient = args.gradient;
        term.step = step_of(parts.header);
        term.first = parts.first;
        term.second = parts.second;
        term.third = parts.third;
        if (spec.id == CodecId::topk) term.cursor = &cursors[rank];
        term.count = out.count;
        term.out = sum;
        term.origin = at;
        term.add = rank > 0;
        loops.decode(term, at, to);
        // Memory takes stores more slowly than they are made: a part at a time, the next decoding runs meanwhile.
        if (at > begin) store(before, at - plan.tile, part_of_tile(rank), part_of_tile(rank + 1));
      }
      if (to == end) store(sum, at, 0, to - at);
      std::swap(sum, before);
    }
  });
  return {};
}

Status reduce_encode(const Loops& loops, const CodecSpec& spec, const ReduceArgs& args, EncodeStats* stats) noexcept {
  codecs::Sections<std::byte> sections;
  GRADGATE_TRY(check_encode(spec, args.gradient, args.residual, args.payload, args.workspace, args.executor.width,
                            args.seed, &sections));
  const DType dtype = args.gradient.dtype;
  const size_t count = args.gradient.count, bytes = payload_bytes(spec, dtype, count);
  // Sums are formed in f32, and encoded piece by piece.
  if (!widens_to_f32(dtype) || !codec_travels_by(spec, Exchange::two_shot)) return StatusCode::unsupported;
  if (args.self >= args.payloads.size()) return StatusCode::invalid_argument;
  for (size_t rank = 0; rank < args.payloads.size(); ++rank) {
    if (rank == args.self) continue;
    GRADGATE_TRY(check_payload(spec, dtype, count, args.payloads[rank]));
    if (overlap(args.payload.data(), bytes, args.payloads[rank].data(), args.payloads[rank].size()))
      return StatusCode::invalid_argument;
  }
  EncodeJob job = encode_job(spec, {nullptr, count, DType::f32}, nullptr, bytes, sections, args.seed);
  job.stored = dtype;
  job.sum = true;
  job.stream = false;  // tiles are shorter than what a sink collects
  std::byte* const workspace = aligned_workspace(args.workspace);
  const size_t stride = task_bytes(spec), tile = tile_elements(spec);
  const Split split(count, shard_alignment(spec), args.executor.width);
  if (deferred_bytes(spec, count) > 0) job.deferred = reinterpret_cast<float*>(workspace + split.tasks * stride);
  // Forms the sum tile by tile and hands each to use(job of the tile, its begin and end, scratch).
  const size_t entries = entries_of(spec, count);
  const auto for_each_sum = [&](const auto& use) {
    for_each_task(args.executor, split, count, [&](size_t begin, size_t end, size_t index) {
      float* const sum = reinterpret_cast<float*>(workspace + index * stride);
      std::byte* const scratch = workspace + index * stride + tile * sizeof(float);
      for (size_t at = begin; at < end; at += tile) {
        const size_t to = end - at < tile ? end : at + tile;
        for (size_t rank = 0; rank < args.payloads.size(); ++rank) {
          DecodeJob term;
          term.gradient = dtype;
          term.count = count;
          term.out = sum;
          term.origin = at;
          term.add = rank > 0;
          if (rank == args.self) {
            term.first = static_cast<const std::byte*>(args.gradient.data);
          } else {
            codecs::Sections<const std::byte> parts;
            codecs::bind_payload(spec, dtype, count, args.payloads[rank].data(), &parts);
            term.spec = spec;
            term.entries = entries;
            term.step = step_of(parts.header);
            term.first = parts.first;
            term.second = parts.second;
          }
          loops.decode(term, at, to);
        }
        EncodeJob part = job;
        part.source = sum;
        part.origin = at;
        part.residual = args.residual == nullptr ? nullptr : args.residual + at;
        use(part, at, to, scratch);
      }
    });
  };
  if (needs_greatest(spec) && count > 0) {
    Greatest greatest;
    for_each_sum([&](const EncodeJob& part, size_t begin, size_t end, std::byte*) {
      greatest.take(loops.greatest(part, begin, end));
    });
    put_greatest(spec, greatest, sections, &job);
  }
  std::atomic<uint64_t> non_finite{0};
  for_each_sum([&](const EncodeJob& part, size_t begin, size_t end, std::byte* scratch) {
    non_finite.fetch_add(loops.encode(part, begin, end, scratch), std::memory_order_relaxed);
  });
  if (job.deferred != nullptr) {
    job.residual = args.residual;
    quantize(loops, job, count, args.executor);
  }
  finish_payload(spec, args.gradient, args.seed, non_finite.load(), sections, stats);
  return {};
}

Status fold_residual(const Loops& loops, Vec gradient, float* residual, Executor executor) noexcept {
  if (!widens_to_f32(gradient.dtype)) return StatusCode::unsupported;
  if (!readable(gradient.data, gradient.count, gradient.dtype) || !readable(residual, gradient.count, DType::f32))
    return StatusCode::invalid_argument;
  if (overlap(gradient.data, gradient.count * dtype_bytes(gradient.dtype), residual, gradient.count * sizeof(float)))
    return StatusCode::invalid_argument;
  const FoldJob job{gradient.data, residual, gradient.dtype};
  for_each_task(executor, Split(gradient.count, kGroup, executor.width), gradient.count,
                [&](size_t begin, size_t end, size_t) { loops.fold(job, begin, end); });
  return {};
}

}  // namespace gradgate::kernels::cpu

namespace gradgate {

using kernels::cpu::best_loops;

size_t workspace_bytes(const CodecSpec& spec, DType gradient, size_t count, unsigned width) noexcept {
  if (count == 0 || !codec_takes(spec, gradient)) return 0;
  using namespace kernels::cpu;
  if (spec.id == CodecId::topk) return topk_workspace_bytes(spec, count, width) + kWorkAlign - 1;
  if (spec.id == CodecId::randk) return randk_workspace_bytes(spec, count) + kWorkAlign - 1;
  return Split(count, shard_alignment(spec), width).tasks * task_bytes(spec) + deferred_bytes(spec, count) +
         kWorkAlign - 1;
}

size_t decode_sum_bytes(const CodecSpec& spec, DType gradient, size_t count, size_t ranks, unsigned width) noexcept {
  if (count == 0 || ranks == 0 || !codec_takes(spec, gradient)) return 0;
  using namespace kernels::cpu;
  const SumPlan plan(spec, count, ranks, width);
  return plan.split.tasks * plan.stride + kWorkAlign - 1;
}

Status encode(const CodecSpec& spec, const EncodeArgs& args, EncodeStats* stats) noexcept {
  return kernels::cpu::encode(best_loops(), spec, args, stats);
}
Status decode(const CodecSpec& spec, const DecodeArgs& args) noexcept {
  return kernels::cpu::decode(best_loops(), spec, args);
}
Status decode_sum(const CodecSpec& spec, const DecodeSumArgs& args) noexcept {
  return kernels::cpu::decode_sum(best_loops(), spec, args);
}
Status reduce_encode(const CodecSpec& spec, const ReduceArgs& args, EncodeStats* stats) noexcept {
  return kernels::cpu::reduce_encode(best_loops(), spec, args, stats);
}
Status fold_residual(Vec gradient, float* residual, Executor executor) noexcept {
  return kernels::cpu::fold_residual(best_loops(), gradient, residual, executor);
}

}  // namespace gradgate
