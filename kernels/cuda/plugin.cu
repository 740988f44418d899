// libgradgate_cuda: chooses the kernel for a call and launches it. One translation unit, since compile time counts.
#include <cuda_runtime.h>

#include "codecs/codecs.h"
#include "kernels/cuda/blocks.cuh"
#include "kernels/cuda/chunk_topk_launch.cuh"
#include "kernels/cuda/copies.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/plugin.h"
#include "kernels/cuda/randk_launch.cuh"
#include "kernels/cuda/rotated.cuh"
#include "kernels/cuda/scaled.cuh"
#include "kernels/cuda/topk_launch.cuh"

static_assert(__cplusplus >= 202002L, "some versions of CMake leave the language level out without a word");

namespace gradgate::kernels::cuda {
namespace {

using device::Stream;

// The kernel for a call with or without feedback, of a gradient or of a sum. Kernels that encode are started after the
// one that writes the header.
template <auto kPlain, auto kFeedback, auto kSum, auto kSumFeedback>
int launch_encoder(const EncodeJob& job, size_t ctas, cudaStream_t stream) {
  if (job.ranks > 0) {
    return job.residual != nullptr ? launch<kSumFeedback>(job, kBlockThreads, 0, ctas, stream)
                                   : launch<kSum>(job, kBlockThreads, 0, ctas, stream);
  }
  return job.residual != nullptr ? launch<kFeedback>(job, kBlockThreads, 0, ctas, stream)
                                 : launch<kPlain>(job, kBlockThreads, 0, ctas, stream);
}

template <class Block>
int encode_groups(const EncodeJob& job, cudaStream_t stream) {
  return launch_encoder<encode_blocks<Block, false, false>, encode_blocks<Block, true, false>,
                        encode_blocks<Block, false, true>, encode_blocks<Block, true, true>>(
      job, ceil_div(groups_of(job.count), size_t{kBlockWarps} * Block::kGroups), stream);
}

template <class F>
using BlocksOf = std::conditional_t<F::kRotated, RotatedBlocks<F>, ScaledBlock<F>>;

// A codec that describes its blocks by formats.
template <class C>
int encode_scaled(const CodecSpec& spec, const EncodeJob& job, cudaStream_t stream) {
  return C::with_format(spec, [&](auto format) {
    using F = decltype(format);
    if constexpr (F::kMean) {
      return launch_encoder<encode_means<F, false, false>, encode_means<F, true, false>, encode_means<F, false, true>,
                            encode_means<F, true, true>>(job, ceil_div(ceil_div(job.count, F::kBlock), kBlockWarps),
                                                         stream);
    } else {
      return encode_groups<BlocksOf<F>>(job, stream);
    }
  });
}

// `carried`: null, or the greatest magnitude of the step before. With feedback it is no help: the residual would have
// been written by a scale that may not hold.
int encode_fp16(const EncodeJob& job, uint32_t* carried, cudaStream_t stream) {
  const cudaError_t cleared = cudaMemsetAsync(job.greatest, 0, sizeof(uint32_t), stream);
  if (cleared != cudaSuccess) return cleared;
  if (carried != nullptr && job.residual == nullptr && job.ranks == 0) {
    const size_t ctas = ceil_div(groups_of(job.count), kBlockWarps);
    encode_guessed<false>
        <<<grid_for<encode_guessed<false>>(kBlockThreads, 0, ctas), kBlockThreads, 0, stream>>>(job, carried);
    encode_guessed<true>
        <<<grid_for<encode_guessed<true>>(kBlockThreads, 0, ctas), kBlockThreads, 0, stream>>>(job, carried);
    const cudaError_t status = cudaGetLastError();
    if (status != cudaSuccess) return status;
    return cudaMemcpyAsync(carried, job.greatest, sizeof(uint32_t), cudaMemcpyDeviceToDevice, stream);
  }
  const int found = launch_encoder<find_greatest<Fp16Block, false, false>, find_greatest<Fp16Block, true, false>,
                                   find_greatest<Fp16Block, false, true>, find_greatest<Fp16Block, true, true>>(
      job, ceil_div(groups_of(job.count), kBlockWarps), stream);
  return found != cudaSuccess ? found : encode_groups<Fp16Block>(job, stream);
}

int encode_none(const EncodeJob& job, cudaStream_t stream) {
  if (job.ranks > 0) {
    return launch<encode_blocks<NoneBlock, false, true>>(job, kBlockThreads, 0,
                                                         ceil_div(groups_of(job.count), kBlockWarps), stream);
  }
  const size_t ctas = ceil_div(job.count * dtype_bytes(job.dtype), size_t{kBlockThreads} * 16);
  switch (job.dtype) {
    case DType::f32:
      return launch<copy_counting<uint32_t, 0x7f800000u>>(job, kBlockThreads, 0, ctas, stream);
    case DType::bf16:
      return launch<copy_counting<uint16_t, 0x7f80u>>(job, kBlockThreads, 0, ctas, stream);
    case DType::f16:
      return launch<copy_counting<uint16_t, 0x7c00u>>(job, kBlockThreads, 0, ctas, stream);
    default:
      return launch<copy_counting<uint64_t, 0x7ff0000000000000ull>>(job, kBlockThreads, 0, ctas, stream);
  }
}

size_t workspace_of(const CodecSpec& spec, DType, size_t count) noexcept {
  if (count == 0) return 0;
  if (spec.id == CodecId::fp16) return kVerdictBytes;  // of which the greatest element takes four
  if (spec.id == CodecId::topk) return topk_workspace(spec, count);
  if (spec.id == CodecId::randk) return randk_workspace(spec, count);
  return spec.id == CodecId::chunk_topk ? chunk_topk_workspace(spec, count) : 0;
}

int encode_call(const EncodeCall& call, Stream handle) noexcept {
  const cudaStream_t stream = stream_of(handle);
  codecs::Sections<std::byte> sections;
  codecs::bind_payload(call.spec, call.dtype, call.count, call.payload, &sections);
  EncodeJob job{};
  job.header = call.header;
  job.gradient = call.gradient;
  job.dtype = call.dtype;
  job.residual = call.residual;
  job.count = call.count;
  job.payload = call.payload;
  job.first = sections.first;
  job.second = sections.second == nullptr ? sections.first : sections.second;
  job.third = sections.third;
  job.first_end = job.first + sections.first_bytes;
  job.second_end = job.second + sections.second_bytes;
  job.first_pad = padding(sections.first_bytes);
  job.second_pad = padding(sections.second_bytes);
  job.third_pad = padding(sections.third_bytes);
  job.third_end = job.third + sections.third_bytes;
  job.seed = call.seed;
  job.step = call.step;
  job.non_finite = call.non_finite;
  job.flush = call.flush;
  job.terms = call.terms;
  job.stride = call.stride;
  job.ranks = call.ranks;
  job.self = call.self;
  job.fault = call.fault;
  job.empty = codecs::Fp16Scale::of(0).stored;
  if (call.spec.id == CodecId::fp16) job.greatest = reinterpret_cast<uint32_t*>(call.workspace);
  if (call.spec.id == CodecId::topk && call.count > 0)
    return encode_topk(call.spec, job, call.threshold, call.workspace, stream);
  if (call.spec.id == CodecId::chunk_topk && call.count > 0)
    return encode_chunk_topk(call.spec, job, call.workspace, stream);
  begin_payload<<<1, 32, 0, stream>>>(job);
  const cudaError_t begun = cudaGetLastError();
  if (begun != cudaSuccess || call.count == 0) return begun;
  switch (call.spec.id) {
    case CodecId::none:
      return encode_none(job, stream);
    case CodecId::bf16:
      return encode_groups<CastBlock>(job, stream);
    case CodecId::fp16:
      return encode_fp16(job, call.threshold, stream);
    case CodecId::int8:
      return encode_scaled<codecs::Codec<CodecId::int8>>(call.spec, job, stream);
    case CodecId::fp8:
      return encode_scaled<codecs::Codec<CodecId::fp8>>(call.spec, job, stream);
    case CodecId::int4:
      return encode_scaled<codecs::Codec<CodecId::int4>>(call.spec, job, stream);
    case CodecId::onebit:
      return encode_scaled<codecs::Codec<CodecId::onebit>>(call.spec, job, stream);
    case CodecId::randk:
      return encode_randk_call(call.spec, job, call.workspace, stream);
    default:
      return cudaErrorNotSupported;
  }
}

template <class Block>
int decode_groups(const DecodeJob& job, bool add, cudaStream_t stream) {
  const size_t ctas = ceil_div(groups_of(job.count), size_t{kBlockWarps} * Block::kGroups) +
                      (job.count == 0);  // an empty one is checked too
  if (job.ranks > 0) return launch<sum_blocks<Block>>(job, kBlockThreads, 0, ctas, stream);
  return add ? launch<decode_blocks<Block, true>>(job, kBlockThreads, 0, ctas, stream)
             : launch<decode_blocks<Block, false>>(job, kBlockThreads, 0, ctas, stream);
}

template <class C>
int decode_scaled(const CodecSpec& spec, const DecodeJob& job, bool add, cudaStream_t stream) {
  return C::with_format(spec, [&](auto format) { return decode_groups<BlocksOf<decltype(format)>>(job, add, stream); });
}

int decode_none(const DecodeJob& job, bool add, cudaStream_t stream) {
  if (job.scale != 1.0f || add || job.ranks > 0) return decode_groups<NoneBlock>(job, add, stream);
  const size_t ctas = ceil_div(job.count * dtype_bytes(job.dtype), size_t{kBlockThreads} * 16) + (job.count == 0);
  switch (dtype_bytes(job.dtype)) {
    case 4:
      return launch<copy_none<uint32_t>>(job, kBlockThreads, 0, ctas, stream);
    case 2:
      return launch<copy_none<uint16_t>>(job, kBlockThreads, 0, ctas, stream);
    default:
      return launch<copy_none<uint64_t>>(job, kBlockThreads, 0, ctas, stream);
  }
}

int decode_call(const DecodeCall& call, Stream handle) noexcept {
  const cudaStream_t stream = stream_of(handle);
  codecs::Sections<const std::byte> sections;
  codecs::bind_payload(call.spec, call.gradient, call.count, call.payload, &sections);
  DecodeJob job{};
  job.header = call.header;
  job.payload = call.payload;
  job.first = static_cast<size_t>(sections.first - call.payload);
  job.second = sections.second == nullptr ? job.first : static_cast<size_t>(sections.second - call.payload);
  job.gradient = call.gradient;
  job.dtype = call.dtype;
  job.out = call.out;
  job.count = call.count;
  job.scale = call.scale;
  job.fault = call.fault;
  job.stride = call.stride;
  job.ranks = call.ranks;
  switch (call.spec.id) {
    case CodecId::none:
      return decode_none(job, call.add, stream);
    case CodecId::bf16:
      return decode_groups<CastBlock>(job, call.add, stream);
    case CodecId::fp16:
      return decode_groups<Fp16Block>(job, call.add, stream);
    case CodecId::int8:
      return decode_scaled<codecs::Codec<CodecId::int8>>(call.spec, job, call.add, stream);
    case CodecId::fp8:
      return decode_scaled<codecs::Codec<CodecId::fp8>>(call.spec, job, call.add, stream);
    case CodecId::int4:
      return decode_scaled<codecs::Codec<CodecId::int4>>(call.spec, job, call.add, stream);
    case CodecId::onebit:
      return decode_scaled<codecs::Codec<CodecId::onebit>>(call.spec, job, call.add, stream);
    case CodecId::randk:
      if (call.count == 0) return decode_groups<CastBlock>(job, false, stream);  // a header, and nothing else
      return decode_randk_call(call.spec, job, call.add, stream);
    case CodecId::topk:
      if (call.count == 0) return decode_groups<CastBlock>(job, false, stream);  // a header, and nothing else
      return decode_topk(call, job, static_cast<size_t>(sections.third - call.payload), stream);
    case CodecId::chunk_topk:
      if (call.count == 0) return decode_groups<CastBlock>(job, false, stream);  // a header, and nothing else
      return decode_chunk_topk(call, job, stream);
    default:
      return cudaErrorNotSupported;
  }
}

int fold_call(void* gradient, float* residual, size_t count, DType dtype, Stream handle) noexcept {
  const size_t ctas = ceil_div(groups_of(count), kBlockWarps);
  if (ctas == 0) return cudaSuccess;
  fold_groups<<<grid_for<fold_groups>(kBlockThreads, 0, ctas), kBlockThreads, 0, stream_of(handle)>>>(gradient, dtype,
                                                                                                      residual, count);
  return cudaGetLastError();
}

bool has_kernels(const CodecSpec& spec) noexcept {
  switch (spec.id) {
    case CodecId::none:
    case CodecId::bf16:
    case CodecId::fp16:
    case CodecId::int8:
    case CodecId::fp8:
    case CodecId::int4:
    case CodecId::onebit:
      return true;
    case CodecId::chunk_topk:
    case CodecId::topk:
    case CodecId::randk:
      return true;
    default:
      return false;
  }
}

// The verdict of a validation, kept unless a fault was there before.
__global__ void keep_verdict(const uint64_t* verdict, unsigned first_rank, uint64_t* fault) {
  if (*verdict != ~0ull) report(fault, *verdict + (static_cast<uint64_t>(first_rank) << 16));
}

int check_indices_call(const DecodeCall& call, size_t stride, unsigned ranks, unsigned self, unsigned first_rank,
                       Stream handle) noexcept {
  const bool chunked = call.spec.id == CodecId::chunk_topk;
  if ((!chunked && call.spec.id != CodecId::topk) || call.count == 0 || ranks == 0) return cudaSuccess;
  const cudaStream_t stream = stream_of(handle);
  codecs::Sections<const std::byte> sections;
  codecs::bind_payload(call.spec, call.gradient, call.count, call.payload, &sections);
  const int status =
      chunked ? validate_chunks_of(call.spec, call.header, call.payload, stride, ranks, self,
                                   static_cast<size_t>(sections.second - call.payload), call.count, call.workspace,
                                   stream)
              : validate_topk_payloads(call, stride, ranks, self, stream);
  if (status != cudaSuccess) return status;
  keep_verdict<<<1, 1, 0, stream>>>(reinterpret_cast<const uint64_t*>(call.workspace), first_rank, call.fault);
  return cudaGetLastError();
}

int device_count(int* count) noexcept {
  const cudaError_t error = cudaGetDeviceCount(count);
  if (error != cudaSuccess) cudaGetLastError();  // not for the next call to find
  return error;
}
const char* error_text(int error) noexcept { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

constexpr Plugin kPlugin{kPluginVersion, device_count, error_text,         has_kernels, workspace_of,
                         encode_call,    decode_call,  check_indices_call, fold_call};

}  // namespace
}  // namespace gradgate::kernels::cuda

extern "C" __attribute__((visibility("default"))) const gradgate::kernels::cuda::Plugin* gradgate_cuda_plugin() {
  return &gradgate::kernels::cuda::kPlugin;
}
