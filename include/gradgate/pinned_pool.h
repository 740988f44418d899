// A small thread pool for processes that own their cores: one thread per core, each bound to its core. On many virtual
// machines two unbound threads share one core's bandwidth; two bound ones nearly double it. Processes that run several
// ranks in threads do not want this.
#pragma once

#include "gradgate/types.h"

namespace gradgate {

/// One thread at a time may use the executor (further callers wait); a task must not use it again. The pool must
/// outlive its executors.
class GRADGATE_API PinnedPool {
 public:
  PinnedPool() noexcept = default;
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  /// Starts `width` threads' worth of work: the calling thread, which takes part in every run and is bound to its core
  /// as well, and width - 1 others. 0: one for every core that this thread may run on; more than those is
  /// invalid_argument, whose detail is their number. bad_state when started already, out_of_memory when a thread cannot
  /// be had (nothing is then left running).
  Status start(unsigned width = 0) noexcept;
  /// Ends the threads and gives the thread that called start() back the cores it had, if it is the one that calls. Safe
  /// to call twice.
  void stop() noexcept;

  /// Threads that take part, the caller included; 1 when not started.
  unsigned width() const noexcept;
  /// Runs tasks on all threads. Not started: runs inline.
  Executor executor() noexcept;

 private:
  struct State;
  State* state_ = nullptr;
};

}  // namespace gradgate
