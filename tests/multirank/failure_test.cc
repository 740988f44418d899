// What a communicator does when a rank disagrees, is late, vanishes or aborts: an error on every other rank that names
// operation, ranks and time, never a hang, and never a touch of a buffer whose owner has left.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>

#include "tests/support/rank_harness.h"

namespace gradgate {
namespace {

using test::make_group;
using test::patient;
using test::run_on;
using test::run_ranks;
using testing::AllOf;
using testing::HasSubstr;
using testing::MatchesRegex;

/// Every rank calls `call` once; all must fail with peer_mismatch, with `text` in last_error(), and fail again at once
/// afterwards.
void expect_mismatch(int ranks, const std::function<Status(Communicator&)>& call, const char* text) {
  run_ranks(ranks, [&](Communicator& comm) {
    EXPECT_EQ(call(comm).code(), StatusCode::peer_mismatch) << comm.rank();
    EXPECT_THAT(comm.last_error(), HasSubstr(text)) << comm.rank();
    const std::string first = comm.last_error();
    EXPECT_EQ(comm.barrier({}, Deadline{}).code(), StatusCode::peer_mismatch);
    EXPECT_EQ(comm.last_error(), first);
  });
}

TEST(Mismatch, CountsAreNamedOnAllRanks) {
  expect_mismatch(
      3,
      [](Communicator& comm) {
        std::array<float, 24> recv{};
        const std::array<float, 8> send{};
        return comm.all_gather(send.data(), recv.data(), comm.rank() == 2 ? 7 : 8, DType::f32, {}, patient());
      },
      "rank 2 passed count 7, rank 0 passed 8");
}

TEST(Mismatch, DtypesAreNamedOnAllRanks) {
  expect_mismatch(
      4,
      [](Communicator& comm) {
        std::array<float, 8> data{};
        return comm.all_reduce_sum(data.data(), data.data(), 8, comm.rank() == 1 ? DType::bf16 : DType::f32, {},
                                   patient());
      },
      "all_reduce: peer mismatch after ");
  expect_mismatch(
      2,
      [](Communicator& comm) {
        std::array<float, 8> data{};
        return comm.all_reduce_sum(data.data(), data.data(), 8, comm.rank() == 1 ? DType::bf16 : DType::f32, {},
                                   patient());
      },
      "rank 1 passed dtype bf16, rank 0 passed f32");
}

TEST(Mismatch, OperationsAreNamedOnAllRanks) {
  expect_mismatch(
      5,
      [](Communicator& comm) {
        std::array<float, 40> data{};
        if (comm.rank() == 3) return comm.barrier({}, patient());
        return comm.all_reduce_sum(data.data(), data.data(), 8, DType::f32, {}, patient());
      },
      "rank 3 called barrier, rank 0 called all_reduce");
}

TEST(Mismatch, RootsAreNamedOnAllRanks) {
  expect_mismatch(
      2, [](Communicator& comm) { return comm.broadcast(nullptr, 0, DType::u8, comm.rank(), {}, patient()); },
      "rank 1 passed root 1, rank 0 passed 0");
}

TEST(Mismatch, SplitAgainstCollective) {
  expect_mismatch(
      2,
      [](Communicator& comm) {
        std::unique_ptr<Communicator> part;
        return comm.rank() == 0 ? comm.split(0, 0, &part, patient()) : comm.barrier({}, patient());
      },
      "rank 1 called barrier, rank 0 called split");
}

// COL-7: the survivors get an error soon after the deadline; their buffers are gone at once, which the sanitizers
// watch.
TEST(Timeout, VanishedRankIsNamed) {
  run_ranks(4, [](Communicator& comm) {
    if (comm.rank() == 2) return;
    auto data = std::make_unique<std::array<float, 5000>>();
    EXPECT_EQ(comm.all_reduce_sum(data->data(), data->data(), 5000, DType::f32, {}, Deadline::after(1.0)).code(),
              StatusCode::timeout);
    data.reset();
    EXPECT_THAT(comm.last_error(), MatchesRegex("all_reduce: timeout after [0-9]+\\.[0-9]+ s: rank 2 had not arrived"));
  });
}

TEST(Timeout, LateRankGetsTheSameErrorAtOnceAndNoResult) {
  std::atomic<int> gone{0};
  run_ranks(3, [&](Communicator& comm) {
    std::vector<float> data(40000, 1.0f);
    const bool late = comm.rank() == 1;
    while (late && gone.load() < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const Deadline deadline = late ? Deadline{} : Deadline::after(1.0);
    EXPECT_EQ(comm.all_reduce_sum(data.data(), data.data(), data.size(), DType::f32, {}, deadline).code(),
              StatusCode::timeout);
    if (late) {
      EXPECT_THAT(comm.last_error(), AllOf(HasSubstr("all_reduce: not started"),
                                           HasSubstr("all_reduce: timeout: rank 1 had not arrived")));
    } else {
      EXPECT_THAT(comm.last_error(),
                  MatchesRegex("all_reduce: timeout after [0-9]+\\.[0-9]+ s: rank 1 had not arrived"));
    }
    EXPECT_THAT(data, testing::Each(1.0f));
    ++gone;
  });
}

TEST(Timeout, ManyMissingRanksAreCounted) {
  run_ranks(14, [](Communicator& comm) {
    if (comm.rank() % 14 != 3) return;
    EXPECT_EQ(comm.barrier({}, Deadline::after(0.05)).code(), StatusCode::timeout);
    EXPECT_THAT(comm.last_error(), HasSubstr("ranks 0, 1, 2, 4, 5, 6, 7, 8 and 5 more had not arrived"));
  });
}

TEST(Timeout, DeadlineInThePastFailsUnlessAllAreThere) {
  run_ranks(1, [](Communicator& comm) { GRADGATE_EXPECT_OK(comm.barrier({}, Deadline::after(-1)), comm); });
}

TEST(Abort, WakesWaitingRanksFromAnyThread) {
  const auto group = make_group(3);
  std::thread outside([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    group->rank(2).abort();
  });
  run_on(*group, [](Communicator& comm) {
    if (comm.rank() == 2) return;
    float x = 0;
    EXPECT_EQ(comm.all_reduce_sum(&x, &x, 1, DType::f32, {}, Deadline{}).code(), StatusCode::aborted);
    EXPECT_THAT(comm.last_error(), MatchesRegex("all_reduce: aborted after [0-9]+\\.[0-9]+ s: abort\\(\\) was called"));
  });
  outside.join();
  EXPECT_EQ(group->rank(2).barrier({}, Deadline{}).code(), StatusCode::aborted);
  EXPECT_THAT(group->rank(2).last_error(), HasSubstr("barrier: not started"));
}

// An abort in the middle of a stream of collectives: each completes everywhere or fails everywhere it was waited for,
// and nobody reads what another rank has freed.
TEST(Abort, InTheMiddleOfTransfers) {
  for (int round = 0; round < 20; ++round) {
    const auto group = make_group(4);
    std::thread outside([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
      group->rank(0).abort();
    });
    run_on(*group, [](Communicator& comm) {
      for (;;) {
        std::vector<float> data(20000, 1.0f);
        const Status status = comm.all_reduce_sum(data.data(), data.data(), data.size(), DType::f32, {}, Deadline{});
        if (!status.ok()) {
          EXPECT_EQ(status.code(), StatusCode::aborted);
          EXPECT_EQ(data[19999], 1.0f);
          return;
        }
        ASSERT_EQ(data[0], 4.0f);
        ASSERT_EQ(data[19999], 4.0f);
      }
    });
    outside.join();
  }
}

TEST(Abort, DestroyingTheGroupWaitsForRanksInside) {
  auto group = make_group(2);
  Communicator& comm = group->rank(0);
  std::thread waiting([&] { EXPECT_EQ(comm.barrier({}, Deadline{}).code(), StatusCode::aborted); });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  comm.abort();  // before the destructor, so that the test does not depend on when the thread got in
  waiting.join();
  group.reset();
}

TEST(Arguments, ABadCallFailsEveryRank) {
  run_ranks(3, [](Communicator& comm) {
    float x = 0;
    const void* send = comm.rank() == 1 ? nullptr : &x;
    const Status status = comm.all_reduce_sum(send, &x, 1, DType::f32, {}, patient());
    EXPECT_EQ(status.code(), comm.rank() == 1 ? StatusCode::invalid_argument : StatusCode::peer_failed);
    EXPECT_THAT(comm.last_error(), AllOf(HasSubstr("all_reduce"), HasSubstr("null send buffer with count 1")));
    if (comm.rank() != 1) {
      EXPECT_THAT(comm.last_error(), HasSubstr("rank 1"));
    }
  });
}

TEST(Arguments, EachIsChecked) {
  float x = 0;
  int device = 0;
  const auto fails = [&](const std::function<Status(Communicator&)>& call, StatusCode code, const char* text) {
    const auto group = make_group(1);
    EXPECT_EQ(call(group->rank(0)).code(), code);
    EXPECT_THAT(group->rank(0).last_error(), HasSubstr(text));
  };
  fails([&](Communicator& c) { return c.all_reduce_sum(&x, &x, 4, DType::u8, {}, patient()); }, StatusCode::unsupported,
        "dtype u8");
  fails([&](Communicator& c) { return c.all_gather(&x, &x, 1, static_cast<DType>(9), {}, patient()); },
        StatusCode::unsupported, "dtype ? (9)");
  fails([&](Communicator& c) { return c.all_to_all(&x, nullptr, 1, DType::f32, {}, patient()); },
        StatusCode::invalid_argument, "null receive buffer");
  fails([&](Communicator& c) { return c.broadcast(&x, 1, DType::f32, 1, {}, patient()); }, StatusCode::invalid_argument,
        "root 1 is outside");
  fails([&](Communicator& c) { return c.all_gather(&x, &x, SIZE_MAX / 2, DType::f32, {}, patient()); },
        StatusCode::invalid_argument, "overflows");
  fails([&](Communicator& c) { return c.barrier({&device}, patient()); }, StatusCode::unsupported, "device stream");
  fails([&](Communicator& c) { return c.split(0, 0, nullptr, patient()); }, StatusCode::invalid_argument, "split");
}

}  // namespace
}  // namespace gradgate
