// Runs one function on N thread ranks. A rank that throws, or a group that does not finish in time, is a test failure
// that names the rank, and the group is aborted so that the others leave their collectives.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gradgate/communicator.h"

namespace gradgate::test {

/// Generous: sanitizers on a busy machine are slow, and no test here waits for it unless something hangs.
inline constexpr double kWatchdogSeconds = 120;
/// For collectives that must succeed.
inline Deadline patient() { return Deadline::after(kWatchdogSeconds); }

inline std::unique_ptr<ThreadGroup> make_group(int ranks) {
  std::unique_ptr<ThreadGroup> group;
  const Status status = ThreadGroup::create(ranks, &group);
  if (!status.ok()) ADD_FAILURE() << "ThreadGroup::create(" << ranks << "): " << status.message();
  return group;
}

/// body(communicator) on every rank of `group`, in a thread of its own; returns when all are back.
inline void run_on(ThreadGroup& group, const std::function<void(Communicator&)>& body,
                   double watchdog_s = kWatchdogSeconds) {
  struct Shared {
    std::mutex mutex;
    std::condition_variable done;
    std::vector<bool> finished;
    size_t left = 0;
    std::string first_failure;
  } shared;
  const auto ranks = static_cast<size_t>(group.size());
  shared.finished.assign(ranks, false);
  shared.left = ranks;
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      std::string failure;
      try {
        body(group.rank(static_cast<int>(r)));
      } catch (const std::exception& e) {
        failure.append("rank ").append(std::to_string(r)).append(" threw: ").append(e.what());
      } catch (...) {
        failure.append("rank ").append(std::to_string(r)).append(" threw");
      }
      if (!failure.empty()) group.rank(static_cast<int>(r)).abort();
      const std::lock_guard lock(shared.mutex);
      if (shared.first_failure.empty()) shared.first_failure = failure;
      shared.finished[r] = true;
      if (--shared.left == 0) shared.done.notify_all();
    });
  }
  {
    std::unique_lock lock(shared.mutex);
    if (!shared.done.wait_for(lock, std::chrono::duration<double>(watchdog_s), [&] { return shared.left == 0; })) {
      std::string& text = shared.first_failure;
      text.assign("watchdog: still running after ").append(std::to_string(watchdog_s)).append(" s: ranks");
      for (size_t r = 0; r < ranks; ++r) {
        if (!shared.finished[r]) text.append(" ").append(std::to_string(r));
      }
      lock.unlock();
      group.rank(0).abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (!shared.first_failure.empty()) ADD_FAILURE() << shared.first_failure;
}

inline void run_ranks(int ranks, const std::function<void(Communicator&)>& body, double watchdog_s = kWatchdogSeconds) {
  const std::unique_ptr<ThreadGroup> group = make_group(ranks);
  if (group != nullptr) run_on(*group, body, watchdog_s);
}

/// Expects a call on `comm` to succeed; says which rank failed, and why.
#define GRADGATE_EXPECT_OK(expression, comm) \
  EXPECT_TRUE((expression).ok()) << "rank " << (comm).rank() << ": " << #expression << ": " << (comm).last_error()

}  // namespace gradgate::test
