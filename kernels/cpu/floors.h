// What the memory of this machine can do: the loops against which codec times are stated (ratio = time / read, time /
// axpy). As good as the codec loops themselves: same instruction set, prefetch, and stores around the caches for large
// outputs. Split evenly over executor.width tasks.
#pragma once

#include "gradgate/types.h"

namespace gradgate::kernels::cpu {

/// Reads every byte once; the sum keeps the compiler from leaving the loop out. Bytes beyond a multiple of 4 are not
/// read.
uint64_t read_sum(ConstBytes data, Executor executor) noexcept;
/// Copies min(dst.size(), src.size()) bytes.
void copy(Bytes dst, ConstBytes src, Executor executor) noexcept;
/// y[i] = y[i] + a * x[i]: two streams read, one of them written in place. The floor of a codec with error feedback.
void axpy_inplace(float a, const float* x, float* y, size_t count, Executor executor) noexcept;

}  // namespace gradgate::kernels::cpu
