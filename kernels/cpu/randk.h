// randk: encoding over a whole vector. One pass forms x, writes the chosen values and keeps what is left; where some x
// is not finite, a second pass over the entries alone spoils those of the strata that hold one.
#pragma once

#include "kernels/cpu/loops.h"

namespace gradgate::kernels::cpu {

/// The randk codec's part of encode(): sections are bound and arguments checked. Returns how many x were not finite.
uint64_t encode_randk(const Loops& loops, const EncodeJob& job, size_t count, const Executor& executor,
                      std::byte* workspace) noexcept;
/// Bytes of its workspace, from an address that is a multiple of 64.
size_t randk_workspace_bytes(const CodecSpec& spec, size_t count) noexcept;

}  // namespace gradgate::kernels::cpu
