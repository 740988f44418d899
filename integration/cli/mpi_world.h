// The MPI job this process was started in, if any. Everything that needs MPI itself is behind these functions, so that
// the program is the same source with and without it.
#pragma once

#include <memory>
#include <optional>

#include "gradgate/communicator.h"

namespace gradgate::cli {

struct MpiLaunch {
  int rank = 0, ranks = 1;
  const char* variable = "";  ///< of the environment, by which it was recognised
};

/// What the launcher says in the environment: OMPI_COMM_WORLD_SIZE (Open MPI), PMI_SIZE (MPICH, Intel MPI),
/// MV2_COMM_WORLD_SIZE (MVAPICH2), or PMIX_RANK with SLURM_NTASKS (srun). None: not started by an MPI launcher.
std::optional<MpiLaunch> mpi_launch();

/// Initialises MPI (once) and returns a communicator over all its ranks. Throws RunError where MPI refuses, and
/// UsageError, naming the launcher's variable, where the program was built without MPI.
std::unique_ptr<Communicator> mpi_world(const MpiLaunch& launch);

/// Ends MPI if it was begun: with the other ranks when this process is done, or, with `failed`, taking the whole job
/// down with exit code 1, as the others may wait for this rank.
void leave_mpi(bool failed);

}  // namespace gradgate::cli
