// chunk-topk's part of the plugin.
#pragma once

#include "codecs/codecs.h"
#include "kernels/cuda/chunk_topk_decode.cuh"
#include "kernels/cuda/chunk_topk_encode.cuh"
#include "kernels/cuda/launch.cuh"

namespace gradgate::kernels::cuda {
namespace {

using ChunkTopk = codecs::Codec<CodecId::chunk_topk>;

// Shared memory of a CTA that holds its teams' chunks; spills where the device has less than that.
struct ChunkPlan {
  unsigned threads, teams;
  size_t team_bytes, shared_bytes;
  bool spill;
};

// What a CTA can have, less what kernels have of their own.
inline int most_shared() {
  static const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) - 2048;
  return bytes;
}

inline ChunkPlan chunk_plan(uint32_t chunk) {
  ChunkPlan plan{};
  const unsigned warps = static_cast<unsigned>(team_warps(chunk));
  plan.teams = warps == 1 ? kSmallTeams : 1;
  plan.threads = plan.teams * warps * 32;
  plan.team_bytes = team_bytes(chunk);
  plan.shared_bytes = plan.team_bytes * plan.teams;
  plan.spill = plan.shared_bytes > static_cast<size_t>(most_shared());
  if (plan.spill) plan.shared_bytes = 0;
  return plan;
}

// Where chunks are spilled, few CTAs run: each needs its own room in the workspace.
inline unsigned spill_ctas() {
  static const unsigned count = static_cast<unsigned>(device_attribute(cudaDevAttrMultiProcessorCount)) * 2;
  return count;
}

inline size_t chunk_spill_bytes(const CodecSpec& spec) {
  const ChunkPlan plan = chunk_plan(spec.param1);
  return plan.spill ? ceil_div(plan.team_bytes * spill_ctas(), 256) * 256 : 0;
}

// A verdict, room for spilled chunks, and x of the entries where values are int8.
inline size_t chunk_topk_workspace(const CodecSpec& spec, size_t count) {
  const size_t deferred = spec.value == DType::u8 ? ChunkTopk::entries(spec, count) * sizeof(float) : 0;
  return kVerdictBytes + chunk_spill_bytes(spec) + deferred;
}

// Validates the payloads of a sum or of a decode: *verdict says afterwards whether to go on.
inline int validate_chunks_of(const CodecSpec& spec, const codecs::WireHeader& header, const std::byte* payloads,
                              size_t stride, unsigned ranks, unsigned self, size_t indices_at, size_t count,
                              std::byte* workspace, cudaStream_t stream) {
  ValidateJob job{};
  job.header = header;
  job.payloads = payloads;
  job.stride = stride;
  job.indices_at = indices_at;
  job.ranks = ranks;
  job.self = self;
  job.count = count;
  job.entries = ChunkTopk::entries(spec, count);
  job.c = spec.param0;
  job.chunk = spec.param1;
  job.verdict = reinterpret_cast<uint64_t*>(workspace);
  const cudaError_t cleared = cudaMemsetAsync(job.verdict, 0xff, sizeof(uint64_t), stream);
  if (cleared != cudaSuccess) return cleared;
  const unsigned ctas = grid_for<validate_chunks>(kBlockThreads, 0, ceil_div(job.entries, kBlockThreads * 4) + 1);
  validate_chunks<<<dim3(ctas, ranks), kBlockThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

template <auto kKernel>
int launch_chunks(const ChunkJob& job, const ChunkPlan& plan, size_t ctas, cudaStream_t stream) {
  static const cudaError_t raised =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most_shared());
  if (raised != cudaSuccess) return raised;
  if (plan.spill) {
    kKernel<<<static_cast<unsigned>(ctas < spill_ctas() ? ctas : spill_ctas()), plan.threads, 0, stream>>>(job);
    return cudaGetLastError();
  }
  // As many CTAs as fit at once with this much shared memory, which differs from chunk to chunk.
  static const int processors = device_attribute(cudaDevAttrMultiProcessorCount);
  int per = 1;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per, kKernel, static_cast<int>(plan.threads), plan.shared_bytes);
  const size_t resident = static_cast<size_t>(processors) * (per < 1 ? 1 : per);
  kKernel<<<static_cast<unsigned>(ctas < resident ? ctas : resident), plan.threads, plan.shared_bytes, stream>>>(job);
  return cudaGetLastError();
}

template <int kWarps>
int encode_chunks_as(const ChunkJob& job, const ChunkPlan& plan, size_t ctas, cudaStream_t stream) {
  if (job.ranks > 0) {
    return job.residual != nullptr ? launch_chunks<encode_chunks<true, true, kWarps>>(job, plan, ctas, stream)
                                   : launch_chunks<encode_chunks<false, true, kWarps>>(job, plan, ctas, stream);
  }
  return job.residual != nullptr ? launch_chunks<encode_chunks<true, false, kWarps>>(job, plan, ctas, stream)
                                 : launch_chunks<encode_chunks<false, false, kWarps>>(job, plan, ctas, stream);
}

inline int encode_chunk_topk(const CodecSpec& spec, const EncodeJob& encode, std::byte* workspace,
                             cudaStream_t stream) {
  ChunkJob job{};
  static_cast<EncodeJob&>(job) = encode;
  job.c = spec.param0;
  job.chunk = spec.param1;
  job.k = ChunkTopk::entries(spec, job.count);
  job.value = spec.value;
  job.codes_at = codecs::codes_offset(job.k);
  const ChunkPlan plan = chunk_plan(job.chunk);
  job.unit = unit_of(job.chunk);
  job.unit_entries = job.unit / job.chunk * job.c;
  job.unit_values = job.unit_entries * value_width(job.value);
  job.unit_indices = job.unit_entries * static_cast<uint32_t>(sizeof(uint16_t));
  job.units = ceil_div(job.count, job.unit);
  job.room = static_cast<uint32_t>(plan.team_bytes);
  job.list_at = static_cast<uint32_t>(ChunkRoom::bytes(job.unit));
  if (plan.spill) job.spill = workspace + kVerdictBytes;
  job.entries = job.value == DType::u8 ? workspace + kVerdictBytes + chunk_spill_bytes(spec) : job.first;
  if (job.ranks > 0) {
    const int status = validate_chunks_of(spec, job.header, job.terms, job.stride, job.ranks, job.self,
                                          static_cast<size_t>(job.second - job.payload), job.count, workspace, stream);
    if (status != cudaSuccess) return status;
    job.verdict = reinterpret_cast<uint64_t*>(workspace);
  }
  begin_payload<<<1, 32, 0, stream>>>(job);
  const cudaError_t begun = cudaGetLastError();
  if (begun != cudaSuccess) return begun;
  const size_t ctas = ceil_div(job.units, plan.teams);
  const int warps = team_warps(job.chunk);
  const int status = warps == 1   ? encode_chunks_as<1>(job, plan, ctas, stream)
                     : warps == 4 ? encode_chunks_as<4>(job, plan, ctas, stream)
                                  : encode_chunks_as<8>(job, plan, ctas, stream);
  if (status != cudaSuccess || job.value != DType::u8) return status;
  const size_t runs = ceil_div(job.k, codecs::kScaleRun);
  return job.residual != nullptr
             ? launch<quantize_entries<true>>(job, kBlockThreads, 0, ceil_div(runs, kBlockWarps), stream)
             : launch<quantize_entries<false>>(job, kBlockThreads, 0, ceil_div(runs, kBlockWarps), stream);
}

template <class O>
int decode_chunks(const ChunkDecodeJob& job, bool add, cudaStream_t stream) {
  if (add)
    return launch<add_chunks<O>>(job, kBlockThreads, 0, ceil_div(job.entries, kBlockThreads) + (job.entries == 0),
                                 stream);
  return launch<store_chunks<O>>(job, kTileWarps * 32, 0,
                                 ceil_div(ceil_div(job.count, kTile), kTileWarps) + (job.count == 0), stream);
}

inline int decode_chunk_topk(const DecodeCall& call, const DecodeJob& decode, cudaStream_t stream) {
  ChunkDecodeJob job{};
  static_cast<DecodeJob&>(job) = decode;
  job.c = call.spec.param0;
  job.chunk = call.spec.param1;
  job.entries = ChunkTopk::entries(call.spec, call.count);
  job.value = call.spec.value;
  job.codes_at = codecs::codes_offset(job.entries);
  job.verdict = reinterpret_cast<uint64_t*>(call.workspace);
  const unsigned ranks = call.ranks > 0 ? call.ranks : 1;
  const int status = validate_chunks_of(call.spec, call.header, call.payload, call.stride, ranks, ranks, job.second,
                                        call.count, call.workspace, stream);
  if (status != cudaSuccess) return status;
  if (call.ranks > 0)
    return launch<sum_chunks>(job, kTileWarps * 32, 0, ceil_div(ceil_div(job.count, kTile), kTileWarps), stream);
  return with_type(call.dtype, [&](auto o) { return decode_chunks<decltype(o)>(job, call.add, stream); });
}

}  // namespace
}  // namespace gradgate::kernels::cuda
