// Shaped communicators: literal times on the virtual clock, and no collective faster than its link on the real one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/support/rank_harness.h"

namespace gradgate {
namespace {

using test::make_group;
using test::patient;
using test::run_ranks;
using testing::HasSubstr;

constexpr LinkSpec kLink{5e-6, 1e10};

std::unique_ptr<Communicator> shaped(Communicator& inner, LinkSpec link, ClockKind clock) {
  std::unique_ptr<Communicator> out;
  const Status status = make_shaped(inner, link, clock, &out);
  EXPECT_TRUE(status.ok()) << status.message();
  return out;
}

/// Runs `call` on the virtual clock of `ranks` ranks and expects it to take `seconds` on each.
void expect_takes(int ranks, double seconds, const std::function<Status(Communicator&)>& call) {
  run_ranks(ranks, [&](Communicator& inner) {
    const auto comm = shaped(inner, kLink, ClockKind::virtual_time);
    EXPECT_EQ(comm->now(), 0.0);
    GRADGATE_EXPECT_OK(call(*comm), *comm);
    EXPECT_DOUBLE_EQ(comm->now(), seconds) << "rank " << comm->rank();
  });
}

Status reduce(Communicator& comm, size_t bytes) {
  std::vector<float> data(bytes / 4, 1.0f);
  const Status status = comm.all_reduce_sum(data.data(), data.data(), data.size(), DType::f32, {}, patient());
  for (const float x : data) EXPECT_EQ(x, static_cast<float>(comm.size()));
  return status;
}

TEST(VirtualClock, RingAllReduce) {
  expect_takes(4, 180e-6, [](Communicator& c) { return reduce(c, 1000000); });  // 2·3/4·1e6/1e10 + 6·5 us
  expect_takes(2, 110e-6, [](Communicator& c) { return reduce(c, 1000000); });  // 2·1/2·1e6/1e10 + 2·5 us
  expect_takes(1, 0, [](Communicator& c) { return reduce(c, 1000000); });
  expect_takes(3, 20e-6, [](Communicator& c) { return reduce(c, 0); });
}

TEST(VirtualClock, OnePassAroundTheRing) {
  // 4 blocks of 250 kB: 3/4·1e6/1e10 + 3·5 us.
  expect_takes(4, 90e-6, [](Communicator& c) {
    std::vector<uint8_t> send(250000), recv(1000000);
    return c.all_gather(send.data(), recv.data(), 250000, DType::u8, {}, patient());
  });
  expect_takes(4, 90e-6, [](Communicator& c) {
    std::vector<uint8_t> send(1000000), recv(1000000);
    return c.all_to_all(send.data(), recv.data(), 250000, DType::u8, {}, patient());
  });
  expect_takes(4, 90e-6, [](Communicator& c) {
    std::vector<double> send(125000), recv(31250);
    return c.reduce_scatter_sum(send.data(), recv.data(), 31250, DType::f64, {}, patient());
  });
}

TEST(VirtualClock, Trees) {
  for (const auto& [ranks, levels] : {std::pair{1, 0}, {2, 1}, {3, 2}, {4, 2}, {5, 3}, {8, 3}}) {
    expect_takes(ranks, levels * 5e-6, [](Communicator& c) { return c.barrier({}, patient()); });
    expect_takes(ranks, levels * 105e-6, [](Communicator& c) {
      std::vector<uint8_t> data(1000000);
      return c.broadcast(data.data(), data.size(), DType::u8, 0, {}, patient());
    });
  }
}

TEST(VirtualClock, StartsWhenTheLastRankIsReady) {
  run_ranks(4, [](Communicator& inner) {
    const auto comm = shaped(inner, kLink, ClockKind::virtual_time);
    EXPECT_TRUE(comm->virtual_clock());
    comm->advance(1e-3 * comm->rank());  // rank 3 computes longest
    EXPECT_DOUBLE_EQ(comm->now(), 1e-3 * comm->rank());
    GRADGATE_EXPECT_OK(reduce(*comm, 1000000), *comm);
    EXPECT_DOUBLE_EQ(comm->now(), 3e-3 + 180e-6);
    comm->advance(-1);
    comm->advance(std::numeric_limits<double>::quiet_NaN());
    EXPECT_DOUBLE_EQ(comm->now(), 3e-3 + 180e-6);
  });
}

TEST(VirtualClock, PartsShareTheClockOfTheirRank) {
  run_ranks(4, [](Communicator& inner) {
    const auto comm = shaped(inner, kLink, ClockKind::virtual_time);
    std::unique_ptr<Communicator> part;
    GRADGATE_EXPECT_OK(comm->split(comm->rank() / 2, 0, &part, patient()), *comm);
    EXPECT_EQ(part->size(), 2);
    EXPECT_THAT(part->description(), HasSubstr("2 thread ranks, link 80 Gbit/s 5 us (emulated, virtual clock)"));
    if (comm->rank() < 2) {
      GRADGATE_EXPECT_OK(part->barrier({}, patient()), *part);
    }
    EXPECT_DOUBLE_EQ(comm->now(), comm->rank() < 2 ? 5e-6 : 0);
    GRADGATE_EXPECT_OK(comm->barrier({}, patient()), *comm);
    EXPECT_DOUBLE_EQ(part->now(), 15e-6);
  });
}

// One-sided: how much longer it takes depends on the machine.
TEST(RealClock, NeverFasterThanTheLink) {
  run_ranks(3, [](Communicator& inner) {
    const auto comm = shaped(inner, {1e-3, 1e8}, ClockKind::real);
    GRADGATE_EXPECT_OK(comm->barrier({}, patient()), *comm);
    const double start = comm->now();
    GRADGATE_EXPECT_OK(reduce(*comm, 300000), *comm);
    EXPECT_GE(comm->now() - start, 2.0 * 2 / 3 * 300000 / 1e8 + 4e-3);
    const double next = comm->now();
    GRADGATE_EXPECT_OK(comm->barrier({}, patient()), *comm);
    EXPECT_GE(comm->now() - next, 2e-3);
    comm->advance(100);
    EXPECT_LT(comm->now(), start + 100) << "a real clock must not be moved";
  });
}

TEST(RealClock, CountsFromTheArrivalOfTheLastRank) {
  std::atomic<double> last_arrival{0};
  run_ranks(2, [&](Communicator& inner) {
    const auto comm = shaped(inner, {10e-3, 1e9}, ClockKind::real);
    if (comm->rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      last_arrival = comm->now();
    }
    GRADGATE_EXPECT_OK(comm->barrier({}, patient()), *comm);
    EXPECT_GE(comm->now(), last_arrival + 10e-3);
  });
}

TEST(Shaped, OneRankCostsNothingAndDescribesItself) {
  const auto group = make_group(1);
  const auto comm = shaped(group->rank(0), {50e-6, 125e6}, ClockKind::real);
  EXPECT_STREQ(comm->description(), "1 thread rank, link 1 Gbit/s 50 us (emulated)");
  const auto slow = shaped(group->rank(0), {1.0, 1.0}, ClockKind::virtual_time);
  GRADGATE_EXPECT_OK(reduce(*slow, 400), *slow);
  EXPECT_EQ(slow->now(), 0.0);
  EXPECT_STREQ(slow->description(), "1 thread rank, link 8e-06 Mbit/s 1e+06 us (emulated, virtual clock)");
}

TEST(Shaped, ErrorsNameTheOperationOfTheCaller) {
  for (const ClockKind clock : {ClockKind::real, ClockKind::virtual_time}) {
    run_ranks(3, [&](Communicator& inner) {
      const auto comm = shaped(inner, kLink, clock);
      if (comm->rank() == 1) return;
      float x = 0;
      EXPECT_EQ(comm->all_reduce_sum(&x, &x, 1, DType::f32, {}, Deadline::after(1.0)).code(), StatusCode::timeout);
      EXPECT_THAT(comm->last_error(),
                  testing::AllOf(HasSubstr("all_reduce on an emulated link"), HasSubstr("rank 1 had not arrived")));
    });
    run_ranks(2, [&](Communicator& inner) {
      const auto comm = shaped(inner, kLink, clock);
      float x[4] = {};
      const Status status = comm->rank() == 0 ? comm->all_reduce_sum(x, x, 2, DType::f32, {}, patient())
                                              : comm->all_gather(x, x, 2, DType::f32, {}, patient());
      EXPECT_EQ(status.code(), StatusCode::peer_mismatch);
      EXPECT_THAT(comm->last_error(), HasSubstr("rank 1 called all_gather, rank 0 called all_reduce"));
    });
  }
}

TEST(Shaped, RefusesImpossibleLinks) {
  const auto group = make_group(1);
  std::unique_ptr<Communicator> out;
  constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  for (const LinkSpec link : {LinkSpec{0, 0}, {0, -1}, {-1e-6, 1e9}, {kNan, 1e9}, {0, kNan}, {kInf, 1e9}, {0, kInf}}) {
    EXPECT_EQ(make_shaped(group->rank(0), link, ClockKind::real, &out).code(), StatusCode::invalid_argument);
  }
  EXPECT_EQ(make_shaped(group->rank(0), kLink, ClockKind::real, nullptr).code(), StatusCode::invalid_argument);
  EXPECT_EQ(out, nullptr);
}

}  // namespace
}  // namespace gradgate
