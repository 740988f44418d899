// The MPI communicator with its limits as parameters, for tests.
#pragma once

#include <climits>
#include <cstddef>

#include "gradgate/mpi.h"

namespace gradgate::mpi {

struct Limits {
  /// Most bytes of one rank's block in one MPI call; counts of MPI are ints.
  size_t call_bytes = size_t{1} << 30;
  /// Vectors are summed in segments of this many bytes: two are in flight, which bounds the memory beside the caller's.
  size_t segment_bytes = size_t{8} << 20;
  /// Up to this many bytes over all ranks a sum is one all-gather, added by every rank.
  size_t small_bytes = size_t{32} << 10;
};
static_assert(Limits{}.call_bytes <= size_t{INT_MAX});

Status make_mpi(MPI_Comm comm, const Limits& limits, std::unique_ptr<Communicator>* out, Message* why) noexcept;

}  // namespace gradgate::mpi
