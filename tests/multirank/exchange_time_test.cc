// What an exchange costs on the virtual clock, to the digit, and what a shadow run changes: nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/multirank/exchange_fixture.h"

namespace gradgate {
namespace {

using namespace test;

constexpr LinkSpec kLink{50e-6, 125e6};  // 1 Gbit/s
constexpr CodecRates kRates{1e9, 2e9};

TEST(Times, OfEachPartOnAVirtualClock) {
  constexpr size_t kCount = 1 << 20;
  run_ranks(4, [](Communicator& inner) {
    std::unique_ptr<Communicator> comm;
    ASSERT_TRUE(make_shaped(inner, kLink, ClockKind::virtual_time, &comm).ok());
    std::vector<float> g(kCount, 1.0f);
    ExchangeArgs args;
    args.gradient = {g.data(), kCount, DType::f32};
    ExchangeTimes times;
    Message why;
    args.shape = {dense_candidate(), kCount, DType::f32, inner.rank(), 4, 1};
    ASSERT_TRUE(run_exchange(*comm, args, kWatchdogSeconds, kRates, &times, &why).ok()) << why.text;
    EXPECT_EQ(times.encode_s, 0.0);
    EXPECT_EQ(times.decode_s, 0.0);
    EXPECT_NEAR(times.transfer_s, 2 * 3.0 / 4 * 4194304 / 125e6 + 6 * 50e-6, 1e-12);

    args.shape.candidate = default_candidate(spec_of("int8"));
    std::vector<std::byte> workspace(exchange_workspace_bytes(args.shape)), scratch(exchange_shadow_bytes(args.shape));
    args.workspace = workspace;
    ASSERT_TRUE(run_exchange(*comm, args, kWatchdogSeconds, kRates, &times, &why).ok()) << why.text;
    EXPECT_NEAR(times.encode_s, 4194304 / 1e9, 1e-12);
    EXPECT_NEAR(times.decode_s, 4194304 / 2e9, 1e-12);
    // 4 slots of 32 + 4·1024 + 262144 bytes, twice around the ring.
    EXPECT_EQ(exchange_wire_bytes(args.shape), 4u * (32 + 4096 + 262144));
    EXPECT_NEAR(times.transfer_s, 2 * (3.0 / 4 * 1065088 / 125e6 + 3 * 50e-6), 1e-12);

    // A shadow run charges the same codec work and no transfer.
    ExchangeTimes shadow;
    const double before = comm->now();
    ASSERT_TRUE(shadow_exchange(*comm, args, scratch, kRates, &shadow).ok());
    EXPECT_NEAR(shadow.encode_s, times.encode_s, 1e-12);
    EXPECT_NEAR(shadow.decode_s, times.decode_s, 1e-12);
    EXPECT_EQ(shadow.transfer_s, 0.0);
    EXPECT_NEAR(comm->now() - before, shadow.encode_s + shadow.decode_s, 1e-12);
  });
}

TEST(Times, WaitingForALateRankIsTransferOfTheOthers) {
  run_ranks(2, [](Communicator& inner) {
    std::unique_ptr<Communicator> comm;
    ASSERT_TRUE(make_shaped(inner, kLink, ClockKind::virtual_time, &comm).ok());
    if (inner.rank() == 1) comm->advance(0.5);
    std::vector<float> g(1000, 1.0f);
    ExchangeArgs args;
    args.shape = {dense_candidate(), g.size(), DType::f32, inner.rank(), 2, 1};
    args.gradient = {g.data(), g.size(), DType::f32};
    ExchangeTimes times;
    ASSERT_TRUE(run_exchange(*comm, args, kWatchdogSeconds, {}, &times, nullptr).ok());
    const double link = 4000 / 125e6 + 2 * 50e-6;
    EXPECT_NEAR(times.transfer_s, inner.rank() == 1 ? link : 0.5 + link, 1e-12);
  });
}

TEST(Times, OnARealClockAddUp) {
  run_ranks(2, [](Communicator& comm) {
    std::vector<float> g(100000, 1.0f);
    ExchangeArgs args;
    args.shape = {default_candidate(spec_of("int8")), g.size(), DType::f32, comm.rank(), 2, 1};
    args.gradient = {g.data(), g.size(), DType::f32};
    std::vector<std::byte> workspace(exchange_workspace_bytes(args.shape));
    args.workspace = workspace;
    ExchangeTimes times;
    const double start = comm.now();
    ASSERT_TRUE(run_exchange(comm, args, kWatchdogSeconds, {}, &times, nullptr).ok());
    EXPECT_GT(times.encode_s, 0);
    EXPECT_GT(times.transfer_s, 0);
    EXPECT_GT(times.decode_s, 0);
    EXPECT_LE(times.encode_s + times.transfer_s + times.decode_s, comm.now() - start);
  });
}

TEST(Shadow, ChangesNothingAndNeedsItsScratch) {
  const auto group = make_group(3);  // the clock; no collective is called
  for (const char* text : {"bf16", "int8:ef", "chunk-topk:8/1024", "chunk-topk:1/32", "int8:ef@all_gather",
                           "chunk-topk:8/1024@all_gather", "topk:0.05", "randk:0.05", "bf16@all_reduce"}) {
    for (const size_t n : {1, 73, 1000, 5003}) {
      for (int rank = 0; rank < 3; ++rank) {
        const Candidate candidate = candidate_of(text);
        Gradient gradient = Gradient::of(Gen::gaussian, n, 5, DType::f32);
        const Gradient gradient_before = gradient;
        std::vector<float> residual = generate(Gen::heavy_tail, n, 6);
        const std::vector<float> residual_before = residual;
        ExchangeArgs args;
        args.shape = {candidate, n, DType::f32, rank, 3, 1};
        args.gradient = gradient.vec();
        args.feedback = candidate.codec.feedback ? Feedback::apply : Feedback::none;
        args.residual = candidate.codec.feedback ? residual.data() : nullptr;
        std::vector<std::byte> scratch(exchange_shadow_bytes(args.shape) + 3);
        ExchangeTimes times;
        const Bytes room = Bytes(scratch).subspan(3);
        EXPECT_TRUE(shadow_exchange(group->rank(rank), args, room, {}, &times).ok())
            << text << " n " << n << " rank " << rank;
        EXPECT_GT(times.encode_s, 0);
        EXPECT_GT(times.decode_s, 0);
        EXPECT_EQ(gradient, gradient_before);
        EXPECT_EQ(residual, residual_before);
        EXPECT_EQ(shadow_exchange(group->rank(rank), args, room.first(room.size() - 1), {}, &times),
                  Status(StatusCode::workspace_too_small, static_cast<int64_t>(room.size())));
        args.residual = nullptr;  // stands for zeros
        EXPECT_TRUE(shadow_exchange(group->rank(rank), args, room, {}, &times).ok());
      }
    }
  }
  ExchangeArgs dense;
  float g = 1;
  dense.shape = {dense_candidate(), 1, DType::f32, 0, 3, 1};
  dense.gradient = {&g, 1, DType::f32};
  ExchangeTimes times{1, 1, 1};
  EXPECT_EQ(exchange_shadow_bytes(dense.shape), 0u);
  EXPECT_TRUE(shadow_exchange(group->rank(0), dense, {}, {}, &times).ok());
  EXPECT_EQ(times.encode_s + times.transfer_s + times.decode_s, 0.0);
}

}  // namespace
}  // namespace gradgate
