// What libgradgate asks of CUDA itself, through libgradgate_cuda: memory, streams, events, and small kernels over
// vectors that no codec is needed for. libgradgate links no CUDA, so this is a table of functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/header.h"
#include "gradgate/types.h"

namespace gradgate::kernels::cuda {

inline constexpr const char* kRuntimeSymbol = "gradgate_cuda_runtime";

using Event = void*;         // cudaEvent_t
using StreamHandle = void*;  // cudaStream_t

/// The first fault of an exchange, in device memory: the word (plugin.h) and the header that arrived.
struct FaultRecord {
  uint64_t word;
  codecs::WireHeader got;
};
static_assert(sizeof(FaultRecord) == 40);

/// Whether the payloads that arrived are the ones that were due.
struct CheckCall {
  codecs::WireHeader header;  ///< of every one of them, with the step
  const uint32_t* step;       ///< where set, takes the place of header.step
  const std::byte* payloads;
  size_t stride;
  unsigned ranks, skip;  ///< skip: a rank that is not looked at, or >= ranks
  unsigned first_rank;   ///< of payloads[0], for the report
  unsigned stage;        ///< for the report
  FaultRecord* fault;
};

/// What is summed by an all_reduce with a codec: a witness (codecs/witness.h), then the values of a payload.
struct SumsCall {
  std::byte* values;  ///< the witness; the payload's head ends where it does
  std::byte* head;    ///< where the head is kept meanwhile
  size_t head_bytes;  ///< at most one per value of the witness
  size_t width;       ///< bytes of a value: 4, f32, or 2, bf16
  unsigned code;      ///< why this rank could not encode, or 0
  FaultRecord* fault;
};

/// The blocks of a node at the end of a hierarchical exchange: 16 bytes of which the first two words are a status code
/// and a step, then a shard of the average in the gradient's dtype.
struct BlocksCall {
  std::byte* blocks;
  size_t stride;
  unsigned ranks, local;   ///< of the node; this rank among them
  unsigned first_rank;     ///< of the node, for the report
  size_t elements, count;  ///< of every shard; of this rank's, which may be shorter
  const float* shard;      ///< this rank's
  DType dtype;             ///< f32, bf16 or f16
  uint32_t step;
  const uint32_t* step_word;  ///< where set, takes the place of step
  unsigned code;              ///< why this rank has no average, or 0: what the record says
  FaultRecord* fault;
};

/// Sums over a vector for the guard (gate/guard.h), accumulated in device memory.
struct GuardSums {
  double gradient, norm1, error1, error2, norm2;
  uint64_t non_finite_in, non_finite_out, hash;
};
struct GuardCall {
  const void* gradient;
  DType dtype;
  const float* residual;
  size_t count, own_first, own_count;  ///< the shard of stage 2
  double ranks;
  bool after;  ///< after the exchange: errors, norms of the sum, hash; before it: norms of x
  GuardSums* sums;
};

/// Functions return a cudaError_t unless said otherwise: 0, or what CUDA said.
struct Runtime {
  uint32_t version;
  const char* (*error_text)(int error) noexcept;
  int (*versions)(int* driver, int* runtime) noexcept;
  int (*set_device)(int device) noexcept;
  int (*device_name)(char* text, size_t size) noexcept;

  int (*allocate)(void** memory, size_t bytes) noexcept;
  int (*release)(void* memory) noexcept;
  int (*allocate_pinned)(void** memory, size_t bytes) noexcept;
  int (*release_pinned)(void* memory) noexcept;
  int (*copy)(void* to, const void* from, size_t bytes, StreamHandle stream) noexcept;  ///< any direction
  int (*fill)(void* memory, int byte, size_t bytes, StreamHandle stream) noexcept;

  int (*create_stream)(StreamHandle* stream) noexcept;  ///< non-blocking, of the highest priority
  int (*destroy_stream)(StreamHandle stream) noexcept;
  int (*create_event)(Event* event) noexcept;
  int (*destroy_event)(Event event) noexcept;
  int (*record)(Event event, StreamHandle stream) noexcept;
  int (*wait_event)(StreamHandle stream, Event event) noexcept;
  int (*query)(Event event, bool* complete) noexcept;
  int (*elapsed)(Event from, Event to, double* seconds) noexcept;

  /// Exchanges: what stands between the codec calls.
  int (*check)(const CheckCall& call, StreamHandle stream) noexcept;
  /// Puts an error payload's header at `payload` where the record holds a fault (`always`: in any case, as `code`).
  int (*mark_failed)(std::byte* payload, const codecs::WireHeader& header, const uint32_t* step,
                     const FaultRecord* fault, unsigned always, StreamHandle stream) noexcept;
  /// Before the sum: keeps the head, writes the witness. After it: the verdict into the record, the head in its place.
  int (*seal_sums)(const SumsCall& call, StreamHandle stream) noexcept;
  int (*open_sums)(const SumsCall& call, StreamHandle stream) noexcept;
  /// f32, bf16 or f16 to f32.
  int (*widen)(const void* from, size_t count, DType dtype, float* to, StreamHandle stream) noexcept;
  /// Writes this rank's word and shard; what a shorter shard leaves of the block is not touched.
  int (*close_block)(const BlocksCall& call, StreamHandle stream) noexcept;
  /// The look at all words, then, without a fault, `total` elements from all shards to `out`.
  int (*open_blocks)(const BlocksCall& call, void* out, size_t total, StreamHandle stream) noexcept;
  /// data[i] · 1/ranks, or data[i] / ranks, rounded once; f32, bf16, f16, f64.
  int (*scale_dense)(void* data, size_t count, DType dtype, int ranks, bool divide, StreamHandle stream) noexcept;
  /// e · ratio, rounded once.
  int (*scale_residual)(float* residual, size_t count, double ratio, StreamHandle stream) noexcept;
  /// Adds the elements that are Inf or NaN to *count_of.
  int (*count_non_finite)(const void* data, size_t count, DType dtype, uint64_t* count_of,
                          StreamHandle stream) noexcept;
  int (*guard)(const GuardCall& call, StreamHandle stream) noexcept;
};
/// The stage of a hierarchical exchange in which blocks are gathered, for its reports.
inline constexpr uint64_t kBlockStage = 3;

/// As kPluginVersion.
inline constexpr uint32_t kRuntimeVersion =
    0x1000000 + static_cast<uint32_t>(sizeof(Runtime) * 0x10000 + sizeof(CheckCall) * 0x100 + sizeof(GuardCall) +
                                      sizeof(SumsCall) + sizeof(BlocksCall));

/// The table, or null where libgradgate_cuda or a device is missing; `why` (optional) then says which.
const Runtime* runtime(Message* why = nullptr) noexcept;

}  // namespace gradgate::kernels::cuda
