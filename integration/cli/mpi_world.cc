#include "integration/cli/mpi_world.h"

#include <cstdlib>
#include <string>

#include "integration/cli/error.h"

#if GRADGATE_HAVE_MPI
#include "gradgate/mpi.h"
#endif

namespace gradgate::cli {
namespace {

int whole_number(const char* variable) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return -1;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  return *end == '\0' && value >= 0 && value <= 1 << 24 ? static_cast<int>(value) : -1;
}

#if GRADGATE_HAVE_MPI
bool begun = false;
#endif

}  // namespace

std::optional<MpiLaunch> mpi_launch() {
  constexpr const char* kVariables[][2] = {{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                           {"MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"},
                                           {"PMI_SIZE", "PMI_RANK"},
                                           {"SLURM_NTASKS", "PMIX_RANK"}};
  for (const auto& [size, rank] : kVariables) {
    const int ranks = whole_number(size), mine = whole_number(rank);
    if (ranks >= 1 && mine >= 0 && mine < ranks) return MpiLaunch{mine, ranks, size};
  }
  return std::nullopt;
}

#if GRADGATE_HAVE_MPI

std::unique_ptr<Communicator> mpi_world(const MpiLaunch& launch) {
  if (!begun) {
    int level = 0;
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level) != MPI_SUCCESS)
      throw RunError("MPI_Init_thread failed");
    begun = true;
  }
  std::unique_ptr<Communicator> world;
  Message why;
  if (!make_mpi(MPI_COMM_WORLD, &world, &why).ok()) throw RunError(why.text);
  if (world->size() != launch.ranks) {
    throw RunError("MPI has " + std::to_string(world->size()) + " ranks, " + launch.variable + " says " +
                   std::to_string(launch.ranks) +
                   ": was the program built with another MPI than the one that started it?");
  }
  return world;
}

void leave_mpi(bool failed) {
  if (!begun) return;
  if (failed) MPI_Abort(MPI_COMM_WORLD, kExitFailed);
  MPI_Finalize();
}

#else

std::unique_ptr<Communicator> mpi_world(const MpiLaunch& launch) {
  throw UsageError("started by an MPI launcher (" + std::string(launch.variable) + " is " +
                   std::to_string(launch.ranks) +
                   "), but built without MPI: install libopenmpi-dev and build again, or start it without mpirun for "
                   "ranks as threads");
}

void leave_mpi(bool) {}

#endif

}  // namespace gradgate::cli
