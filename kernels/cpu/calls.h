// encode, decode, reduce_encode and fold_residual over a chosen table of loops. The public functions use the best one;
// tests run all.
#pragma once

#include "gradgate/codec.h"
#include "kernels/cpu/loops.h"

namespace gradgate::kernels::cpu {

Status encode(const Loops& loops, const CodecSpec& spec, const EncodeArgs& args, EncodeStats* stats) noexcept;
Status decode(const Loops& loops, const CodecSpec& spec, const DecodeArgs& args) noexcept;
Status decode_sum(const Loops& loops, const CodecSpec& spec, const DecodeSumArgs& args) noexcept;
Status reduce_encode(const Loops& loops, const CodecSpec& spec, const ReduceArgs& args, EncodeStats* stats) noexcept;
Status fold_residual(const Loops& loops, Vec gradient, float* residual, Executor executor) noexcept;

}  // namespace gradgate::kernels::cpu
