// The kernels that stand between the codec calls and the collectives of an exchange: looks at what arrived, error
// payloads, the witness of an all_reduce, the blocks of a hierarchical exchange.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "codecs/bf16.h"
#include "codecs/f16.h"
#include "codecs/witness.h"
#include "kernels/cuda/plugin.h"
#include "kernels/cuda/runtime.h"

namespace gradgate::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;

cudaStream_t stream_of(StreamHandle stream) { return static_cast<cudaStream_t>(stream); }

// CTAs for one thread per element, as many as fill the device a few times.
unsigned grid(size_t count) {
  const size_t ctas = count / kThreads + (count % kThreads != 0);
  return static_cast<unsigned>(ctas < 4096 ? ctas : 4096);
}

__device__ inline size_t first_element() { return size_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline size_t element_step() { return size_t{gridDim.x} * blockDim.x; }

// One IEEE rounding to nearest even that may overflow to Inf, as the dense reduction of every backend has it; the
// codecs saturate instead.
__device__ inline uint16_t to_bf16(float x) {
  const uint32_t b = __float_as_uint(x);
  return static_cast<uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (b + 0x7fffu + (b >> 16 & 1u)) >> 16);
}
__device__ inline uint16_t to_f16(float x) {
  const uint32_t b = __float_as_uint(x);
  if ((b & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((b >> 16 & 0x8000u) | 0x7e00u);
  return __half_as_ushort(__float2half_rn(x));
}

// ---- payload headers
// -------------------------------------------------------------------------------------------------

// One CTA looks at what every rank sent. what(rank): its fault, as in the record below the rank, or 0. The first in
// rank order goes into the record, unless there is one; keep(rank) then adds what it was seen in.
template <class What, class Keep>
__device__ void record_first_fault(FaultRecord* fault, uint64_t stage, unsigned ranks, unsigned first_rank,
                                   const What& what, const Keep& keep) {
  __shared__ unsigned long long first;
  if (threadIdx.x == 0) first = ~0ull;
  __syncthreads();
  for (unsigned rank = threadIdx.x; rank < ranks; rank += blockDim.x) {
    const uint64_t found = what(rank);
    if (found == 0) continue;
    const uint64_t place = stage << kFaultStageShift | static_cast<uint64_t>(rank + first_rank) << 16;
    atomicMin(&first, static_cast<unsigned long long>(kFaultSet | place | found));
  }
  __syncthreads();
  if (threadIdx.x != 0 || first == ~0ull || fault->word != 0) return;
  fault->word = first;
  keep(static_cast<unsigned>(first >> 16 & 0xffffffffu) - first_rank);
}

__global__ void check_headers(CheckCall call) {
  codecs::WireHeader due = call.header;
  if (call.step != nullptr) due.step = *call.step;
  const auto header_of = [&](unsigned rank) {
    return *reinterpret_cast<const codecs::WireHeader*>(call.payloads + rank * call.stride);
  };
  const auto what = [&](unsigned rank) -> uint64_t {
    if (rank == call.skip) return 0;
    const codecs::WireHeader got = header_of(rank);
    const uint64_t fault = static_cast<uint64_t>(codecs::check_header(got, due)) << 8;
    if (fault != 0) return fault;
    // The step before the error: a rank that is elsewhere is at fault, whatever it reports from there.
    if (got.step != due.step) return kFaultStep << 8;
    return (got.flags & codecs::kFlagError) != 0 ? kFaultPeer << 8 | got.flags >> 4 : 0;
  };
  record_first_fault(call.fault, call.stage, call.ranks, call.first_rank, what,
                     [&](unsigned rank) { call.fault->got = header_of(rank); });
}

// What this rank tells its peers of the fault in its record: 0 without one.
__device__ inline unsigned code_of(const FaultRecord& fault) {
  if (fault.word == 0) return 0;
  const unsigned what = static_cast<unsigned>(fault.word >> 8 & 0xff),
                 theirs = static_cast<unsigned>(fault.word & 0xff);
  constexpr auto kMismatch = static_cast<unsigned>(StatusCode::peer_mismatch);
  if (what == kFaultStep ||
      (what >= static_cast<unsigned>(PayloadFault::version) && what <= static_cast<unsigned>(PayloadFault::parameter)))
    return kMismatch;
  if (what != kFaultPeer) return static_cast<unsigned>(StatusCode::bad_payload);
  return theirs == kMismatch ? kMismatch : static_cast<unsigned>(StatusCode::peer_failed);
}

__global__ void write_error_header(std::byte* payload, codecs::WireHeader header, const uint32_t* step,
                                   const FaultRecord* fault, unsigned always) {
  const unsigned code = always != 0 ? always : code_of(*fault);
  if (code == 0) return;
  if (step != nullptr) header.step = *step;
  header.flags = static_cast<uint8_t>(codecs::kFlagError | code << 4);
  *reinterpret_cast<codecs::WireHeader*>(payload) = header;
}

int check(const CheckCall& call, StreamHandle stream) noexcept {
  if (call.ranks == 0) return cudaSuccess;
  check_headers<<<1, 128, 0, stream_of(stream)>>>(call);
  return cudaGetLastError();
}

int mark_failed(std::byte* payload, const codecs::WireHeader& header, const uint32_t* step, const FaultRecord* fault,
                unsigned always, StreamHandle stream) noexcept {
  write_error_header<<<1, 1, 0, stream_of(stream)>>>(payload, header, step, fault, always);
  return cudaGetLastError();
}

// ---- sums of payloads: codecs/witness.h, one thread per value
// -------------------------------------------------------------------------------------------------

constexpr unsigned kWitnessThreads = codecs::kWitnessValues;

// The head of the payload ends where its values begin, and so does the witness.
__device__ inline std::byte* payload_of(const SumsCall& call) {
  return call.values + kWitnessThreads * call.width - call.head_bytes;
}

__global__ void write_witness(SumsCall call) {
  const unsigned i = threadIdx.x;
  const uint64_t witness = codecs::witness_of(codecs::agreement_hash(payload_of(call), call.head_bytes), call.code);
  if (i < call.head_bytes) call.head[i] = payload_of(call)[i];
  __syncthreads();
  codecs::put_witness_value(call.values, i, (witness >> i & 1u) != 0, call.width);
}

__global__ void read_witness(SumsCall call) {
  __shared__ uint32_t seen[kWitnessThreads / 32];
  const unsigned i = threadIdx.x;
  const uint32_t of_warp = __ballot_sync(0xffffffffu, codecs::any_witness_value(call.values, i, call.width));
  if (i % 32 == 0) seen[i / 32] = of_warp;
  __syncthreads();
  if (i < call.head_bytes) payload_of(call)[i] = call.head[i];
  if (i != 0 || call.fault->word != 0) return;
  const auto verdict = codecs::WitnessVerdict::of(uint64_t{seen[1]} << 32 | seen[0]);
  if (verdict.code != 0) {
    call.fault->word = kFaultSet | kFaultPeer << 8 | verdict.code;
  } else if (verdict.differ) {
    call.fault->word = kFaultSet | kFaultStep << 8;
  }
}

int seal_sums(const SumsCall& call, StreamHandle stream) noexcept {
  write_witness<<<1, kWitnessThreads, 0, stream_of(stream)>>>(call);
  return cudaGetLastError();
}
int open_sums(const SumsCall& call, StreamHandle stream) noexcept {
  read_witness<<<1, kWitnessThreads, 0, stream_of(stream)>>>(call);
  return cudaGetLastError();
}

// ---- blocks of a node: a word (status code, step), then a shard of the average
// -------------------------------------------------------------------------------------------------

__device__ inline float widened(const float* from, size_t i, DType) { return from[i]; }
__device__ inline float widened(const uint16_t* from, size_t i, DType dtype) {
  return dtype == DType::bf16 ? codecs::widen_bf16(from[i]) : codecs::widen_f16(from[i]);
}
__device__ inline void narrow(float x, float* to, DType) { *to = x; }
__device__ inline void narrow(float x, uint16_t* to, DType dtype) {
  *to = dtype == DType::bf16 ? to_bf16(x) : to_f16(x);
}

template <class Element>
__global__ void widen_vector(const Element* from, size_t count, DType dtype, float* to) {
  for (size_t i = first_element(); i < count; i += element_step()) to[i] = widened(from, i, dtype);
}

__device__ inline uint32_t step_of(const BlocksCall& call) {
  return call.step_word != nullptr ? *call.step_word : call.step;
}

template <class Element>
__global__ void write_block(BlocksCall call) {
  std::byte* const block = call.blocks + call.local * call.stride;
  if (blockIdx.x == 0 && threadIdx.x == 0)
    *reinterpret_cast<uint4*>(block) = {call.code != 0 ? call.code : code_of(*call.fault), step_of(call), 0, 0};
  auto* const values = reinterpret_cast<Element*>(block + sizeof(uint4));
  for (size_t i = first_element(); i < call.count; i += element_step()) narrow(call.shard[i], values + i, call.dtype);
}

// Of a faulty word the record keeps the step.
__global__ void check_words(BlocksCall call) {
  const auto word_of = [&](unsigned rank) { return *reinterpret_cast<const uint4*>(call.blocks + rank * call.stride); };
  const auto what = [&](unsigned rank) -> uint64_t {
    const uint4 word = word_of(rank);
    if (word.x != 0) return kFaultPeer << 8 | (word.x & 0xffu);
    return word.y != step_of(call) ? kFaultStep << 8 : 0;
  };
  record_first_fault(call.fault, kBlockStage, call.ranks, call.first_rank, what, [&](unsigned rank) {
    call.fault->got = {};
    call.fault->got.step = word_of(rank).y;
  });
}

// A row of CTAs per block.
template <class Element>
__global__ void read_blocks(BlocksCall call, size_t total, Element* out) {
  if (call.fault->word != 0) return;
  const size_t begin = blockIdx.y * call.elements, end = begin + call.elements < total ? begin + call.elements : total;
  const auto* values = reinterpret_cast<const Element*>(call.blocks + blockIdx.y * call.stride + sizeof(uint4));
  for (size_t i = first_element(); begin + i < end; i += element_step()) out[begin + i] = values[i];
}

int widen(const void* from, size_t count, DType dtype, float* to, StreamHandle stream) noexcept {
  if (count == 0) return cudaSuccess;
  if (dtype == DType::f32) {
    widen_vector<<<grid(count), kThreads, 0, stream_of(stream)>>>(static_cast<const float*>(from), count, dtype, to);
  } else {
    widen_vector<<<grid(count), kThreads, 0, stream_of(stream)>>>(static_cast<const uint16_t*>(from), count, dtype, to);
  }
  return cudaGetLastError();
}

int close_block(const BlocksCall& call, StreamHandle stream) noexcept {
  const unsigned ctas = call.count == 0 ? 1 : grid(call.count);
  if (call.dtype == DType::f32) {
    write_block<float><<<ctas, kThreads, 0, stream_of(stream)>>>(call);
  } else {
    write_block<uint16_t><<<ctas, kThreads, 0, stream_of(stream)>>>(call);
  }
  return cudaGetLastError();
}

int open_blocks(const BlocksCall& call, void* out, size_t total, StreamHandle stream) noexcept {
  check_words<<<1, 128, 0, stream_of(stream)>>>(call);
  const dim3 ctas(grid(call.elements), call.ranks);
  if (total > 0 && call.dtype == DType::f32) {
    read_blocks<<<ctas, kThreads, 0, stream_of(stream)>>>(call, total, static_cast<float*>(out));
  } else if (total > 0) {
    read_blocks<<<ctas, kThreads, 0, stream_of(stream)>>>(call, total, static_cast<uint16_t*>(out));
  }
  return cudaGetLastError();
}

}  // namespace
}  // namespace gradgate::kernels::cuda
