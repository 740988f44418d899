// Exchanges on devices over NCCL: the same machine, so the same bytes as on thread ranks; the law; and failures, which
// reach every rank and leave every gradient alone.
#include <gmock/gmock.h>

#include "tests/gpu/nccl_ranks.h"

namespace gradgate::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Ranks filled(int size, size_t n, DType dtype, Gen gen) {
  Ranks ranks(size, n, dtype);
  for (size_t r = 0; r < ranks.gradients.size(); ++r) {
    ranks.gradients[r] = Gradient::of(gen, n, 17 * r + n, dtype);
    for (size_t i = 0; i < n; ++i)
      ranks.residuals[r][i] = static_cast<float>(static_cast<int>((i * 7 + r) % 5) - 2) * 0.25f;
  }
  return ranks;
}

void expect_equal(const Ranks& device, const Ranks& host, const std::string& what) {
  for (size_t r = 0; r < host.gradients.size(); ++r) {
    EXPECT_TRUE(device.gradients[r] == host.gradients[r]) << what << ": gradient of rank " << r;
    EXPECT_EQ(std::memcmp(device.residuals[r].data(), host.residuals[r].data(), host.count * sizeof(float)), 0)
        << what << ": residual of rank " << r;
  }
}

class EveryCandidate : public NcclRanks, public testing::WithParamInterface<const char*> {};

// What NCCL sums has no fixed order, and NaNs of its own: whole numbers where no codec comes after it.
Gen data_for(const Candidate& candidate, bool one_node, size_t n) {
  if (candidate.exchange == Exchange::all_reduce) return Gen::integers;
  if (candidate.exchange == Exchange::hierarchical && one_node) return Gen::integers;
  return n == 257 ? Gen::non_finite : Gen::gaussian;
}

TEST_P(EveryCandidate, EndsWithTheBytesOfThreadRanks) {
  const Candidate candidate = candidate_of(GetParam());
  for (const int size : {2, 3, 4}) {
    const auto nodes = nodes_of(size == 3 ? 1 : 2);  // 1, 3 and 2 of them
    for (const size_t n : {size_t{0}, size_t{1}, size_t{257}, size_t{5000}, size_t{65537}}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        if (!codec_takes(candidate.codec, dtype)) continue;
        if (dtype == DType::bf16 && n != 5000) continue;
        const Feedback feedback = candidate.codec.feedback ? Feedback::apply : Feedback::none;
        Ranks host = filled(size, n, dtype, data_for(candidate, size == 2, n)), device = host;
        const std::vector<Outcome> expected = exchange(host, candidate, feedback, 5, nodes);
        const std::vector<Outcome> got = exchange_on_devices(device, candidate, feedback, 5, nodes);
        expect_all_ok(expected);
        expect_all_ok(got);
        const std::string what =
            std::string(GetParam()) + ", " + std::to_string(size) + " ranks, n " + std::to_string(n);
        expect_equal(device, host, what);
        for (size_t r = 0; r < got.size(); ++r)
          EXPECT_EQ(got[r].times.non_finite, expected[r].times.non_finite) << what << ", rank " << r;
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Device, EveryCandidate,
                         testing::Values("bf16", "fp16", "int8", "int8:sr", "fp8", "int4", "int4:hadamard", "onebit",
                                         "chunk-topk:8/1024", "chunk-topk:8/1024:bf16", "int8@all_gather",
                                         "chunk-topk:8/1024@all_gather", "onebit@all_gather", "topk:0.01",
                                         "topk:0.01:int8", "chunk-topk:8/1024:int8", "randk:0.01@all_gather",
                                         "randk:0.01", "randk:0.05:bf16", "bf16@all_reduce", "int8:sr@hierarchical",
                                         "topk:0.01@hierarchical", "chunk-topk:8/1024@hierarchical"),
                         [](const auto& at) { return test_name(at.param); });

using DeviceExchange = NcclRanks;

// Dense: scaled, then summed by NCCL. Sums of small integers times a power of two are exact in any order.
TEST_F(DeviceExchange, DenseIsScaledThenSummed) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Ranks host = filled(4, 1000, dtype, Gen::integers), device = host;
    expect_all_ok(exchange(host, dense_candidate(), Feedback::none, 0));
    expect_all_ok(exchange_on_devices(device, dense_candidate(), Feedback::none, 0));
    expect_equal(device, host, dtype_name(dtype));
  }
}

TEST_F(DeviceExchange, AFlushSendsTheResidualToo) {
  Ranks host = filled(4, 3000, DType::f32, Gen::integers), device = host;
  expect_all_ok(exchange(host, dense_candidate(), Feedback::flush, 0));
  expect_all_ok(exchange_on_devices(device, dense_candidate(), Feedback::flush, 0));
  expect_equal(device, host, "flush");
}

// The law over steps that compress, skip the codec and flush: N · Σ out + Σ e = Σ Σ g, with == on integers.
TEST_F(DeviceExchange, NothingIsLost) {
  constexpr int kSize = 4;
  constexpr size_t kCount = 4096;
  Ranks ranks(kSize, kCount, DType::f32);
  std::vector<double> sent(kCount, 0.0), received(kCount, 0.0);
  const Candidate candidates[] = {candidate_of("chunk-topk:8/1024"), candidate_of("chunk-topk:8/1024@all_gather"),
                                  candidate_of("randk:0.1"), candidate_of("chunk-topk:8/1024@hierarchical")};
  for (uint32_t step = 0; step < 10; ++step) {
    for (size_t r = 0; r < kSize; ++r) {
      ranks.gradients[r] = Gradient::of(Gen::integers, kCount, 100 * step + r, DType::f32);
      for (size_t i = 0; i < kCount; ++i) sent[i] += static_cast<const float*>(ranks.gradients[r].data())[i];
    }
    const bool flush = step % 5 == 4;
    expect_all_ok(exchange_on_devices(ranks, flush ? dense_candidate() : candidates[step % 4],
                                      flush ? Feedback::flush : Feedback::apply, step, nodes_of(2)));
    for (size_t i = 0; i < kCount; ++i) received[i] += kSize * static_cast<const float*>(ranks.gradients[0].data())[i];
    for (size_t r = 1; r < kSize; ++r) EXPECT_TRUE(ranks.gradients[r] == ranks.gradients[0]) << "rank " << r;
    std::vector<double> left(kCount, 0.0);
    for (const auto& residual : ranks.residuals) {
      for (size_t i = 0; i < kCount; ++i) left[i] += residual[i];
    }
    for (size_t i = 0; i < kCount; ++i)
      ASSERT_EQ(received[i] + left[i], sent[i]) << "element " << i << " after step " << step;
  }
}

Status perform(Communicator& comm, const CollectiveCall& call, Stream stream) {
  switch (call.kind) {
    case Collective::all_reduce:
      return comm.all_reduce_sum(call.send, call.recv, call.count, call.dtype, stream, patient());
    case Collective::reduce_scatter:
      return comm.reduce_scatter_sum(call.send, call.recv, call.count, call.dtype, stream, patient());
    case Collective::all_to_all:
      return comm.all_to_all(call.send, call.recv, call.count, call.dtype, stream, patient());
    default:
      return comm.all_gather(call.send, call.recv, call.count, call.dtype, stream, patient());
  }
}

/// Drives a machine by hand; `after` may do damage once a collective has been performed.
std::vector<Outcome> drive(Ranks& ranks, const Candidate& candidate, const std::function<void(ExchangeArgs&)>& change,
                           const std::function<void(int rank, int collective, const CollectiveCall&)>& after,
                           int failing = -1) {
  std::vector<Outcome> outcomes(ranks.gradients.size());
  run_nccl_ranks(ranks.size(), [&](Communicator& comm) {
    ExchangeArgs host = ranks.args(comm.rank(), candidate, Feedback::none, 11);
    if (change) change(host);
    const NodeTiers tiers = tiers_of(comm, host.shape);
    DeviceRank rank(host);
    Outcome& outcome = outcomes[static_cast<size_t>(comm.rank())];
    ExchangeMachine machine;
    ASSERT_TRUE(machine.begin(rank.args).ok()) << machine.last_error();
    if (failing == comm.rank()) machine.fail(StatusCode::out_of_memory);
    for (int collective = 1;; ++collective) {
      CollectiveCall call;
      outcome.status = machine.next(&call);
      outcome.why.format("%s", machine.last_error());
      if (!outcome.status.ok() || call.kind == Collective::none) break;
      const Stream stream = rank.place.stream;
      Communicator& on = call.tier == Tier::node ? *tiers.node : call.tier == Tier::between ? *tiers.between : comm;
      GRADGATE_EXPECT_OK(perform(on, call, stream), on);
      if (after) {
        GRADGATE_EXPECT_OK(comm.wait(stream, patient()), comm);
        after(comm.rank(), collective, call);
      }
    }
    Message why;
    const Status found = rank.finish(comm, host, &outcome.times, &why);
    if (outcome.status.ok()) outcome.status = found, outcome.why = why;
  });
  return outcomes;
}

std::vector<std::byte> flipped(const void* device, size_t at) {
  std::vector<std::byte> byte(1);
  EXPECT_EQ(cudaMemcpy(byte.data(), static_cast<const std::byte*>(device) + at, 1, cudaMemcpyDeviceToHost),
            cudaSuccess);
  byte[0] ^= std::byte{0x40};
  return byte;
}

// COL-9: a bit that flips on the way, in the first or the second collective.
TEST_F(DeviceExchange, DamageStopsEveryRankBeforeItsGradientChanges) {
  for (const int collective : {1, 2}) {
    Ranks ranks = filled(3, 3000, DType::f32, Gen::gaussian);
    const Ranks before = ranks;
    const auto outcomes = drive(ranks, candidate_of("int8"), {}, [&](int rank, int done, const CollectiveCall& call) {
      if (rank != 1 || done != collective) return;
      // Rank 0's payload as rank 1 received it: the magic.
      const std::vector<std::byte> byte = flipped(call.recv, 0);
      ASSERT_CUDA(cudaMemcpy(call.recv, byte.data(), 1, cudaMemcpyHostToDevice));
    });
    EXPECT_EQ(outcomes[1].status.code(), StatusCode::bad_payload) << outcomes[1].why.text;
    EXPECT_THAT(outcomes[1].why.text, AllOf(HasSubstr("damaged payload from rank 0"), HasSubstr("magic")));
    EXPECT_TRUE(ranks.gradients[1] == before.gradients[1]);
    if (collective == 2) continue;  // only its receiver saw it
    for (const size_t r : {0, 2}) {
      EXPECT_EQ(outcomes[r].status.code(), StatusCode::peer_failed) << r;
      EXPECT_THAT(outcomes[r].why.text, HasSubstr("rank 1 failed"));
      EXPECT_TRUE(ranks.gradients[r] == before.gradients[r]) << r;
    }
  }
}

TEST_F(DeviceExchange, ABadIndexOfAnyShardStopsTheWholeDecode) {
  Ranks ranks = filled(2, 4096, DType::f32, Gen::gaussian);
  const Ranks before = ranks;
  const Candidate candidate = candidate_of("chunk-topk:8/1024");
  const auto outcomes = drive(ranks, candidate, {}, [&](int rank, int done, const CollectiveCall& call) {
    if (rank != 0 || done != 2) return;
    // The last index of the last shard becomes one that its chunk does not have.
    const uint16_t wrong = 0xffff;
    auto* last = static_cast<std::byte*>(call.recv) + 2 * call.count - 2;
    ASSERT_CUDA(cudaMemcpy(last, &wrong, 2, cudaMemcpyHostToDevice));
  });
  EXPECT_EQ(outcomes[0].status, (Status{StatusCode::bad_payload, static_cast<int64_t>(PayloadFault::index)}));
  EXPECT_THAT(outcomes[0].why.text, AllOf(HasSubstr("damaged payload from rank 1"), HasSubstr("index")));
  EXPECT_TRUE(ranks.gradients[0] == before.gradients[0]);
  EXPECT_TRUE(outcomes[1].status.ok()) << outcomes[1].why.text;
}

// COL-8: a rank that cannot go on still takes part, and all others learn of it.
TEST_F(DeviceExchange, AFailingRankIsReportedByAll) {
  for (const char* text : {"int8", "chunk-topk:8/1024", "int8@all_gather"}) {
    Ranks ranks = filled(3, 3000, DType::f32, Gen::gaussian);
    const Ranks before = ranks;
    const auto outcomes = drive(ranks, candidate_of(text), {}, {}, 2);
    EXPECT_EQ(outcomes[2].status.code(), StatusCode::out_of_memory) << text;
    for (const size_t r : {0, 1}) {
      EXPECT_EQ(outcomes[r].status.code(), StatusCode::peer_failed) << text << ": " << outcomes[r].why.text;
      EXPECT_THAT(outcomes[r].why.text, HasSubstr("rank 2 failed: ")) << text;
    }
    for (size_t r = 0; r < 3; ++r) EXPECT_TRUE(ranks.gradients[r] == before.gradients[r]) << text << ", rank " << r;
  }
}

// A sum names no rank, and a node hears of another one's failure from its own ranks.
TEST_F(DeviceExchange, AFailingRankIsReportedByAllWithoutHeaders) {
  for (const char* text : {"randk:0.01", "int8@hierarchical"}) {
    Ranks ranks = filled(4, 3000, DType::f32, Gen::gaussian);
    const Ranks before = ranks;
    const auto outcomes = drive(ranks, candidate_of(text), nodes_of(2), {}, 2);
    for (size_t r = 0; r < 4; ++r) {
      EXPECT_EQ(outcomes[r].status.code(), r == 2 ? StatusCode::out_of_memory : StatusCode::peer_failed)
          << text << ", rank " << r << ": " << outcomes[r].why.text;
      EXPECT_THAT(outcomes[r].why.text, HasSubstr("failed")) << text << ", rank " << r;
      EXPECT_TRUE(ranks.gradients[r] == before.gradients[r]) << text << ", rank " << r;
    }
  }
}

TEST_F(DeviceExchange, AStepBehindIsAMismatchOnAllWithoutHeaders) {
  for (const char* text : {"randk:0.01", "int8@hierarchical"}) {
    Ranks ranks = filled(4, 3000, DType::f32, Gen::gaussian);
    const Ranks before = ranks;
    const auto outcomes = exchange_on_devices(ranks, candidate_of(text), Feedback::none, 11, [](ExchangeArgs& args) {
      args.shape.ranks_per_node = 2;
      if (args.shape.rank == 1) args.seed.step = 10;
    });
    for (size_t r = 0; r < 4; ++r) {
      EXPECT_EQ(outcomes[r].status.code(), StatusCode::peer_mismatch) << text << ": " << outcomes[r].why.text;
      EXPECT_TRUE(ranks.gradients[r] == before.gradients[r]) << text << ", rank " << r;
    }
    if (candidate_of(text).exchange == Exchange::all_reduce) {
      EXPECT_THAT(outcomes[1].why.text, AllOf(HasSubstr("ranks differ"), HasSubstr("rank 1 is at step 10")));
    } else {
      EXPECT_THAT(outcomes[3].why.text, HasSubstr("step: rank 0 is at step 10, rank 1 at step 11"))
          << "in the numbers of the exchange between nodes";
    }
  }
}

// COL-7: other steps, other codecs.
TEST_F(DeviceExchange, DifferencesBetweenRanksNameFieldAndBothValues) {
  for (const char* text : {"int8", "int8@all_gather"}) {
    Ranks ranks = filled(2, 3000, DType::f32, Gen::gaussian);
    const Ranks before = ranks;
    const auto outcomes = drive(ranks, candidate_of(text),
                                [](ExchangeArgs& args) {
                                  if (args.shape.rank == 1) args.seed.step = 12;
                                },
                                {});
    EXPECT_EQ(outcomes[0].status.code(), StatusCode::peer_mismatch) << text << ": " << outcomes[0].why.text;
    EXPECT_THAT(outcomes[0].why.text, HasSubstr("step: rank 1 is at step 12, rank 0 at step 11")) << text;
    EXPECT_EQ(outcomes[1].status.code(), StatusCode::peer_mismatch) << text;
    EXPECT_THAT(outcomes[1].why.text, HasSubstr("step: rank 0 is at step 11, rank 1 at step 12")) << text;
    for (size_t r = 0; r < 2; ++r) EXPECT_TRUE(ranks.gradients[r] == before.gradients[r]) << text << ", rank " << r;
  }
  Ranks ranks = filled(2, 3000, DType::f32, Gen::gaussian);
  const auto outcomes = exchange_on_devices(ranks, candidate_of("int8"), Feedback::none, 1, [](ExchangeArgs& args) {
    if (args.shape.rank == 1) args.shape.candidate = candidate_of("fp8");
  });
  EXPECT_EQ(outcomes[0].status.code(), StatusCode::peer_mismatch) << outcomes[0].why.text;
  EXPECT_THAT(outcomes[0].why.text, HasSubstr("codec: rank 1 sent fp8, rank 0 has int8"));
}

TEST_F(DeviceExchange, ArgumentsOfBothPlacesAreToldApart) {
  Ranks ranks = filled(2, 300, DType::f32, Gen::gaussian);
  ExchangeArgs args = ranks.args(0, candidate_of("int8"), Feedback::none, 0);
  args.shape.device = true;
  std::vector<std::byte> workspace(exchange_workspace_bytes(args.shape));
  args.workspace = workspace;
  ExchangeMachine machine;
  EXPECT_EQ(machine.begin(args).code(), StatusCode::invalid_argument);
  EXPECT_THAT(machine.last_error(), HasSubstr("device"));
  // A machine between nodes needs a place in host memory.
  args.shape.candidate = candidate_of("int8@hierarchical");
  args.shape.ranks_per_node = 1;
  ExchangeRecord record;
  const DevicePlace place{{}, &record};
  args.device = &place;
  EXPECT_EQ(machine.begin(args).code(), StatusCode::invalid_argument);
  EXPECT_THAT(machine.last_error(), HasSubstr("DevicePlace::between"));
}

TEST_F(DeviceExchange, MarksSplitTheTimeByParts) {
  Ranks ranks = filled(2, 65536, DType::f32, Gen::gaussian);
  run_nccl_ranks(2, [&](Communicator& comm) {
    ExchangeArgs host = ranks.args(comm.rank(), candidate_of("int8"), Feedback::none, 1);
    DeviceRank rank(host);
    DeviceMarks first, marks;
    ASSERT_TRUE(first.create().ok());
    ASSERT_TRUE(marks.create().ok());
    ExchangeTimes times;
    EXPECT_EQ(marks.read(&times).code(), StatusCode::bad_state) << "nothing was marked yet";
    Message why;
    ASSERT_TRUE(enqueue_exchange(comm, rank.args, kWatchdogSeconds, &first, &why).ok()) << why.text;
    ASSERT_TRUE(enqueue_exchange(comm, rank.args, kWatchdogSeconds, &marks, &why).ok()) << why.text;
    ASSERT_TRUE(rank.finish(comm, host, &times, &why).ok()) << why.text;
    times = {};
    ASSERT_TRUE(marks.read(&times).ok());
    EXPECT_GT(times.encode_s, 0.0);
    EXPECT_GT(times.transfer_s, 0.0);
    EXPECT_GT(times.decode_s, 0.0);
    double step = 0;
    ASSERT_TRUE(marks.since(first, &step).ok());
    EXPECT_GE(step, (times.encode_s + times.transfer_s + times.decode_s) * 0.99);
  });
}

}  // namespace
}  // namespace gradgate::test
