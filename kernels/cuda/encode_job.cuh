// What kernels that encode take, and what all kernels do with a payload's frame and with faults.
#pragma once

#include "codecs/header.h"
#include "kernels/cuda/group.cuh"

namespace gradgate::kernels::cuda {
namespace {

/// What non-finite x leave behind: a flag in the payload's header, and the caller's count.
__device__ inline void add_non_finite(uint32_t count, std::byte* payload, uint64_t* counter) {
  atomicOr(reinterpret_cast<unsigned*>(payload + 4), static_cast<unsigned>(codecs::kFlagNonFinite) << 24);
  if (counter != nullptr)
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), static_cast<unsigned long long>(count));
}

/// A group with a non-finite x: counted, and noted in the payload's header.
__device__ __forceinline__ void note_non_finite(const float* x, std::byte* payload, uint64_t* counter) {
  uint32_t odd = 0;
#pragma unroll
  for (unsigned j = 0; j < kPerLane; ++j) odd += !exact::is_finite(x[j]);
  odd = warp_sum(odd);
  if (lane_id() == 0) add_non_finite(odd, payload, counter);
}

/// The fault of one header as a fault word, 0 for none.
__device__ inline uint64_t header_fault(const std::byte* payload, const codecs::WireHeader& expected, unsigned rank) {
  codecs::WireHeader got;
  const uint4* from = reinterpret_cast<const uint4*>(payload);
  reinterpret_cast<uint4*>(&got)[0] = from[0];
  reinterpret_cast<uint4*>(&got)[1] = from[1];
  const PayloadFault fault = codecs::check_header(got, expected);
  const uint64_t place = kFaultSet | static_cast<uint64_t>(rank) << 16;
  if (fault != PayloadFault::none) return place | static_cast<uint64_t>(fault) << 8;
  if ((got.flags & codecs::kFlagError) != 0) return place | kFaultPeer << 8 | got.flags >> 4;
  return 0;
}

/// Keeps the first fault that a caller has not yet cleared.
__device__ inline void report(uint64_t* word, uint64_t fault) {
  atomicCAS(reinterpret_cast<unsigned long long*>(word), 0ull, static_cast<unsigned long long>(fault));
}

/// Every CTA looks at the headers itself: 32 bytes a rank are cheaper than a launch. True: none is at fault, and no
/// fault was there before. All threads of the CTA must come here.
__device__ inline bool headers_ok(const std::byte* payloads, size_t stride, unsigned ranks, unsigned skip,
                                  const codecs::WireHeader& expected, uint64_t* word) {
  __shared__ unsigned long long first;
  // One thread looks at the word: another CTA may be setting it.
  if (threadIdx.x == 0) first = *word == 0 ? ~0ull : *word;
  __syncthreads();
  for (unsigned rank = threadIdx.x; rank < ranks; rank += blockDim.x) {
    if (rank == skip) continue;
    const uint64_t fault = header_fault(payloads + rank * stride, expected, rank);
    if (fault != 0) atomicMin(&first, static_cast<unsigned long long>(fault));
  }
  __syncthreads();
  if (first == ~0ull) return true;
  if (threadIdx.x == 0 && blockIdx.x == 0) report(word, first);
  return false;
}

/// Validation of one payload into a verdict (~0 before), which becomes the first fault in rank order.
struct Verdict {
  uint64_t* first;
  unsigned rank;

  __device__ __forceinline__ void keep(uint64_t fault) const {
    atomicMin(reinterpret_cast<unsigned long long*>(first), static_cast<unsigned long long>(fault));
  }
  /// By one thread of the CTAs of a payload.
  __device__ __forceinline__ void header(const std::byte* payload, const codecs::WireHeader& due) const {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    const uint64_t fault = header_fault(payload, due, rank);
    if (fault != 0) keep(fault);
  }
  /// All threads of the CTA must come here.
  __device__ __forceinline__ void indices(bool wrong) const {
    if (__syncthreads_or(wrong) && threadIdx.x == 0)
      keep(kFaultSet | static_cast<uint64_t>(rank) << 16 | static_cast<uint64_t>(PayloadFault::index) << 8);
  }
};

/// Whether the kernel that validated the payloads found nothing, and no fault was there before; else its verdict is
/// kept.
__device__ inline bool no_fault(const uint64_t* verdict, uint64_t* word) {
  const uint64_t found = *verdict;
  if (found == ~0ull) return *word == 0;  // then nobody sets it while this kernel runs
  if (threadIdx.x == 0 && blockIdx.x == 0) report(word, found);
  return false;
}

/// What all encoders take. Sections are those of the whole payload.
struct EncodeJob {
  codecs::WireHeader header;
  const void* gradient;
  DType dtype;
  float* residual;
  size_t count;
  std::byte* payload;
  std::byte *first, *second, *third;
  std::byte *first_end, *second_end, *third_end;  ///< where their padding starts
  unsigned first_pad, second_pad, third_pad;      ///< its bytes
  Seed seed;
  const uint32_t* step;  ///< where set, takes the place of seed.step
  uint64_t* non_finite;
  bool flush;
  uint32_t empty;      ///< what section 0 holds for no elements, where it holds anything
  uint32_t* greatest;  ///< the greatest finite mag(x) of the vector, for codecs that need it first
  // A sum (ranks > 0): rank r's payload stands at terms + r * stride, and its sections as far into it as ours.
  const std::byte* terms;
  size_t stride;
  unsigned ranks, self;
  const uint64_t* verdict;  ///< null, or ~0 where a kernel before this one found no fault
  uint64_t* fault;
};

/// The seed of a call, with the step that holds when it runs.
__device__ __forceinline__ Seed seed_of(const EncodeJob& job) {
  Seed seed = job.seed;
  if (job.step != nullptr) seed.step = *job.step;
  return seed;
}

/// Whether a sum may go ahead; always for a plain encode. All threads of the CTA must come here.
__device__ inline bool may_encode(const EncodeJob& job) {
  if (job.ranks == 0) return true;
  if (job.verdict != nullptr) return no_fault(job.verdict, job.fault);
  return headers_ok(job.terms, job.stride, job.ranks, job.self, job.header, job.fault);
}

/// Header and padding of a payload. By the first warp of a CTA, before anything that may set the header's flag.
__device__ inline void write_frame(EncodeJob& job) {
  const unsigned i = threadIdx.x;
  if (i == 0) {
    if (job.step != nullptr) job.header.step = *job.step;  // outside the header's check: it changes from step to step
    reinterpret_cast<uint4*>(job.payload)[0] = reinterpret_cast<const uint4*>(&job.header)[0];
    reinterpret_cast<uint4*>(job.payload)[1] = reinterpret_cast<const uint4*>(&job.header)[1];
  }
  if (i == 0 && job.count == 0 && job.first != job.first_end) *reinterpret_cast<uint32_t*>(job.first) = job.empty;
  if (i < job.first_pad) job.first_end[i] = std::byte{0};
  if (i < job.second_pad) job.second_end[i] = std::byte{0};
  if (i < job.third_pad) job.third_end[i] = std::byte{0};
}
__global__ void begin_payload(EncodeJob job) {
  if (may_encode(job)) write_frame(job);
}

}  // namespace
}  // namespace gradgate::kernels::cuda
