// One case of the allreduce benchmark: ranks as threads, one codec, one size, timed and verified.
#pragma once

#include <optional>
#include <vector>

#include "gradgate/exchange.h"
#include "integration/cli/codec_option.h"
#include "integration/cli/link.h"

namespace gradgate::cli {

/// What all cases share.
struct AllReduceSetup {
  int ranks = 4;
  DType dtype = DType::f32;
  std::optional<NamedLink> link;  ///< none: as fast as memory
  bool virtual_clock = false;     ///< with a link: time is modelled, not waited for
  CodecRates rates;               ///< charged on a virtual clock
  uint64_t iterations = 10, warmup = 2;
  double timeout_s = 60;
};

/// Seconds, one entry per timed iteration: the time of the slowest rank, and its parts (each the greatest over ranks).
struct AllReduceCase {
  std::vector<double> time_s, encode_s, transfer_s, decode_s;
  size_t wire_bytes = 0;   ///< exchange_wire_bytes: what stands for the vector
  uint64_t wrong = 0;
  double max_error = 0;
};

/// Description of the ranks and their link: "4 thread ranks, link 1 Gbit/s 50 us (emulated)". Throws RunError.
std::string describe_ranks(const AllReduceSetup& setup);
/// Runs and verifies. Throws RunError naming rank and operation when an exchange fails, std::bad_alloc.
AllReduceCase run_all_reduce(const AllReduceSetup& setup, const NamedCodec& codec, size_t count);

}  // namespace gradgate::cli
