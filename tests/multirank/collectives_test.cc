// Thread ranks: every collective on 1 … 8 ranks against the plain definition, in place where that is legal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "integration/comm/half.h"
#include "tests/support/rank_harness.h"

namespace gradgate {
namespace {

using test::make_group;
using test::patient;
using test::run_on;
using test::run_ranks;

constexpr size_t kSizes[] = {0, 1, 2, 63, 64, 65, 1000, 9001};  // the last is beyond what one rank does for all

class OnRanks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Collectives, OnRanks, testing::Values(1, 2, 3, 4, 5, 8), testing::PrintToStringParamName());

double value(int rank, size_t i) {
  return (rank + 1) * 3 - static_cast<double>(i % 17) - 0.25 * static_cast<double>(i % 5);
}

/// A typed vector that is written as doubles.
struct Typed {
  Typed(DType t, size_t n, double fill = -99) : dtype(t), bytes(n * dtype_bytes(t)) {
    for (size_t i = 0; i < n; ++i) set(i, fill);
  }
  void set(size_t i, double x) {
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
  template <class T>
  void put(size_t i, T x) {
    std::memcpy(bytes.data() + i * sizeof x, &x, sizeof x);
  }
  DType dtype;
  std::vector<std::byte> bytes;
};

// What a sum must be, for elements [first, first + n) of value(). All values are multiples of 1/4 below 32, exact in
// every dtype, and so are their sums in the accumulator: only the final rounding, which Typed applies, can lose
// anything.
std::vector<std::byte> expected_sum(DType dtype, int ranks, size_t first, size_t n) {
  Typed sum(dtype, n);
  for (size_t i = 0; i < n; ++i) {
    double exact = 0;
    for (int r = 0; r < ranks; ++r) exact += value(r, first + i);
    sum.set(i, exact);
  }
  return sum.bytes;
}

/// Small numbers that every dtype holds.
double label(size_t a, size_t b, size_t i) { return static_cast<double>((a * 31 + b * 13 + i) % 100); }

TEST_P(OnRanks, AllReduceSumsInEveryDtype) {
  const int ranks = GetParam();
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const size_t n : kSizes) {
      const std::vector<std::byte> expected = expected_sum(dtype, ranks, 0, n);
      run_ranks(ranks, [&](Communicator& comm) {
        Typed send(dtype, n), recv(dtype, n);
        for (size_t i = 0; i < n; ++i) send.set(i, value(comm.rank(), i));
        const std::vector<std::byte> before = send.bytes;
        GRADGATE_EXPECT_OK(comm.all_reduce_sum(send.bytes.data(), recv.bytes.data(), n, dtype, {}, patient()), comm);
        EXPECT_TRUE(recv.bytes == expected) << dtype_name(dtype) << " n " << n;
        EXPECT_TRUE(send.bytes == before) << dtype_name(dtype) << " n " << n;
        GRADGATE_EXPECT_OK(comm.all_reduce_sum(send.bytes.data(), send.bytes.data(), n, dtype, {}, patient()), comm);
        EXPECT_TRUE(send.bytes == expected) << "in place, " << dtype_name(dtype) << " n " << n;
      });
    }
  }
}

TEST_P(OnRanks, GatherScatterAndBroadcast) {
  const int ranks = GetParam();
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16, DType::u8}) {
    for (const size_t n : kSizes) {
      run_ranks(ranks, [&](Communicator& comm) {
        const auto me = static_cast<size_t>(comm.rank()), all = static_cast<size_t>(ranks) * n;
        // all_gather, out of place and in place.
        Typed mine(dtype, n), gathered(dtype, all), in_place(dtype, all), expected(dtype, all);
        for (size_t i = 0; i < n; ++i) {
          mine.set(i, label(me, 0, i));
          in_place.set(me * n + i, label(me, 0, i));
        }
        for (size_t j = 0; j < all; ++j) expected.set(j, label(j / n, 0, j % n));
        GRADGATE_EXPECT_OK(comm.all_gather(mine.bytes.data(), gathered.bytes.data(), n, dtype, {}, patient()), comm);
        std::byte* own = in_place.bytes.data() + me * n * dtype_bytes(dtype);
        GRADGATE_EXPECT_OK(comm.all_gather(own, in_place.bytes.data(), n, dtype, {}, patient()), comm);
        EXPECT_TRUE(gathered.bytes == expected.bytes) << dtype_name(dtype) << " n " << n;
        EXPECT_TRUE(in_place.bytes == expected.bytes) << "in place, " << dtype_name(dtype) << " n " << n;
        // all_to_all: block r of rank q arrives as block q of rank r.
        Typed out(dtype, all), in(dtype, all);
        for (size_t j = 0; j < all; ++j) {
          out.set(j, label(me, j / n, j % n));
          expected.set(j, label(j / n, me, j % n));
        }
        GRADGATE_EXPECT_OK(comm.all_to_all(out.bytes.data(), in.bytes.data(), n, dtype, {}, patient()), comm);
        EXPECT_TRUE(in.bytes == expected.bytes) << dtype_name(dtype) << " n " << n;
        // broadcast from the first and the last rank.
        for (const int root : {0, ranks - 1}) {
          Typed data(dtype, n), from_root(dtype, n);
          for (size_t i = 0; i < n; ++i) {
            data.set(i, label(me, 1, i));
            from_root.set(i, label(static_cast<size_t>(root), 1, i));
          }
          GRADGATE_EXPECT_OK(comm.broadcast(data.bytes.data(), n, dtype, root, {}, patient()), comm);
          EXPECT_TRUE(data.bytes == from_root.bytes) << dtype_name(dtype) << " n " << n;
        }
        if (dtype == DType::u8) return;
        Typed blocks(dtype, all), sum(dtype, n);
        for (size_t j = 0; j < all; ++j) blocks.set(j, value(comm.rank(), j));
        GRADGATE_EXPECT_OK(comm.reduce_scatter_sum(blocks.bytes.data(), sum.bytes.data(), n, dtype, {}, patient()),
                           comm);
        EXPECT_TRUE(sum.bytes == expected_sum(dtype, ranks, me * n, n)) << dtype_name(dtype) << " n " << n;
      });
    }
  }
}

TEST_P(OnRanks, ZeroCountsTakeNullBuffers) {
  run_ranks(GetParam(), [](Communicator& comm) {
    GRADGATE_EXPECT_OK(comm.all_reduce_sum(nullptr, nullptr, 0, DType::f32, {}, patient()), comm);
    GRADGATE_EXPECT_OK(comm.all_gather(nullptr, nullptr, 0, DType::f32, {}, patient()), comm);
    GRADGATE_EXPECT_OK(comm.all_to_all(nullptr, nullptr, 0, DType::u8, {}, patient()), comm);
    GRADGATE_EXPECT_OK(comm.reduce_scatter_sum(nullptr, nullptr, 0, DType::f64, {}, patient()), comm);
    GRADGATE_EXPECT_OK(comm.broadcast(nullptr, 0, DType::u8, 0, {}, patient()), comm);
    GRADGATE_EXPECT_OK(comm.barrier({}, patient()), comm);
    EXPECT_STREQ(comm.last_error(), "");
  });
}

// Sums are taken in rank order and in one accumulator, so every rank has the same bits, equal to the obvious loop.
TEST_P(OnRanks, SumsAreInRankOrderAndIdenticalOnAllRanks) {
  const int ranks = GetParam();
  const size_t n = 50000;
  std::vector<std::vector<float>> data(static_cast<size_t>(ranks), std::vector<float>(n)), result = data;
  std::mt19937 random(1234);
  std::normal_distribution<float> normal;
  for (auto& of_rank : data) {
    for (float& x : of_rank) x = normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 40) - 20);
    of_rank[7] = -0.0f;
  }
  std::vector<float> expected = data[0];
  for (size_t r = 1; r < data.size(); ++r) {
    for (size_t i = 0; i < n; ++i) expected[i] = expected[i] + data[r][i];
  }
  run_ranks(ranks, [&](Communicator& comm) {
    const auto me = static_cast<size_t>(comm.rank());
    GRADGATE_EXPECT_OK(comm.all_reduce_sum(data[me].data(), result[me].data(), n, DType::f32, {}, patient()), comm);
  });
  for (const auto& of_rank : result) EXPECT_EQ(std::memcmp(of_rank.data(), expected.data(), n * sizeof(float)), 0);
  EXPECT_TRUE(std::signbit(result[0][7])) << "-0 on all ranks must stay -0";
}

// 256 + 7 ones: bf16 accumulation would stop at 256; 2^14 eight times does not fit f16 and must become Inf, not a large
// number.
TEST(Collectives, SixteenBitSumsAccumulateInF32AndOverflowToInf) {
  run_ranks(8, [](Communicator& comm) {
    uint16_t b = comm::float_to_bf16(comm.rank() == 0 ? 256.0f : 1.0f);
    GRADGATE_EXPECT_OK(comm.all_reduce_sum(&b, &b, 1, DType::bf16, {}, patient()), comm);
    EXPECT_EQ(comm::bf16_to_float(b), 264.0f);  // 263 rounds to 264, the even neighbour
    uint16_t h = comm::float_to_f16(16384.0f);
    GRADGATE_EXPECT_OK(comm.all_reduce_sum(&h, &h, 1, DType::f16, {}, patient()), comm);
    EXPECT_EQ(h, 0x7c00);
  });
}

TEST(Collectives, RandomDelaysDoNotMixUpCollectives) {
  run_ranks(5, [](Communicator& comm) {
    std::mt19937 random(static_cast<unsigned>(comm.rank()));
    std::mt19937 shared(99);
    for (int round = 0; round < 150; ++round) {
      if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      const size_t n = shared() % 2 == 0 ? 3 : 9000;
      std::vector<float> x(n, static_cast<float>(comm.rank() + round));
      if (shared() % 2 == 0) {
        GRADGATE_EXPECT_OK(comm.all_reduce_sum(x.data(), x.data(), n, DType::f32, {}, patient()), comm);
        ASSERT_THAT(x, testing::Each(10.0f + 5.0f * static_cast<float>(round)));
      } else {
        std::vector<float> all(5 * n);
        GRADGATE_EXPECT_OK(comm.all_gather(x.data(), all.data(), n, DType::f32, {}, patient()), comm);
        for (size_t i = 0; i < all.size(); ++i)
          ASSERT_EQ(all[i], static_cast<float>(i / n) + static_cast<float>(round));
      }
    }
  });
}

TEST(Collectives, SplitByColorOrdersByKeyThenRank) {
  run_ranks(6, [](Communicator& comm) {
    std::unique_ptr<Communicator> part, nested;
    // Even ranks in one part, odd ranks in the other, in descending order of rank.
    GRADGATE_EXPECT_OK(comm.split(comm.rank() % 2, -comm.rank(), &part, patient()), comm);
    ASSERT_EQ(part->size(), 3);
    EXPECT_EQ(part->rank(), 2 - comm.rank() / 2);
    EXPECT_STREQ(part->description(), "3 thread ranks");
    int64_t unused = 0;
    double sum = comm.rank();
    GRADGATE_EXPECT_OK(part->all_reduce_sum(&sum, &sum, 1, DType::f64, {}, patient()), *part);
    EXPECT_EQ(sum, comm.rank() % 2 == 0 ? 6.0 : 9.0);
    // All keys equal: by rank. The parent goes on working beside its parts.
    GRADGATE_EXPECT_OK(part->split(7, 0, &nested, patient()), *part);
    EXPECT_EQ(nested->rank(), part->rank());
    part.reset();
    GRADGATE_EXPECT_OK(nested->barrier({}, patient()), *nested);
    GRADGATE_EXPECT_OK(comm.broadcast(&unused, 8, DType::u8, 5, {}, patient()), comm);
  });
}

TEST(Collectives, GroupArgumentsAndDescriptions) {
  std::unique_ptr<ThreadGroup> group;
  EXPECT_EQ(ThreadGroup::create(0, &group).code(), StatusCode::invalid_argument);
  EXPECT_EQ(ThreadGroup::create(1025, &group).code(), StatusCode::invalid_argument);
  EXPECT_EQ(ThreadGroup::create(2, nullptr).code(), StatusCode::invalid_argument);
  ASSERT_TRUE(ThreadGroup::create(4, &group).ok());
  EXPECT_STREQ(group->rank(3).description(), "4 thread ranks");
  EXPECT_STREQ(make_group(1)->rank(0).description(), "1 thread rank");
  EXPECT_EQ(group->rank(3).rank(), 3);
  EXPECT_FALSE(group->rank(0).virtual_clock());
  EXPECT_TRUE(group->rank(0).supports(Collective::all_gather, DType::u8));
  EXPECT_FALSE(group->rank(0).supports(Collective::all_reduce, DType::u8));
  EXPECT_STREQ(collective_name(Collective::reduce_scatter), "reduce_scatter");
}

TEST(Half, EveryF16ValueWidensExactlyAndComesBack) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const auto half = static_cast<uint16_t>(h);
    const float wide = comm::f16_to_float(half);
    const int exponent = (h >> 10) & 31, mantissa = h & 1023;
    if (exponent == 31 && mantissa != 0) {
      EXPECT_TRUE(std::isnan(wide));
      EXPECT_EQ(comm::float_to_f16(wide) & 0x7fff, 0x7e00);
      continue;
    }
    const double magnitude = exponent == 31  ? INFINITY
                             : exponent == 0 ? std::ldexp(mantissa, -24)
                                             : std::ldexp(1024 + mantissa, exponent - 25);
    ASSERT_EQ(wide, (h & 0x8000) ? -magnitude : magnitude) << h;
    ASSERT_EQ(comm::float_to_f16(wide), half);
  }
}

// Between any two neighbours the middle goes to the even one, and everything else to the nearer one.
TEST(Half, NarrowingRoundsToNearestEven) {
  for (uint32_t h = 0; h < 0x7c00; ++h) {
    const float low = comm::f16_to_float(static_cast<uint16_t>(h));
    const float high = h + 1 == 0x7c00 ? 65536.0f : comm::f16_to_float(static_cast<uint16_t>(h + 1));
    const float middle = low + (high - low) / 2;
    ASSERT_EQ(comm::float_to_f16(middle), h % 2 == 0 ? h : h + 1);
    ASSERT_EQ(comm::float_to_f16(std::nextafter(middle, 0.0f)), h);
    ASSERT_EQ(comm::float_to_f16(-std::nextafter(middle, INFINITY)), (h + 1) | 0x8000);
  }
  for (uint32_t b = 0; b < 0x7f80; ++b) {
    const float low = comm::bf16_to_float(static_cast<uint16_t>(b));
    const double high = b + 1 == 0x7f80 ? 0x1p128 : comm::bf16_to_float(static_cast<uint16_t>(b + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(comm::float_to_bf16(middle), b % 2 == 0 ? b : b + 1);
    ASSERT_EQ(comm::float_to_bf16(std::nextafter(middle, 0.0f)), b);
    ASSERT_EQ(comm::float_to_bf16(-std::nextafter(middle, INFINITY)), (b + 1) | 0x8000);
  }
  EXPECT_EQ(comm::float_to_bf16(NAN), 0x7fc0);
}

}  // namespace
}  // namespace gradgate
