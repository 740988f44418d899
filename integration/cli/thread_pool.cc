#include "integration/cli/thread_pool.h"

#include <pthread.h>
#include <sched.h>

namespace gradgate::cli {
namespace {

std::vector<int> usable_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

// Pinning is for steadiness only: where it is refused, the pool works all the same.
void pin(pthread_t thread, int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(thread, sizeof set, &set);
}

}  // namespace

ThreadPool::ThreadPool(unsigned width) {
  if (width <= 1) return;
  const std::vector<int> cores = usable_cores();
  for (unsigned i = 1; i < width; ++i) {
    threads_.emplace_back([this] { loop(); });
    if (!cores.empty()) pin(threads_.back().native_handle(), cores[i % cores.size()]);
  }
  if (!cores.empty()) pin(pthread_self(), cores[0]);
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

Executor ThreadPool::executor() noexcept {
  if (threads_.empty()) return {};
  return {this, [](void* context, size_t tasks, Executor::Task fn, void* argument) { static_cast<ThreadPool*>(context)->run(tasks, fn, argument); },
          static_cast<unsigned>(threads_.size() + 1)};
}

void ThreadPool::run(size_t tasks, Executor::Task fn, void* argument) noexcept {
  {
    const std::lock_guard lock(mutex_);
    tasks_ = tasks;
    fn_ = fn;
    argument_ = argument;
    next_.store(0, std::memory_order_relaxed);
    busy_ = static_cast<unsigned>(threads_.size());
    ++epoch_;
  }
  wake_.notify_all();
  work();
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return busy_ == 0; });
}

void ThreadPool::work() noexcept {
  for (size_t i = next_.fetch_add(1, std::memory_order_relaxed); i < tasks_; i = next_.fetch_add(1, std::memory_order_relaxed)) fn_(argument_, i);
}

void ThreadPool::loop() noexcept {
  uint64_t seen = 0;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || epoch_ != seen; });
      if (stop_) return;
      seen = epoch_;
    }
    work();
    const std::lock_guard lock(mutex_);
    if (--busy_ == 0) done_.notify_one();
  }
}

}  // namespace gradgate::cli
