// The dense average's scaling, as torch does it in front of a sum: one multiplication by 1/N, rounded once to the
// gradient's dtype.
#pragma once

#include "gradgate/types.h"

namespace gradgate::comm {

/// gradient[i] *= 1/ranks: f32, bf16 and f16 multiply by float(1.0 / ranks), f64 by 1.0 / ranks; bf16 and f16 round to
/// nearest even. `divide`: gradient[i] /= ranks instead, what DDP does to gradients that already live in its buckets.
void scale_dense(Vec gradient, int ranks, bool divide, const Executor& executor) noexcept;

}  // namespace gradgate::comm
