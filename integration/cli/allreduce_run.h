// One case of the allreduce benchmark: one codec, one size, timed and verified.
#pragma once

#include <vector>

#include "gradgate/exchange.h"
#include "integration/cli/codec_option.h"
#include "integration/cli/ranks.h"

namespace gradgate::cli {

/// What all cases share.
struct AllReduceSetup {
  DType dtype = DType::f32;
  Shaping shaping;
  CodecRates rates;  ///< charged on a virtual clock
  uint64_t iterations = 10, warmup = 2;
  int ranks_per_node = 0;  ///< of hierarchical exchanges
  double timeout_s = 60;
  Device device = Device::cpu;
};

/// Seconds, one entry per timed iteration: the time of the slowest rank, and its parts (each the greatest over ranks).
struct AllReduceCase {
  std::vector<double> time_s, encode_s, transfer_s, decode_s;
  size_t wire_bytes = 0;  ///< exchange_wire_bytes: what stands for the vector
  uint64_t wrong = 0;
  double max_error = 0;
};

/// Runs and verifies; the same result in every process of the run. Throws RunError naming rank and operation when an
/// exchange fails, std::bad_alloc.
AllReduceCase run_all_reduce(Ranks& ranks, const AllReduceSetup& setup, const NamedCodec& codec, size_t count);

}  // namespace gradgate::cli
