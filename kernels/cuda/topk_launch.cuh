// topk's part of the plugin: what the workspace holds, and the order of the launches.
#pragma once

#include "codecs/codecs.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/topk_collect.cuh"
#include "kernels/cuda/topk_decode.cuh"
#include "kernels/cuda/topk_pack.cuh"
#include "kernels/cuda/topk_search.cuh"

namespace gradgate::kernels::cuda {
namespace {

using VectorTopk = codecs::Codec<CodecId::topk>;

// What the workspace holds. Made twice: to count, and to bind. A decode needs no more than its verdict, at the start.
struct TopkRoom {
  std::byte* base;
  size_t bytes = 0, zero_bytes = 0;  ///< zero_bytes: what must be zero before the first kernel

  TopkRoom(const CodecSpec& spec, size_t count, std::byte* memory, TopkJob* job) : base(memory) {
    const size_t tiles = tiles_of(count), chunks = chunks_of(count);
    job->entries = VectorTopk::entries(spec, count);
    // Half as many again as needed: a threshold from a sample is that good but for the smallest of entries.
    const size_t most = job->entries + job->entries / 2 + 65536;
    job->capacity = most < count ? most : count;
    const size_t dense = count / kSmallSample * kSampleLine;
    job->sample_step = dense < kSampleLine ? kSampleLine : dense < kSampleStep ? dense : kSampleStep;
    take(&job->state, 1);
    take(&job->bins, kCoarseBins);
    static_assert(kLastBins <= kCoarseBins);
    job->sample = reinterpret_cast<uint32_t*>(job->bins);
    job->last_bins = job->sample + kCoarseBins;
    take(&job->near, kNearBins);
    take(&job->last_parts, kLastParts);
    zero_bytes = bytes;
    take(&job->fine, kFineBins);
    take(&job->tile_base, tiles);
    take(&job->tile_ties, tiles);
    take(&job->tile_count, tiles);
    take(&job->tile_greater, tiles);
    take(&job->tile_equal, tiles);
    take(&job->chunk_greater, chunks);
    take(&job->chunk_equal, chunks);
    take(&job->value, job->capacity * sizeof(float));
    take(&job->index, job->capacity);
  }

 private:
  template <class T>
  void take(T** p, size_t n) {
    *p = base == nullptr ? nullptr : reinterpret_cast<T*>(base + bytes);
    bytes += (n * sizeof(T) + 255) / 256 * 256;
  }
};

inline size_t topk_workspace(const CodecSpec& spec, size_t count) {
  TopkJob job{};
  return TopkRoom(spec, count, nullptr, &job).bytes;
}

template <bool kFeedback>
int encode_topk_as(const TopkJob& job, cudaStream_t stream) {
  constexpr unsigned kThreads = kTopkThreads;
  const size_t tiles = tiles_of(job.count), chunks = chunks_of(job.count);
  const size_t sampled = ceil_div(job.count, job.sample_step) * kSampleLine;
  const cudaError_t status = static_cast<cudaError_t>(
      launch<sample_keys<kFeedback>>(job, kThreads, 0, ceil_div(sampled, kThreads * 4), stream));
  if (status != cudaSuccess) return status;
  for (const int each : {launch<collect<kFeedback>>(job, kThreads, 0, tiles, stream),
                         launch<look_first<kFeedback>>(job, kThreads, 0, tiles, stream),
                         launch<look_second<kFeedback>>(job, kThreads, 0, tiles, stream),
                         launch<recollect<kFeedback>>(job, kThreads, 0, tiles, stream),
                         job.type == DType::u8 ? launch<pack_int8<kFeedback>>(job, kThreads, 0, chunks, stream)
                                               : launch<pack<kFeedback>>(job, kThreads, 0, chunks, stream)}) {
    if (each != cudaSuccess) return each;
  }
  return cudaSuccess;
}

inline int encode_topk(const CodecSpec& spec, const EncodeJob& encode, uint32_t* carried, std::byte* workspace,
                       cudaStream_t stream) {
  TopkJob job{};
  static_cast<EncodeJob&>(job) = encode;
  job.carried = carried;
  const TopkRoom room(spec, encode.count, workspace, &job);
  const cudaError_t cleared = cudaMemsetAsync(workspace, 0, room.zero_bytes, stream);
  if (cleared != cudaSuccess) return cleared;
  job.type = spec.value;
  job.codes_at = codecs::codes_offset(job.entries);
  return job.residual == nullptr ? encode_topk_as<false>(job, stream) : encode_topk_as<true>(job, stream);
}

inline int store_topk_of(const TopkDecodeJob& job, bool add, cudaStream_t stream) {
  const size_t pieces = ceil_div(job.count, kPiece);
  if (job.ranks > 0) return launch<store_topk<true>>(job, kTopkThreads, 0, pieces, stream);
  if (add) return launch<add_topk>(job, kTopkThreads, 0, chunks_of(job.count), stream);
  return launch<store_topk<false>>(job, kTopkThreads, 0, pieces, stream);
}

// Validates the payloads of `ranks`, without that of `self`: the verdict, at the start of the workspace, says
// afterwards whether to go on.
inline int validate_topk_payloads(const DecodeCall& call, size_t stride, unsigned ranks, unsigned self,
                                  cudaStream_t stream) {
  codecs::Sections<const std::byte> sections;
  codecs::bind_payload(call.spec, call.gradient, call.count, call.payload, &sections);
  TopkValidateJob job{};
  job.header = call.header;
  job.payloads = call.payload;
  job.stride = stride;
  job.counts_at = static_cast<size_t>(sections.first - call.payload);
  job.indices_at = static_cast<size_t>(sections.third - call.payload);
  job.ranks = ranks;
  job.self = self;
  job.count = call.count;
  job.entries = VectorTopk::entries(call.spec, call.count);
  job.verdict = reinterpret_cast<uint64_t*>(call.workspace);
  const cudaError_t cleared = cudaMemsetAsync(job.verdict, 0xff, sizeof(uint64_t), stream);
  if (cleared != cudaSuccess) return cleared;
  const unsigned ctas = grid_for<validate_topk>(kTopkThreads, 0, chunks_of(call.count));
  validate_topk<<<dim3(ctas, ranks), kTopkThreads, 0, stream>>>(job);
  return cudaGetLastError();
}

inline int decode_topk(const DecodeCall& call, const DecodeJob& decode, size_t third, cudaStream_t stream) {
  TopkDecodeJob job{};
  static_cast<DecodeJob&>(job) = decode;
  job.third = third;
  job.verdict = reinterpret_cast<uint64_t*>(call.workspace);
  const unsigned ranks = call.ranks > 0 ? call.ranks : 1;
  const int checked = validate_topk_payloads(call, call.stride, ranks, ranks, stream);
  if (checked != cudaSuccess) return checked;
  job.value = call.spec.value;
  job.codes_at = codecs::codes_offset(VectorTopk::entries(call.spec, call.count));
  return store_topk_of(job, call.add, stream);
}

}  // namespace
}  // namespace gradgate::kernels::cuda
