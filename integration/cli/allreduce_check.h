// Verification of the allreduce benchmark. Three checks, every element counted once: all ranks hold the same bits; each value is within the codec's
// proven bound of the exact average (dense: equal to the dense sum, bit by bit); and in windows of every shard the bits are those of the scalar
// reference of the payload format (but where a backend rounds sums of 16 bits in its own way).
#pragma once

#include <cstdint>
#include <span>

#include "gradgate/communicator.h"
#include "integration/cli/codec_option.h"

namespace gradgate::cli {

struct AllReduceCheck {
  uint64_t wrong = 0;    ///< elements on any rank that are not what they must be
  double max_error = 0;  ///< greatest |value − exact average|
};

/// outputs[r] is what rank r holds after one exchange of fill_exact(r, …) vectors of `count` elements; residuals, if any, were zero. `ranks` is their number
/// where not all outputs are at hand (rank 0's comes first); 0: as many as outputs.
AllReduceCheck check_all_reduce(const NamedCodec& codec, DType dtype, size_t count, std::span<const std::byte* const> outputs, int ranks = 0);

/// The same where each process holds the output of one rank: rank 0 checks its own, the others compare theirs with it. Collective over `comm`; every rank gets the
/// result. Throws RunError.
AllReduceCheck check_across(Communicator& comm, const NamedCodec& codec, DType dtype, size_t count, const std::byte* output, double timeout_s);

}  // namespace gradgate::cli
