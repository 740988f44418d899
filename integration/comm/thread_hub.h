// The meeting point of the thread ranks of one communicator: a rendezvous per collective, then the data movement.
// Buffers of other ranks are touched only between the arrival of the last rank and the departure of the first, and
// nobody departs before all are done, so a rank that gives up waiting can free its buffers at once.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "gradgate/communicator.h"

namespace gradgate::comm {

class ThreadHub {
 public:
  /// What a rank brings to a collective. op none is a split, which brings color and key.
  struct Call {
    Collective op = Collective::none;
    DType dtype = DType::u8;
    int root = 0;
    size_t count = 0;
    const void* send = nullptr;
    void* recv = nullptr;
    int color = 0, key = 0;
  };
  /// What a split gives a rank.
  struct Child {
    std::shared_ptr<ThreadHub> hub;
    int rank = 0;
  };

  explicit ThreadHub(int ranks);  // allocates: may throw std::bad_alloc, callers catch

  int size() const noexcept { return static_cast<int>(calls_.size()); }

  /// One collective of one rank. Any failure is the same for all ranks that waited, fills `text` (if it is empty) and
  /// stays.
  Status meet(int rank, const Call& call, Deadline deadline, Message* text) noexcept;
  /// The split this rank has just met for.
  Child take_child(int rank) noexcept;
  /// This rank cannot take part in `op`: it gets `own`, every other rank peer_failed with the same reason.
  Status refuse(int rank, const char* op, Status own, const char* reason, Message* text) noexcept;
  void abort() noexcept;
  /// Aborts and waits until no rank is inside a call.
  void close() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Inside;

  bool agree(Message* why) const noexcept;
  void list_missing(Message* why) const noexcept;
  void fail(Status status, const char* op) noexcept;
  Status report(const char* op, Clock::time_point since, bool waited, Message* text) const noexcept;
  bool make_children() noexcept;
  bool small() const noexcept;
  void move(int rank) noexcept;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Call> calls_;         ///< of the collective that is gathering or moving, by rank
  std::vector<const void*> sends_;  ///< the same calls' buffers, as sum_over_ranks() takes them
  std::vector<void*> recvs_;
  std::vector<char> present_;  ///< who has arrived at the gathering collective
  std::vector<Child> children_;
  int arrived_ = 0, finished_ = 0;  ///< ranks of the gathering collective; ranks whose data has been moved
  int inside_ = 0;
  uint64_t opened_ = 0, closed_ = 0;  ///< collectives for which all had arrived; collectives that are complete
  bool alone_ = false;                ///< the collective being moved is small: the last rank to arrive moves everything
  Status failure_;                    ///< once not ok, for good
  const char* failed_op_ = "";
  Message reason_;
};

const char* call_name(Collective op) noexcept;

}  // namespace gradgate::comm
