#include "gradgate/pinned_pool.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <thread>
#include <vector>

namespace gradgate::test {
namespace {

int cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set);
  return CPU_COUNT(&set);
}

TEST(PinnedPool, NotStartedRunsInline) {
  PinnedPool pool;
  EXPECT_EQ(pool.width(), 1u);
  int sum = 0;
  pool.executor()(
      10, [](void* p, size_t i) { *static_cast<int*>(p) += static_cast<int>(i); }, &sum);
  EXPECT_EQ(sum, 45);
}

TEST(PinnedPool, EveryTaskRunsOnce) {
  const int before = cores();
  PinnedPool pool;
  ASSERT_TRUE(pool.start().ok());
  EXPECT_EQ(pool.width(), static_cast<unsigned>(before));
  EXPECT_EQ(pool.start(), StatusCode::bad_state);
  const Executor executor = pool.executor();
  EXPECT_EQ(executor.width, pool.width());
  std::vector<std::atomic<int>> hits(1000);
  for (int round = 1; round <= 200; ++round) {
    executor(
        round % 7 == 0 ? 1 : hits.size(),
        [](void* p, size_t i) { (*static_cast<std::vector<std::atomic<int>>*>(p))[i].fetch_add(1); }, &hits);
  }
  for (size_t i = 0; i < hits.size(); ++i) EXPECT_EQ(hits[i].load(), i == 0 ? 200 : 200 - 28) << i;
  EXPECT_EQ(cores(), 1);
  pool.stop();
  EXPECT_EQ(cores(), before);
  pool.stop();
  EXPECT_EQ(pool.width(), 1u);
  EXPECT_TRUE(pool.start(1).ok());
}

TEST(PinnedPool, WakesSleepers) {
  PinnedPool pool;
  ASSERT_TRUE(pool.start().ok());
  std::atomic<int> sum{0};
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    pool.executor()(
        8, [](void* p, size_t) { static_cast<std::atomic<int>*>(p)->fetch_add(1); }, &sum);
  }
  EXPECT_EQ(sum.load(), 40);
}

TEST(PinnedPool, CallersTakeTurns) {
  PinnedPool pool;
  ASSERT_TRUE(pool.start().ok());
  std::atomic<int> sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        pool.executor()(
            5, [](void* p, size_t) { static_cast<std::atomic<int>*>(p)->fetch_add(1); }, &sum);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum.load(), 3 * 50 * 5);
}

TEST(PinnedPool, MoreThreadsThanCoresAreRefused) {
  PinnedPool pool;
  EXPECT_EQ(pool.start(static_cast<unsigned>(cores()) + 1),
            Status(StatusCode::invalid_argument, static_cast<int64_t>(cores())));
  EXPECT_EQ(pool.width(), 1u);
}

}  // namespace
}  // namespace gradgate::test
