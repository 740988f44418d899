// The data movement of each collective, by nonblocking MPI collectives: begins after Hub::meet() said that all ranks
// called the same.
#pragma once

#include <memory>
#include <vector>

#include "integration/mpi/hub.h"
#include "integration/mpi/mpi_comm.h"

namespace gradgate::mpi {

class Moves {
 public:
  /// Allocates: may throw std::bad_alloc. `hub` must outlive it, and it must not be destroyed when the hub has failed.
  Moves(Hub& hub, const Limits& limits);

  Status move(const Call& call) noexcept;

 private:
  /// What one segment in flight needs: the blocks that arrive, and the counts that MPI reads until it is done.
  struct Slot {
    std::unique_ptr<std::byte[]> blocks;
    size_t bytes = 0;
    std::vector<int> counts, displacements, own_counts, own_displacements;
    MPI_Request scatter = MPI_REQUEST_NULL, gather = MPI_REQUEST_NULL;
  };

  Status all_reduce_small(const Call& call) noexcept;
  Status all_reduce(const Call& call) noexcept;
  Status scatter_segment(const Call& call, size_t first, size_t count, Slot* slot) noexcept;
  Status reduce_scatter(const Call& call) noexcept;
  Status all_gather(const Call& call) noexcept;
  Status all_to_all(const Call& call) noexcept;
  Status broadcast(const Call& call) noexcept;

  /// to[i] = sum over ranks of element i of each block.
  void sum(const std::byte* blocks, size_t block_bytes, std::byte* to, size_t count, DType dtype) noexcept;
  Status reserve(Slot* slot, size_t bytes) noexcept;
  Status wait(MPI_Request* request) noexcept { return hub_.await({request, 1}); }
  size_t ranks() const noexcept { return static_cast<size_t>(hub_.size()); }

  Hub& hub_;
  Limits limits_;
  Slot slots_[2];
  std::vector<const void*> sources_;
};

}  // namespace gradgate::mpi
