// libgradgate_cuda, opened at the first use, and what it offers. Everything is null without it or without a device.
#pragma once

#include "gradgate/device.h"
#include "kernels/cuda/plugin.h"
#include "kernels/cuda/runtime.h"

namespace gradgate::kernels::cuda {

/// The codecs' table; `why` (optional) says what is missing.
const Plugin* plugin(Message* why = nullptr) noexcept;

}  // namespace gradgate::kernels::cuda

namespace gradgate::device {

/// Checks the indices of several payloads of one size at once, before the first of them is decoded
/// (Plugin::check_indices).
Status check_indices(const CodecSpec& spec, DType gradient, size_t count, const std::byte* payloads, size_t stride,
                     unsigned ranks, unsigned self, unsigned first_rank, Bytes workspace, uint64_t* fault,
                     Stream stream) noexcept;

}  // namespace gradgate::device
