// randk's part of the plugin.
#pragma once

#include "codecs/codecs.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/randk.cuh"

namespace gradgate::kernels::cuda {
namespace {

using Randk = codecs::Codec<CodecId::randk>;

inline size_t randk_mark_bytes(size_t entries) { return ceil_div(ceil_div(entries, 32) * sizeof(uint32_t), 256) * 256; }
inline size_t randk_workspace(const CodecSpec& spec, size_t count) {
  const size_t entries = Randk::entries(spec, count);
  return randk_mark_bytes(entries) + entries * sizeof(float);
}

inline int encode_randk_call(const CodecSpec& spec, const EncodeJob& encode, std::byte* workspace,
                             cudaStream_t stream) {
  RandkJob job{};
  static_cast<EncodeJob&>(job) = encode;
  job.entries = Randk::entries(spec, job.count);
  job.value = spec.value;
  job.marked = reinterpret_cast<uint32_t*>(workspace);
  job.before = reinterpret_cast<float*>(workspace + randk_mark_bytes(job.entries));
  const cudaError_t cleared = cudaMemsetAsync(job.marked, 0, randk_mark_bytes(job.entries), stream);
  if (cleared != cudaSuccess) return cleared;
  const size_t ctas = ceil_div(ceil_div(job.count, kTile), kTileWarps);
  const int encoded = job.residual != nullptr ? launch<encode_randk<true>>(job, kTileWarps * 32, 0, ctas, stream)
                                              : launch<encode_randk<false>>(job, kTileWarps * 32, 0, ctas, stream);
  if (encoded != cudaSuccess) return encoded;
  return launch<spoil_entries>(job, kBlockThreads, 0, ceil_div(job.entries, kBlockThreads), stream);
}

inline int decode_randk_call(const CodecSpec& spec, const DecodeJob& decode, bool add, cudaStream_t stream) {
  RandkDecodeJob job{};
  static_cast<DecodeJob&>(job) = decode;
  job.entries = Randk::entries(spec, job.count);
  job.value = spec.value;
  const size_t ctas = ceil_div(ceil_div(job.count, kTile), kTileWarps);
  if (job.ranks > 0) return launch<store_randk<true>>(job, kTileWarps * 32, 0, ctas, stream);
  if (add) return launch<add_randk>(job, kBlockThreads, 0, ceil_div(job.entries, kBlockThreads), stream);
  return launch<store_randk<false>>(job, kTileWarps * 32, 0, ctas, stream);
}

}  // namespace
}  // namespace gradgate::kernels::cuda
