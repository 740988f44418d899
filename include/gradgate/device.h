// Codecs on a GPU: the calls of gradgate/codec.h for vectors in device memory. The payload bytes are those of the CPU.
//
// libgradgate links no CUDA: the first call opens libgradgate_cuda, and where there is none, or no device, everything
// here is `unsupported`. Calls take a stream, last; they only enqueue (no host synchronisation, no allocation) and may
// be captured in a CUDA graph. All memory in the arguments is the device's, unless said otherwise.
#pragma once

#include <cstdint>

#include "gradgate/codec.h"

namespace gradgate::device {

/// A cudaStream_t. Null is the legacy default stream.
using Stream = void*;

/// Whether the current CUDA device can be used. `unsupported` where libgradgate_cuda or a device is missing; `why`
/// (optional) then says which, and where the library was looked for.
GRADGATE_API Status available(Message* why = nullptr) noexcept;

/// Whether the codec has kernels and takes gradients of this dtype; the table of docs/cuda.md. False without a device.
GRADGATE_API bool takes(const CodecSpec& spec, DType gradient) noexcept;

/// Scratch bytes for any call below on `count` elements of the current device. Any alignment. 0 where the codec does
/// not take the dtype, or no device is available.
GRADGATE_API size_t workspace_bytes(const CodecSpec& spec, DType gradient, size_t count) noexcept;

struct EncodeArgs {
  ConstVec gradient;          ///< as for the CPU; aligned to its elements, fastest at multiples of 16 bytes
  float* residual = nullptr;  ///< gradient.count elements, updated in place; null: no feedback
  Bytes payload;              ///< at least payload_bytes, 16-byte aligned
  Bytes workspace;            ///< at least workspace_bytes
  Seed seed;
  const uint32_t* step = nullptr;  ///< where set, takes the place of seed.step when the work runs: replays of a graph
  bool flush = false;              ///< all of e takes part (docs/format.md §2, rule 2)
  uint64_t* non_finite = nullptr;  ///< where set, grows by the elements of x that were Inf or NaN
  uint32_t* threshold = nullptr;   ///< a word that is 0 at first and carried from step to step, which saves reading:
                                   ///< topk: as for the CPU; fp16 without feedback: the greatest magnitude
};
/// Encodes gradient (+ residual) into payload. Errors of the arguments are returned at once and nothing is enqueued.
GRADGATE_API Status encode(const CodecSpec& spec, const EncodeArgs& args, Stream stream) noexcept;

struct DecodeArgs {
  ConstBytes payload;           ///< exactly payload_bytes, 16-byte aligned
  DType gradient = DType::f32;  ///< dtype of the gradient that was encoded
  Vec out;
  float scale = 1.0f;
  Into into = Into::store;
  Bytes workspace;
  uint64_t* fault = nullptr;  ///< must be set: keeps the first fault found, until the caller clears it to 0; while it
                              ///< is not 0 the call does nothing
};
/// Checks the payload on the device, then writes (or adds) it. After a fault `out` is untouched and *fault says what it
/// was: read it with fault_status() after the stream has got there.
GRADGATE_API Status decode(const CodecSpec& spec, const DecodeArgs& args, Stream stream) noexcept;

struct DecodeSumArgs {
  const std::byte* payloads = nullptr;  ///< rank r's payload stands at payloads + r * stride; 16-byte aligned
  size_t stride = 0;                    ///< a multiple of 16, at least payload_bytes (ranks 1: not looked at)
  unsigned ranks = 1;
  DType gradient = DType::f32;  ///< dtype of the gradients that were encoded
  Vec out;                      ///< f32, bf16 or f16
  float scale = 1.0f;           ///< multiplies every sum
  Bytes workspace;
  uint64_t* fault = nullptr;  ///< must be set, as for decode
};
/// The last part of an all_gather exchange in one pass over `out`: the sum of all decoded payloads in f32 in rank
/// order, times scale (gradgate::decode_sum). All payloads are checked first; after a fault `out` is untouched.
GRADGATE_API Status decode_sum(const CodecSpec& spec, const DecodeSumArgs& args, Stream stream) noexcept;

struct ReduceArgs {
  const std::byte* payloads = nullptr;  ///< rank r's payload stands at payloads + r * stride; that of `self` is ignored
  size_t stride = 0;                    ///< a multiple of 16, at least payload_bytes
  unsigned ranks = 1, self = 0;
  ConstVec gradient;          ///< this rank's own shard: added exactly, unencoded
  float* residual = nullptr;  ///< this rank's slot for the shard; null: no feedback
  Bytes payload;              ///< receives the encoded sum
  Bytes workspace;
  Seed seed;
  const uint32_t* step = nullptr;
  uint64_t* fault = nullptr;  ///< must be set, as for decode
  uint64_t* non_finite = nullptr;
};
/// The owner's part of two_shot in one pass: sum in f32 in rank order, then encode (gradgate::reduce_encode). All
/// payloads are checked first; after a fault payload and residual are untouched.
GRADGATE_API Status reduce_encode(const CodecSpec& spec, const ReduceArgs& args, Stream stream) noexcept;

/// The dense cast of a flush (gradgate::fold_residual).
GRADGATE_API Status fold_residual(Vec gradient, float* residual, Stream stream) noexcept;

/// What a fault word means, once copied to the host: ok for 0, else bad_payload (detail: PayloadFault) or peer_failed
/// (detail: the peer's status code). `rank` (optional) is set to the first rank at fault, 0 for decode.
GRADGATE_API Status fault_status(uint64_t fault, unsigned* rank = nullptr) noexcept;

}  // namespace gradgate::device
