// What libgradgate asks of libgradgate_cuda: one exported function that returns this table. Both are built together;
// the version is there for a library left over from another build.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/header.h"
#include "gradgate/device.h"

namespace gradgate::kernels::cuda {

inline constexpr const char* kPluginSymbol = "gradgate_cuda_plugin";

/// A call whose arguments have been checked by the host.
struct EncodeCall {
  CodecSpec spec;
  codecs::WireHeader header;  ///< with seed.step
  const void* gradient;
  float* residual;
  DType dtype;
  size_t count;
  std::byte* payload;
  std::byte* workspace;  ///< 256-byte aligned
  Seed seed;
  const uint32_t* step;
  bool flush;
  uint64_t* non_finite;
  uint32_t* threshold;  ///< topk: the step before's, or null
  // The sum of a two_shot's owner; ranks 0: encode the gradient.
  const std::byte* terms;
  size_t stride;
  unsigned ranks, self;
  uint64_t* fault;
};

struct DecodeCall {
  CodecSpec spec;
  codecs::WireHeader header;  ///< what must arrive; the step is not compared
  const std::byte* payload;
  DType gradient, dtype;  ///< of what was encoded, of out
  void* out;
  size_t count;
  float scale;
  bool add;
  std::byte* workspace;
  uint64_t* fault;
  // The sum of an all_gather: rank r's payload stands at payload + r * stride; ranks 0: decode the one payload.
  size_t stride;
  unsigned ranks;
};

/// The functions return a cudaError_t: 0, or what the launch said.
struct Plugin {
  uint32_t version;
  int (*device_count)(int* count) noexcept;
  const char* (*error_text)(int error) noexcept;
  bool (*has_kernels)(const CodecSpec& spec) noexcept;
  size_t (*workspace_bytes)(const CodecSpec& spec, DType gradient, size_t count) noexcept;
  int (*encode)(const EncodeCall& call, device::Stream stream) noexcept;
  int (*decode)(const DecodeCall& call, device::Stream stream) noexcept;
  /// Reports to the fault word unless every index of the payloads at call.payload + r * stride, r < ranks and r !=
  /// self, is in order; rank r counts as first_rank + r. Nothing to do for codecs without indices. Headers are not
  /// looked at.
  int (*check_indices)(const DecodeCall& call, size_t stride, unsigned ranks, unsigned self, unsigned first_rank,
                       device::Stream stream) noexcept;
  int (*fold)(void* gradient, float* residual, size_t count, DType dtype, device::Stream stream) noexcept;
};

/// Differs where the tables or their arguments do; the number in front counts changes of meaning.
inline constexpr uint32_t kPluginVersion =
    3 * 0x1000000 + static_cast<uint32_t>(sizeof(Plugin) * 0x10000 + sizeof(EncodeCall) * 0x100 + sizeof(DecodeCall));

/// Fault words: bit 63 set, the stage of an exchange in bits 48–55, the rank in bits 16–47, the PayloadFault in bits
/// 8–15 (1: an error payload, whose status code is in bits 0–7; 255: another step). The smallest is the first in rank
/// order. Calls with a fault word do nothing where it is already set.
inline constexpr uint64_t kFaultSet = uint64_t{1} << 63;
inline constexpr unsigned kFaultStageShift = 48;
inline constexpr uint64_t kFaultPeer = 1;
inline constexpr uint64_t kFaultStep = 255;

}  // namespace gradgate::kernels::cuda
