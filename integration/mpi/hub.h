// The meeting point of the ranks of one MPI communicator: who is there, whether all want the same, and what went wrong.
// A star on rank 0: each rank sends it the descriptor of its call and gets a verdict back. Failures travel as verdicts
// too, straight from the rank that noticed to all others, and are looked for in every wait.
#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "gradgate/communicator.h"

namespace gradgate::mpi {

/// What a rank brings to a collective. op none is a split.
struct Call {
  Collective op = Collective::none;
  DType dtype = DType::u8;
  int root = 0;
  size_t count = 0;
  const void* send = nullptr;
  void* recv = nullptr;
};
const char* call_name(Collective op) noexcept;

class Hub {
 public:
  /// Takes `comm` over. Allocates: may throw std::bad_alloc. A hub that has failed must not be destroyed: MPI may still
  /// write into its memory.
  explicit Hub(MPI_Comm comm);
  ~Hub();
  Hub(const Hub&) = delete;
  Hub& operator=(const Hub&) = delete;

  MPI_Comm comm() const noexcept { return comm_; }
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  const char* last_error() const noexcept { return error_.text; }
  bool failed() const noexcept { return failure_ != StatusCode::ok; }

  /// Begins a collective: ok when all ranks called the same. Starts the clock of `deadline`.
  Status meet(const Call& call, Deadline deadline) noexcept;
  /// This rank cannot take part: it gets `own`, the others peer_failed with the same reason.
  Status refuse(Collective op, Status own, const char* reason) noexcept;
  /// Polls requests of the collective that has begun until all are complete.
  Status await(std::span<MPI_Request> requests) noexcept;
  /// Ends the collective with the error of an MPI call; ok for MPI_SUCCESS.
  Status check(int mpi_error, const char* function) noexcept;
  Status out_of_memory() noexcept;
  void abort() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Descriptor {
    uint32_t op, dtype;
    int64_t root;
    uint64_t count;
  };
  struct Verdict {
    uint32_t code;
    char text[320];
  };
  class Pause;

  Status collect(Pause* pause) noexcept;
  Status wait_for_verdict(Pause* pause) noexcept;
  bool agree(Message* why) const noexcept;
  void list_missing(Message* why) const noexcept;
  Status look() noexcept;
  Status receive_verdict(bool* go) noexcept;
  Status fail(StatusCode code, const char* reason) noexcept;
  void tell_all(const Verdict& verdict) noexcept;
  Status report() noexcept;

  MPI_Comm comm_;
  int rank_ = 0, size_ = 1;
  bool any_thread_ = false;  ///< MPI_THREAD_MULTIPLE
  std::thread::id owner_;
  std::atomic<bool> abort_asked_{false}, abort_told_{false};

  Descriptor mine_{};
  std::vector<Descriptor> descriptors_;  ///< rank 0: of the call that is gathering
  std::vector<MPI_Request> gathering_;   ///< rank 0: one receive per peer, null once it is there
  std::vector<int> arrived_;             ///< rank 0: scratch
  std::vector<MPI_Request> telling_;     ///< sends of verdicts
  Verdict heard_{}, told_{};
  MPI_Request listening_ = MPI_REQUEST_NULL;

  const char* op_ = "";
  Clock::time_point since_;
  Deadline deadline_;
  StatusCode failure_ = StatusCode::ok;
  Message reason_, error_;
};

}  // namespace gradgate::mpi
