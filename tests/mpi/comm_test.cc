// The MPI communicator on as many ranks as mpirun started: every collective against the plain definition, split
// messages, disagreement, absence and abort. Every rank runs every test; a failure on any of them fails the job.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "integration/comm/half.h"
#include "integration/mpi/mpi_comm.h"

namespace gradgate {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::MatchesRegex;

Deadline patient() { return Deadline::after(60); }

std::unique_ptr<Communicator> make(const mpi::Limits& limits = {}) {
  std::unique_ptr<Communicator> comm;
  Message why;
  EXPECT_TRUE(mpi::make_mpi(MPI_COMM_WORLD, limits, &comm, &why).ok()) << why.text;
  return comm;
}

#define EXPECT_COMM_OK(expression, comm) \
  EXPECT_TRUE((expression).ok()) << "rank " << (comm).rank() << ": " << #expression << ": " << (comm).last_error()

/// Small multiples of 1/4: exact in every dtype, and so are their sums over a few ranks in the accumulator.
double value(size_t rank, size_t i) {
  return static_cast<double>(rank + 1) * 3 - static_cast<double>(i % 17) - 0.25 * static_cast<double>(i % 5);
}
double label(size_t a, size_t b, size_t i) { return static_cast<double>((a * 31 + b * 13 + i) % 100); }

std::vector<std::byte> typed(DType dtype, size_t n, const std::function<double(size_t)>& at) {
  std::vector<std::byte> bytes(n * dtype_bytes(dtype));
  const auto put = [&](size_t i, auto x) { std::memcpy(bytes.data() + i * sizeof x, &x, sizeof x); };
  for (size_t i = 0; i < n; ++i) {
    const double x = at(i);
    switch (dtype) {
      case DType::f32:
        put(i, static_cast<float>(x));
        break;
      case DType::f64:
        put(i, x);
        break;
      case DType::bf16:
        put(i, comm::float_to_bf16(static_cast<float>(x)));
        break;
      case DType::f16:
        put(i, comm::float_to_f16(static_cast<float>(x)));
        break;
      case DType::u8:
        put(i, static_cast<uint8_t>(static_cast<int>(x)));
        break;
    }
  }
  return bytes;
}

std::vector<std::byte> sums(DType dtype, size_t ranks, size_t first, size_t n) {
  return typed(dtype, n, [&](size_t i) {
    double sum = 0;
    for (size_t r = 0; r < ranks; ++r) sum += value(r, first + i);
    return sum;
  });
}

/// Every collective, in every dtype that it takes, in place where that is legal.
void check_all(Communicator& comm, std::span<const size_t> sizes) {
  const auto ranks = static_cast<size_t>(comm.size()), me = static_cast<size_t>(comm.rank());
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16, DType::u8}) {
    for (const size_t n : sizes) {
      SCOPED_TRACE(testing::Message() << "rank " << me << " of " << ranks << ", " << dtype_name(dtype) << " n " << n);
      const size_t all = ranks * n, element = dtype_bytes(dtype);
      auto mine = typed(dtype, n, [&](size_t i) { return label(me, 0, i); });
      std::vector<std::byte> gathered(all * element), in_place(all * element);
      std::copy(mine.begin(), mine.end(), in_place.begin() + static_cast<ptrdiff_t>(me * n * element));
      EXPECT_COMM_OK(comm.all_gather(mine.data(), gathered.data(), n, dtype, {}, patient()), comm);
      EXPECT_COMM_OK(comm.all_gather(in_place.data() + me * n * element, in_place.data(), n, dtype, {}, patient()),
                     comm);
      const auto expected = typed(dtype, all, [&](size_t j) { return label(j / n, 0, j % n); });
      EXPECT_TRUE(gathered == expected && in_place == expected) << "all_gather";

      const auto out = typed(dtype, all, [&](size_t j) { return label(me, j / n, j % n); });
      EXPECT_COMM_OK(comm.all_to_all(out.data(), gathered.data(), n, dtype, {}, patient()), comm);
      EXPECT_TRUE(gathered == typed(dtype, all, [&](size_t j) { return label(j / n, me, j % n); })) << "all_to_all";

      const size_t root = ranks - 1;
      EXPECT_COMM_OK(comm.broadcast(mine.data(), n, dtype, static_cast<int>(root), {}, patient()), comm);
      EXPECT_TRUE(mine == typed(dtype, n, [&](size_t i) { return label(root, 0, i); })) << "broadcast";
      if (dtype == DType::u8) continue;

      auto send = typed(dtype, n, [&](size_t i) { return value(me, i); });
      std::vector<std::byte> recv(n * element);
      const auto before = send;
      EXPECT_COMM_OK(comm.all_reduce_sum(send.data(), recv.data(), n, dtype, {}, patient()), comm);
      EXPECT_TRUE(recv == sums(dtype, ranks, 0, n) && send == before) << "all_reduce";
      EXPECT_COMM_OK(comm.all_reduce_sum(send.data(), send.data(), n, dtype, {}, patient()), comm);
      EXPECT_TRUE(send == recv) << "all_reduce in place";

      const auto blocks = typed(dtype, all, [&](size_t j) { return value(me, j); });
      EXPECT_COMM_OK(comm.reduce_scatter_sum(blocks.data(), recv.data(), n, dtype, {}, patient()), comm);
      EXPECT_TRUE(recv == sums(dtype, ranks, me * n, n)) << "reduce_scatter";
    }
  }
}

TEST(MpiComm, EveryCollectiveInEveryDtype) {
  const auto comm = make();
  EXPECT_THAT(comm->description(), HasSubstr("MPI rank"));
  check_all(*comm, std::vector<size_t>{0, 1, 2, 63, 1000, 9001});
  EXPECT_STREQ(comm->last_error(), "");
}

// What happens to counts past INT_MAX, with a limit that small vectors pass: pieces of 40 bytes, segments of 96.
TEST(MpiComm, SplitMessagesGiveTheSame) {
  const auto comm = make({.call_bytes = 40, .segment_bytes = 96, .small_bytes = 0});
  check_all(*comm, std::vector<size_t>{1, 5, 10, 11, 12, 13, 24, 25, 100, 257});
}
TEST(MpiComm, DefaultLimitsFitAnInt) {
  EXPECT_LE(mpi::Limits{}.call_bytes, size_t{INT_MAX});
  EXPECT_LE(mpi::Limits{}.segment_bytes + 1024 * 8, size_t{INT_MAX});
  EXPECT_EQ(mpi::Limits{}.call_bytes % 16, 0u) << "pieces keep elements whole";
}

// In rank order, in one accumulator, whatever the path: small, one segment, several.
TEST(MpiComm, SumsAreInRankOrderAndIdenticalOnAllRanks) {
  for (const size_t segment : {size_t{8} << 20, size_t{64} << 10}) {
    const auto comm = make({.segment_bytes = segment});
    const auto ranks = static_cast<size_t>(comm->size()), me = static_cast<size_t>(comm->rank());
    for (const size_t n : {size_t{100}, size_t{50000}}) {
      std::vector<std::vector<float>> data(ranks, std::vector<float>(n));
      std::mt19937 random(1234);
      std::normal_distribution<float> normal;
      for (auto& of_rank : data) {
        for (float& x : of_rank) x = normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 40) - 20);
        of_rank[7] = -0.0f;
      }
      std::vector<float> expected = data[0], result(n);
      for (size_t r = 1; r < ranks; ++r) {
        for (size_t i = 0; i < n; ++i) expected[i] = expected[i] + data[r][i];
      }
      EXPECT_COMM_OK(comm->all_reduce_sum(data[me].data(), result.data(), n, DType::f32, {}, patient()), *comm);
      EXPECT_EQ(std::memcmp(result.data(), expected.data(), n * sizeof(float)), 0) << n;
      EXPECT_TRUE(std::signbit(result[7]));
    }
  }
}

TEST(MpiComm, SixteenBitSumsAccumulateInF32) {
  const auto comm = make();
  const int ranks = comm->size();
  uint16_t b = comm::float_to_bf16(comm->rank() == 0 ? 256.0f : 0.75f);  // 256.75 rounds to 256 at every step in bf16
  EXPECT_COMM_OK(comm->all_reduce_sum(&b, &b, 1, DType::bf16, {}, patient()), *comm);
  EXPECT_EQ(b, comm::float_to_bf16(256.0f + 0.75f * static_cast<float>(ranks - 1)));
  uint16_t h = comm::float_to_f16(40000.0f);
  EXPECT_COMM_OK(comm->all_reduce_sum(&h, &h, 1, DType::f16, {}, patient()), *comm);
  EXPECT_EQ(h, ranks == 1 ? comm::float_to_f16(40000.0f) : 0x7c00);
}

TEST(MpiComm, SplitByColorOrdersByKeyThenRank) {
  const auto comm = make();
  std::unique_ptr<Communicator> part;
  EXPECT_COMM_OK(comm->split(comm->rank() % 2, -comm->rank(), &part, patient()), *comm);
  ASSERT_EQ(part->size(), (comm->size() + 1 - comm->rank() % 2) / 2);
  EXPECT_EQ(part->rank(), part->size() - 1 - comm->rank() / 2);
  double sum = comm->rank(), expected = 0;
  for (int r = comm->rank() % 2; r < comm->size(); r += 2) expected += r;
  EXPECT_COMM_OK(part->all_reduce_sum(&sum, &sum, 1, DType::f64, {}, patient()), *part);
  EXPECT_EQ(sum, expected);
  EXPECT_COMM_OK(comm->barrier({}, patient()), *comm);
}

TEST(MpiComm, RandomDelaysDoNotMixUpCollectives) {
  const auto comm = make();
  const auto ranks = static_cast<size_t>(comm->size());
  std::mt19937 random(static_cast<unsigned>(comm->rank())), shared(99);
  for (int round = 0; round < 60; ++round) {
    if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
    const size_t n = shared() % 2 == 0 ? 3 : 9000;
    std::vector<float> x(n, static_cast<float>(comm->rank() + round)), all(ranks * n);
    ASSERT_TRUE(comm->all_gather(x.data(), all.data(), n, DType::f32, {}, patient()).ok()) << comm->last_error();
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], static_cast<float>(i / n) + static_cast<float>(round));
  }
}

/// All ranks fail with peer_mismatch, with `text`, and again at once afterwards. Another communicator goes on.
void expect_mismatch(const std::function<Status(Communicator&)>& call, const char* text) {
  const auto comm = make();
  if (comm->size() == 1) return;
  EXPECT_EQ(call(*comm).code(), StatusCode::peer_mismatch);
  EXPECT_THAT(comm->last_error(), HasSubstr(text));
  const std::string first = comm->last_error();
  EXPECT_EQ(comm->barrier({}, Deadline{}).code(), StatusCode::peer_mismatch);
  EXPECT_EQ(comm->last_error(), first);
}

TEST(MpiMismatch, IsNamedOnAllRanks) {
  std::vector<float> data(64);
  expect_mismatch(
      [&](Communicator& c) {
        return c.all_reduce_sum(data.data(), data.data(), c.rank() == 1 ? 7 : 8, DType::f32, {}, patient());
      },
      "rank 1 passed count 7, rank 0 passed 8");
  expect_mismatch(
      [&](Communicator& c) {
        return c.all_reduce_sum(data.data(), data.data(), 8, c.rank() == 1 ? DType::bf16 : DType::f32, {}, patient());
      },
      "rank 1 passed dtype bf16, rank 0 passed f32");
  expect_mismatch(
      [&](Communicator& c) {
        if (c.rank() == 1) return c.barrier({}, patient());
        return c.all_reduce_sum(data.data(), data.data(), 8, DType::f32, {}, patient());
      },
      "rank 1 called barrier, rank 0 called all_reduce");
  expect_mismatch([&](Communicator& c) { return c.broadcast(nullptr, 0, DType::u8, c.rank(), {}, patient()); },
                  "rank 1 passed root 1, rank 0 passed 0");
}

TEST(MpiTimeout, MissingRankIsNamedAndBuffersAreLeftAlone) {
  const auto comm = make();
  if (comm->size() == 1) GTEST_SKIP() << "needs a second rank";
  const int missing = comm->size() - 1;
  if (comm->rank() != missing) {
    std::vector<float> data(5000, 1.0f);
    EXPECT_EQ(comm->all_reduce_sum(data.data(), data.data(), data.size(), DType::f32, {}, Deadline::after(0.3)).code(),
              StatusCode::timeout);
    EXPECT_THAT(comm->last_error(), MatchesRegex("all_reduce: timeout after [0-9.]+ s: rank " +
                                                 std::to_string(missing) + " had not arrived"));
    EXPECT_THAT(data, testing::Each(1.0f));
  }
  MPI_Barrier(MPI_COMM_WORLD);
  if (comm->rank() == missing) {  // late: the same error at once
    EXPECT_EQ(comm->barrier({}, patient()).code(), StatusCode::timeout);
    EXPECT_THAT(comm->last_error(), HasSubstr("had not arrived"));
  }
}

TEST(MpiTimeout, RankZeroMissing) {
  const auto comm = make();
  if (comm->size() == 1) GTEST_SKIP() << "needs a second rank";
  if (comm->rank() != 0) {
    EXPECT_EQ(comm->barrier({}, Deadline::after(0.1)).code(), StatusCode::timeout);
    EXPECT_THAT(comm->last_error(), HasSubstr("rank 0 had not arrived"));
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST(MpiAbort, WakesWaitingRanksFromAnyThread) {
  const auto comm = make();
  if (comm->size() == 1) GTEST_SKIP() << "needs a second rank";
  if (comm->rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::thread([&] { comm->abort(); }).join();
  }
  float x = 0;
  EXPECT_EQ(comm->all_reduce_sum(&x, &x, 1, DType::f32, {}, patient()).code(), StatusCode::aborted);
  EXPECT_THAT(comm->last_error(), AllOf(HasSubstr("aborted"), HasSubstr("abort() was called")));
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST(MpiArguments, ABadCallFailsEveryRank) {
  const auto comm = make();
  if (comm->size() == 1) GTEST_SKIP() << "needs a second rank";
  float x = 0;
  const void* send = comm->rank() == 1 ? nullptr : &x;
  const Status status = comm->all_reduce_sum(send, &x, 1, DType::f32, {}, patient());
  EXPECT_EQ(status.code(), comm->rank() == 1 ? StatusCode::invalid_argument : StatusCode::peer_failed);
  EXPECT_THAT(comm->last_error(), HasSubstr("null send buffer with count 1"));
  MPI_Barrier(MPI_COMM_WORLD);
}

TEST(MpiArguments, EachIsChecked) {
  float x = 0;
  int device = 0;
  const auto fails = [&](const std::function<Status(Communicator&)>& call, StatusCode code, const char* text) {
    std::unique_ptr<Communicator> comm;
    ASSERT_TRUE(make_mpi(MPI_COMM_SELF, &comm).ok());
    EXPECT_EQ(call(*comm).code(), code);
    EXPECT_THAT(comm->last_error(), HasSubstr(text));
  };
  fails([&](Communicator& c) { return c.all_reduce_sum(&x, &x, 4, DType::u8, {}, patient()); }, StatusCode::unsupported,
        "dtype u8");
  fails([&](Communicator& c) { return c.all_to_all(&x, nullptr, 1, DType::f32, {}, patient()); },
        StatusCode::invalid_argument, "null receive buffer");
  fails([&](Communicator& c) { return c.broadcast(&x, 1, DType::f32, 1, {}, patient()); }, StatusCode::invalid_argument,
        "root 1 is outside");
  fails([&](Communicator& c) { return c.all_gather(&x, &x, SIZE_MAX / 2, DType::f32, {}, patient()); },
        StatusCode::invalid_argument, "overflows");
  fails([&](Communicator& c) { return c.barrier({&device}, patient()); }, StatusCode::unsupported, "device stream");
  fails([&](Communicator& c) { return c.split(0, 0, nullptr, patient()); }, StatusCode::invalid_argument, "split");
  Message why;
  EXPECT_EQ(make_mpi(MPI_COMM_NULL, nullptr, &why).code(), StatusCode::invalid_argument);
  std::unique_ptr<Communicator> comm;
  EXPECT_EQ(make_mpi(MPI_COMM_NULL, &comm, &why).code(), StatusCode::invalid_argument);
  EXPECT_THAT(why.text, HasSubstr("MPI_COMM_NULL"));
}

}  // namespace
}  // namespace gradgate

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  testing::InitGoogleTest(&argc, argv);
  if (rank != 0) {  // failures of the other ranks are printed, their list of tests is not
    testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
    struct Failures : testing::EmptyTestEventListener {
      void OnTestPartResult(const testing::TestPartResult& result) override {
        if (result.failed())
          std::fprintf(stderr, "%s:%d: %s\n", result.file_name(), result.line_number(), result.message());
      }
    };
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new Failures);
  }
  int failed = RUN_ALL_TESTS(), any = 0;
  MPI_Allreduce(&failed, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  MPI_Finalize();
  return any;
}
