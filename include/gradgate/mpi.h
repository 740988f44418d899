// Communicator over MPI: link gradgate::mpi besides gradgate::gradgate. The only header of gradgate that includes
// mpi.h.
#pragma once

#include <mpi.h>

#include <memory>

#include "gradgate/communicator.h"

namespace gradgate {

/// A communicator of its own (a duplicate) over the ranks of `comm`. Collective over `comm`; MPI must be initialised,
/// at least MPI_THREAD_SERIALIZED where calls come from more than one thread. With MPI_THREAD_MULTIPLE abort() reaches
/// the peers at once from any thread; otherwise when the rank's own thread is next inside a call.
///
/// * Every call first meets on rank 0 (one small message there and back): descriptors are compared before a buffer is
///   touched, and a rank that is missing, late or different is named on all ranks. Then the data moves by nonblocking
///   MPI collectives that are polled to the deadline; messages are split where a count would pass INT_MAX.
/// * Sums are gradgate's own: vectors are exchanged by all-to-all, added in rank order (f32 for f32, bf16 and f16, f64
///   for f64; one rounding at the end) by the rank that owns the part, and gathered. The bits are the same on every
///   rank, and those of thread ranks.
/// * After a failure while data was moving MPI may still write into the buffers of that call: end the job with
///   MPI_Abort(), as MPI gives no way back. A failure before that (timeout of a rank that never came, peer_mismatch,
///   bad arguments) leaves every buffer alone.
/// * split() and the destructor are collective; the destructor of a failed communicator frees nothing.
///
/// invalid_argument: null `out`, MPI not initialised or already finalised, MPI_COMM_NULL, an intercommunicator.
GRADGATE_API Status make_mpi(MPI_Comm comm, std::unique_ptr<Communicator>* out, Message* why = nullptr) noexcept;

}  // namespace gradgate
