// Which ranks share a node, and their communicators.
#include <cstdlib>

#include "gradgate/exchange.h"

namespace gradgate {

int launcher_ranks_per_node() noexcept {
  for (const char* name :
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"}) {
    const char* text = std::getenv(name);
    if (text == nullptr || *text == 0) continue;
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*end == 0 && value >= 1 && value <= 1 << 20) return static_cast<int>(value);
  }
  return 0;
}

Status split_nodes(Communicator& comm, int ranks_per_node, double timeout_s, NodeTiers* tiers, Message* why) noexcept {
  Message unused;
  if (why == nullptr) why = &unused;
  if (tiers == nullptr || ranks_per_node < 1 || comm.size() % ranks_per_node != 0) {
    why->format("%d ranks are not equal nodes of %d ranks", comm.size(), ranks_per_node);
    return StatusCode::invalid_argument;
  }
  const int node = comm.rank() / ranks_per_node, local = comm.rank() % ranks_per_node;
  Status status = comm.split(node, local, &tiers->node, Deadline::after(timeout_s));
  if (status.ok()) status = comm.split(local, node, &tiers->between, Deadline::after(timeout_s));
  if (!status.ok()) why->format("splitting nodes of %d ranks: %s", ranks_per_node, comm.last_error());
  return status;
}

}  // namespace gradgate
