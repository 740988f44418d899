// A pool of pinned threads behind an Executor, for a process that owns its cores. The caller is one of the threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "gradgate/types.h"

namespace gradgate::cli {

class ThreadPool {
 public:
  /// `width` threads in all, each pinned to one of the cores the process may use, in turn. 1: everything runs inline, nothing is pinned.
  explicit ThreadPool(unsigned width);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  Executor executor() noexcept;

 private:
  void run(size_t tasks, Executor::Task fn, void* argument) noexcept;
  void work() noexcept;
  void loop() noexcept;

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  uint64_t epoch_ = 0;    // guarded by mutex_, as the job below
  unsigned busy_ = 0;
  bool stop_ = false;
  size_t tasks_ = 0;
  Executor::Task fn_ = nullptr;
  void* argument_ = nullptr;
  std::atomic<size_t> next_{0};
};

}  // namespace gradgate::cli
