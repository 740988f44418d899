// Exchanges against sequential reference code: results and residuals equal in every bit, on every rank, for any number of ranks and any length.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "integration/comm/half.h"
#include "tests/multirank/exchange_bench.h"
#include "tests/support/bytes_equal.h"
#include "tests/support/threads.h"

namespace gradgate {
namespace {

using namespace test;

constexpr int kRanks[] = {1, 2, 3, 4, 5, 8};
constexpr size_t kCounts[] = {0, 1, 2, 73, 255, 256, 257, 1000, 100003};

Candidate two_shot(const char* text) { return {spec_of(text), Exchange::two_shot}; }

void expect_identical(const Ranks& got, const Ranks& expected, const std::string& what) {
  SCOPED_TRACE(what);
  for (size_t r = 0; r < got.gradients.size(); ++r) {
    EXPECT_TRUE(bytes_equal(expected.gradients[r].data(), got.gradients[r].data(), got.gradients[r].bytes(), dtype_bytes(got.dtype))) << "gradient, rank " << r;
    EXPECT_TRUE(bytes_equal(expected.residuals[r].data(), got.residuals[r].data(), got.count * sizeof(float), 4)) << "residual, rank " << r;
  }
}

struct Case {
  const char* spec;
  DType dtype;
};
std::string case_name(const testing::TestParamInfo<Case>& info) { return test_name(std::string(info.param.spec) + "_" + dtype_name(info.param.dtype)); }

class TwoShot : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Exchange, TwoShot,
                         testing::Values(Case{"none", DType::f32}, Case{"none", DType::bf16}, Case{"bf16", DType::f32}, Case{"int8", DType::f32},
                                         Case{"int8", DType::bf16}, Case{"chunk-topk:8/1024", DType::f32}, Case{"chunk-topk:8/1024:bf16", DType::f32},
                                         Case{"chunk-topk:8/1024", DType::bf16}, Case{"chunk-topk:1/32", DType::f32}, Case{"chunk-topk:1/32", DType::bf16}),
                         case_name);

// Sanitizers slow the reference code down tenfold and more; one step of the longest vector is enough for them.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint32_t kStepsOfLong = 1;
#else
constexpr uint32_t kStepsOfLong = 3;
#endif

// Three steps each, so that the residuals of one step enter the next.
TEST_P(TwoShot, EqualsSequentialReferenceOnAllRanks) {
  const auto [text, dtype] = GetParam();
  const Candidate candidate = two_shot(text);
  for (const int size : kRanks) {
    if (size == 1) continue;  // nothing is encoded: tests below
    for (const size_t n : kCounts) {
      for (const bool feedback : {false, true}) {
        if (feedback && !takes_feedback(candidate.codec)) continue;
        Ranks got(size, n, dtype), expected(size, n, dtype);
        for (uint32_t step = 0; step < (n > 1000 ? kStepsOfLong : 3); ++step) {
          for (size_t r = 0; r < got.gradients.size(); ++r) {
            const Gen gen = step == 1 ? Gen::zero_groups : step == 2 ? Gen::heavy_tail : Gen::gaussian;
            got.gradients[r] = expected.gradients[r] = Gradient::of(gen, n, 100 * step + r, dtype);
          }
          expect_all_ok(exchange(got, candidate, feedback ? Feedback::apply : Feedback::none, step));
          reference_two_shot(expected, candidate.codec, feedback, step);
          expect_identical(got, expected, std::to_string(size) + " ranks, n " + std::to_string(n) + (feedback ? ", feedback" : "") + ", step " + std::to_string(step));
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

// Inf and NaN of one rank reach every rank, and where they do the residual is kept.
TEST_P(TwoShot, NonFiniteValuesAreTheSameEverywhere) {
  const auto [text, dtype] = GetParam();
  const Candidate candidate = two_shot(text);
  const bool feedback = takes_feedback(candidate.codec);
  Ranks got(3, 5000, dtype), expected(3, 5000, dtype);
  for (size_t r = 0; r < 3; ++r) {
    got.gradients[r] = expected.gradients[r] = Gradient::of(r == 1 ? Gen::non_finite : Gen::gaussian, 5000, r, dtype);
    for (size_t i = 0; i < 5000; ++i) got.residuals[r][i] = expected.residuals[r][i] = static_cast<float>(i % 7) * 0.001f;
  }
  expect_all_ok(exchange(got, candidate, feedback ? Feedback::apply : Feedback::none, 9));
  reference_two_shot(expected, candidate.codec, feedback, 9);
  expect_identical(got, expected, text);
}

TEST_P(TwoShot, ExecutorThreadsChangeNothing) {
  const auto [text, dtype] = GetParam();
  const Candidate candidate = two_shot(text);
  const Feedback feedback = takes_feedback(candidate.codec) ? Feedback::apply : Feedback::none;
  Ranks inline_ranks(2, 70001, dtype), threaded(2, 70001, dtype);
  for (size_t r = 0; r < 2; ++r) inline_ranks.gradients[r] = threaded.gradients[r] = Gradient::of(Gen::heavy_tail, 70001, r, dtype);
  expect_all_ok(exchange(inline_ranks, candidate, feedback, 1));
  expect_all_ok(exchange(threaded, candidate, feedback, 1, [](ExchangeArgs& args) {
    args.executor = threads(3);
    args.shape.width = 3;
  }));
  expect_identical(threaded, inline_ranks, text);
}

TEST_P(TwoShot, WorkspaceIsExactAndChecked) {
  const auto [text, dtype] = GetParam();
  Ranks ranks(1, 1000, dtype);
  ranks.gradients[0] = Gradient::of(Gen::gaussian, 1000, 1, dtype);
  ExchangeArgs args = ranks.args(0, two_shot(text), Feedback::none, 0);
  args.shape.ranks = 4;
  const size_t needed = exchange_workspace_bytes(args.shape);
  ASSERT_GT(needed, 2 * exchange_wire_bytes(args.shape));
  std::vector<std::byte> workspace(needed);
  args.workspace = Bytes(workspace).first(needed - 1);
  ExchangeMachine machine;
  EXPECT_EQ(machine.begin(args), Status(StatusCode::workspace_too_small, static_cast<int64_t>(needed)));
  EXPECT_THAT(machine.last_error(), testing::HasSubstr(std::to_string(needed)));
  CollectiveCall call;
  EXPECT_EQ(machine.next(&call).code(), StatusCode::bad_state);
  args.workspace = workspace;
  EXPECT_TRUE(machine.begin(args).ok());
}

// The other slots of a rank are payloads of shards; its own is unused and zero, and so is what a short shard leaves of its slot.
TEST_P(TwoShot, UnusedBytesOfSlotsAreZero) {
  const auto [text, dtype] = GetParam();
  Ranks ranks(1, 300, dtype);
  ranks.gradients[0] = Gradient::of(Gen::gaussian, 300, 1, dtype);
  ExchangeArgs args = ranks.args(0, two_shot(text), Feedback::none, 5);
  args.shape.ranks = 3;
  std::vector<std::byte> workspace(exchange_workspace_bytes(args.shape), std::byte{0xa5});
  args.workspace = workspace;
  ExchangeMachine machine;
  CollectiveCall call;
  ASSERT_TRUE(machine.begin(args).ok());
  ASSERT_TRUE(machine.next(&call).ok());
  ASSERT_EQ(call.kind, Collective::all_to_all);
  const size_t unit = std::max<size_t>(256, args.shape.candidate.codec.param1);
  const size_t slot = payload_bytes(args.shape.candidate.codec, dtype, unit);
  ASSERT_EQ(call.count, slot);
  const size_t counts[] = {std::min<size_t>(unit, 300), 300 - std::min<size_t>(unit, 300), 0};
  for (size_t r = 0; r < 3; ++r) {
    const auto* bytes = static_cast<const std::byte*>(call.send) + r * slot;
    const size_t used = r == 0 ? 0 : payload_bytes(args.shape.candidate.codec, dtype, counts[r]);
    EXPECT_EQ(std::count(bytes + used, bytes + slot, std::byte{0}), static_cast<std::ptrdiff_t>(slot - used)) << "slot " << r;
    if (r != 0) {
      EXPECT_TRUE(check_payload(args.shape.candidate.codec, dtype, counts[r], {bytes, used}).ok()) << "slot " << r;
    }
  }
}

// Longer than most sizes above and not a multiple of anything: n/ranks does not divide, the last shard is short.
TEST(Exchange, AMillionAndThreeElements) {
  for (const int size : {3, 4}) {
    Ranks got(size, 1000003, DType::f32), expected(size, 1000003, DType::f32);
    for (size_t r = 0; r < got.gradients.size(); ++r) got.gradients[r] = expected.gradients[r] = Gradient::of(Gen::gaussian, 1000003, r, DType::f32);
    expect_all_ok(exchange(got, two_shot("int8:ef"), Feedback::apply, 1));
    reference_two_shot(expected, spec_of("int8:ef"), true, 1);
    expect_identical(got, expected, std::to_string(size));
  }
}

#if defined(__SSE2__)
// One rank's thread flushes subnormals, as trainers set it: results are still the same everywhere, and the thread keeps its setting.
TEST(Environment, FlushToZeroChangesNothing) {
  for (const char* text : {"none", "int8:ef", "chunk-topk:8/1024"}) {
    const Candidate candidate = default_candidate(spec_of(text));
    const Feedback feedback = candidate.codec.feedback ? Feedback::apply : Feedback::none;
    Ranks plain(3, 30000, DType::f32), flushing(3, 30000, DType::f32);
    for (size_t r = 0; r < 3; ++r) plain.gradients[r] = flushing.gradients[r] = Gradient::of(Gen::subnormal, 30000, r, DType::f32);
    expect_all_ok(exchange(plain, candidate, feedback, 1));
    unsigned after = 0;
    run_ranks(3, [&](Communicator& comm) {
      const unsigned flush = _mm_getcsr() | 0x8040;
      if (comm.rank() != 0) _mm_setcsr(flush);
      ExchangeArgs args = flushing.args(comm.rank(), candidate, feedback, 1);
      std::vector<std::byte> workspace(exchange_workspace_bytes(args.shape));
      args.workspace = workspace;
      EXPECT_TRUE(run_exchange(comm, args, kWatchdogSeconds, {}, nullptr, nullptr).ok());
      if (comm.rank() == 1) after = _mm_getcsr() & 0x8040;
    });
    expect_identical(flushing, plain, text);
    EXPECT_EQ(after, 0x8040u);
    const auto& out = plain.gradients[0].f32;
    EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float x) { return x != 0 && std::fabs(x) < 0x1p-126f; })) << text << ": nothing to flush";
  }
}
#endif

// ---- dense -----------------------------------------------------------------------------------------------------------------------------------

// torch without a hook: every rank multiplies by 1/N in its dtype, then the sum.
float scaled(float g, int size) { return g * static_cast<float>(1.0 / size); }

TEST(Dense, IsScaleThenSumInEveryDtype) {
  for (const int size : kRanks) {
    for (const size_t n : kCounts) {
      Ranks f32(size, n, DType::f32), bf16(size, n, DType::bf16);
      std::vector<float> sum32(n), sum16(n);
      std::vector<double> sum64(n);
      std::vector<std::vector<double>> f64(static_cast<size_t>(size), std::vector<double>(n));
      std::vector<std::vector<uint16_t>> f16(static_cast<size_t>(size), std::vector<uint16_t>(n));
      std::vector<float> sum_f16(n);
      for (size_t r = 0; r < f32.gradients.size(); ++r) {
        const std::vector<float> values = generate(Gen::gaussian, n, r + 50);
        f32.gradients[r] = Gradient::of(values, DType::f32);
        bf16.gradients[r] = Gradient::of(values, DType::bf16);
        for (size_t i = 0; i < n; ++i) {
          f64[r][i] = values[i] * 1.000000001;
          f16[r][i] = comm::float_to_f16(values[i]);
          const float s = scaled(values[i], size), b = scaled(comm::bf16_to_float(bf16.gradients[r].bf16[i]), size);
          const float wide16 = comm::bf16_to_float(comm::float_to_bf16(b));
          const float wide_f16 = comm::f16_to_float(comm::float_to_f16(scaled(comm::f16_to_float(f16[r][i]), size)));
          sum32[i] = r == 0 ? s : sum32[i] + s;
          sum16[i] = r == 0 ? wide16 : sum16[i] + wide16;
          sum_f16[i] = r == 0 ? wide_f16 : sum_f16[i] + wide_f16;
          const double d = f64[r][i] * (1.0 / size);
          sum64[i] = r == 0 ? d : sum64[i] + d;
        }
      }
      if (size == 1) {  // nothing is even rounded
        sum32 = f32.gradients[0].f32;
        sum64 = f64[0];
      }
      expect_all_ok(exchange(f32, dense_candidate(), Feedback::none, 0));
      expect_all_ok(exchange(bf16, dense_candidate(), Feedback::none, 0));
      Ranks other(size, n, DType::f64), half(size, n, DType::f16);
      const auto use = [](auto& data, DType dtype) {
        return [&data, dtype](ExchangeArgs& args) {
          auto& vector = data[static_cast<size_t>(args.shape.rank)];
          args.gradient = {vector.data(), vector.size(), dtype};
        };
      };
      expect_all_ok(exchange(other, dense_candidate(), Feedback::none, 0, use(f64, DType::f64)));
      expect_all_ok(exchange(half, dense_candidate(), Feedback::none, 0, use(f16, DType::f16)));
      for (size_t r = 0; r < f32.gradients.size(); ++r) {
        EXPECT_TRUE(bytes_equal(sum32.data(), f32.gradients[r].data(), n * 4, 4)) << size << " ranks, n " << n;
        EXPECT_TRUE(bytes_equal(sum64.data(), f64[r].data(), n * 8, 8)) << size << " ranks, n " << n;
        for (size_t i = 0; i < n; ++i) {
          ASSERT_EQ(bf16.gradients[r].bf16[i], comm::float_to_bf16(sum16[i])) << size << " ranks, n " << n << " at " << i;
          ASSERT_EQ(f16[r][i], comm::float_to_f16(sum_f16[i])) << size << " ranks, n " << n << " at " << i;
        }
      }
    }
  }
}

// COL-6: lengths that no number of ranks divides.
TEST(Dense, MeansOfThreeAndFiveRanks) {
  for (const int size : {3, 5}) {
    for (const size_t n : {1, 2, 73}) {
      Ranks ranks(size, n, DType::f32);
      for (size_t r = 0; r < ranks.gradients.size(); ++r) {
        ranks.gradients[r].f32.resize(n);
        for (size_t i = 0; i < n; ++i) ranks.gradients[r].f32[i] = static_cast<float>(r + 1 + i);
      }
      expect_all_ok(exchange(ranks, dense_candidate(), Feedback::none, 0));
      for (size_t i = 0; i < n; ++i) {
        const float mean = static_cast<float>(size == 3 ? 2 + i : 3 + i);
        EXPECT_NEAR(ranks.gradients[1].f32[i], mean, mean * 0x1p-22f) << "1/N is rounded before the sum, as in torch";
      }
    }
  }
}

TEST(Dense, OverflowIsShownNotHidden) {
  Ranks ranks(2, 3, DType::f32);
  ranks.gradients[0] = Gradient::of({3e38f, INFINITY, 1.0f}, DType::f32);
  ranks.gradients[1] = Gradient::of({3e38f, 1.0f, NAN}, DType::f32);
  expect_all_ok(exchange(ranks, dense_candidate(), Feedback::none, 0));
  EXPECT_EQ(ranks.gradients[0].f32[0], 3e38f) << "scaled before it is summed";
  EXPECT_EQ(ranks.gradients[0].f32[1], INFINITY);
  EXPECT_TRUE(std::isnan(ranks.gradients[0].f32[2]));
  EXPECT_EQ(ranks.gradients[0], ranks.gradients[1]);
}

// ---- one rank, and no elements (COL-5, SHP-1, SHP-2) -------------------------------------------------------------------------------------

/// Fails the test if any collective is called.
class NoNetwork : public Communicator {
 public:
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  bool supports(Collective, DType) const noexcept override { return true; }
  const char* description() const noexcept override { return "no network"; }
  Status all_reduce_sum(const void*, void*, size_t, DType, Stream, Deadline) noexcept override { return called(); }
  Status all_gather(const void*, void*, size_t, DType, Stream, Deadline) noexcept override { return called(); }
  Status all_to_all(const void*, void*, size_t, DType, Stream, Deadline) noexcept override { return called(); }
  Status reduce_scatter_sum(const void*, void*, size_t, DType, Stream, Deadline) noexcept override { return called(); }
  Status broadcast(void*, size_t, DType, int, Stream, Deadline) noexcept override { return called(); }
  Status barrier(Stream, Deadline) noexcept override { return called(); }
  Status split(int, int, std::unique_ptr<Communicator>*, Deadline) noexcept override { return called(); }
  void abort() noexcept override {}
  double now() const noexcept override { return 0; }
  void advance(double) noexcept override { ADD_FAILURE() << "codec work was charged"; }
  bool virtual_clock() const noexcept override { return true; }
  const char* last_error() const noexcept override { return ""; }
  int rank_ = 0, size_ = 1;

 private:
  static Status called() {
    ADD_FAILURE() << "a collective was called";
    return StatusCode::internal;
  }
};

TEST(OneRank, OutputIsInputAndNothingIsSent) {
  NoNetwork comm;
  for (const char* text : {"none", "int8", "chunk-topk:1/32"}) {
    const Candidate candidate = default_candidate(spec_of(text));
    Ranks ranks(1, 3, DType::f32);
    ranks.gradients[0] = Gradient::of({1.1f, -2.2f, 3.3f}, DType::f32);
    for (uint32_t step = 0; step < 3; ++step) {
      const ExchangeArgs args = ranks.args(0, candidate, Feedback::none, step);
      EXPECT_EQ(exchange_workspace_bytes(args.shape), 0u);
      EXPECT_TRUE(run_exchange(comm, args, 1, {1e9, 1e9}, nullptr, nullptr).ok());
      EXPECT_EQ(ranks.gradients[0].f32, (std::vector<float>{1.1f, -2.2f, 3.3f}));
    }
    // What a residual holds is sent at once.
    for (const Feedback feedback : {Feedback::apply, Feedback::flush}) {
      ranks.gradients[0] = Gradient::of({1.0f, -2.0f, 0.0f}, DType::f32);
      ranks.residuals[0] = {0.5f, 0.25f, -4.0f};
      EXPECT_TRUE(run_exchange(comm, ranks.args(0, candidate, feedback, 4), 1, {1e9, 1e9}, nullptr, nullptr).ok());
      EXPECT_EQ(ranks.gradients[0].f32, (std::vector<float>{1.5f, -1.75f, -4.0f})) << text;
      EXPECT_THAT(ranks.residuals[0], testing::Each(0.0f));
    }
  }
}

TEST(NoElements, NothingIsSentByAnyExchange) {
  NoNetwork comm;
  comm.size_ = 4;
  comm.rank_ = 2;
  for (const char* text : {"none", "bf16", "int8", "chunk-topk:8/1024"}) {
    ExchangeArgs args;
    args.shape = {default_candidate(spec_of(text)), 0, DType::f32, 2, 4, 1};
    EXPECT_EQ(exchange_workspace_bytes(args.shape), 0u);
    EXPECT_TRUE(run_exchange(comm, args, 1, {1e9, 1e9}, nullptr, nullptr).ok()) << text;
  }
}

TEST(FewElements, OneElementOnFourRanks) {
  for (const char* text : {"none", "bf16", "int8", "chunk-topk:1/32"}) {
    for (const size_t n : {1, 3}) {
      Ranks ranks(4, n, DType::f32);
      for (size_t r = 0; r < 4; ++r) ranks.gradients[r] = Gradient::of(std::vector<float>(n, static_cast<float>(r + 1)), DType::f32);
      expect_all_ok(exchange(ranks, default_candidate(spec_of(text)), Feedback::none, 0));
      for (const Gradient& g : ranks.gradients) {
        EXPECT_FLOAT_EQ(g.f32[0], 2.5f) << text;  // within 4 ulp; chunk-topk sends the first of equal values
        if (spec_of(text).id != CodecId::chunk_topk) {
          EXPECT_FLOAT_EQ(g.f32[n - 1], 2.5f) << text;
        }
      }
    }
  }
}

// ---- machine and sizes -------------------------------------------------------------------------------------------------------------------

TEST(Sizes, WireBytesAreWhatTravels) {
  const auto wire = [](const char* text, size_t n, int ranks, DType dtype = DType::f32) {
    return exchange_wire_bytes({default_candidate(spec_of(text)), n, dtype, 0, ranks, 1});
  };
  EXPECT_EQ(wire("none", 1000, 4), 4000u);
  EXPECT_EQ(wire("none", 1000, 4, DType::f64), 8000u);
  EXPECT_EQ(wire("int8", 4096, 4), 4u * (32 + 16 + 1024));  // 4 shards of 1024: header, 4 scales, codes
  EXPECT_EQ(wire("bf16", 1, 4), 4u * (32 + 512));            // shards are whole groups
  EXPECT_EQ(wire("bf16", 1000, 4, DType::bf16), 0u);
  EXPECT_EQ(wire("int8", 1000, 4, DType::f16), 0u);
  EXPECT_EQ(wire("int8", SIZE_MAX, 1000), 0u);
  EXPECT_EQ(default_candidate(spec_of("none")), dense_candidate());
  EXPECT_EQ(default_candidate(spec_of("int8:ef")).exchange, Exchange::two_shot);
}

TEST(Machine, ChecksItsArguments) {
  std::vector<float> g(100), e(100);
  std::vector<std::byte> workspace(1 << 16);
  const auto base = [&](const char* text) {
    ExchangeArgs args;
    args.shape = {default_candidate(spec_of(text)), 100, DType::f32, 0, 2, 1};
    args.gradient = {g.data(), 100, DType::f32};
    args.workspace = workspace;
    return args;
  };
  const auto refused = [](const ExchangeArgs& args, StatusCode code, const char* text) {
    ExchangeMachine machine;
    EXPECT_EQ(machine.begin(args).code(), code) << text;
    EXPECT_THAT(machine.last_error(), testing::HasSubstr(text));
  };
  ExchangeArgs args = base("int8");
  args.shape.rank = 2;
  refused(args, StatusCode::invalid_argument, "rank 2 of 2 ranks");
  args = base("int8");
  args.shape.candidate.exchange = Exchange::all_reduce;
  refused(args, StatusCode::unsupported, "int8 does not travel by all_reduce with f32 gradients");
  args.shape.candidate.exchange = Exchange::all_gather;
  refused(args, StatusCode::unsupported, "all_gather is not offered");
  args = base("bf16");
  args.shape.dtype = args.gradient.dtype = DType::bf16;
  refused(args, StatusCode::unsupported, "bf16 does not travel by two_shot with bf16 gradients");
  args = base("none");
  args.shape.candidate.exchange = Exchange::two_shot;
  args.shape.dtype = args.gradient.dtype = DType::f64;
  refused(args, StatusCode::unsupported, "f64");
  args = base("int8");
  args.gradient.count = 99;
  refused(args, StatusCode::invalid_argument, "the gradient has 99 x f32, the shape 100 x f32");
  args = base("int8");
  args.gradient.data = nullptr;
  refused(args, StatusCode::invalid_argument, "null gradient with count 100");
  args = base("int8");
  args.feedback = Feedback::apply;
  refused(args, StatusCode::invalid_argument, "feedback without a residual");
  args.residual = e.data();
  args.feedback = Feedback::flush;
  refused(args, StatusCode::invalid_argument, "int8 over two_shot takes no Feedback::flush");
  args = base("none");
  args.residual = e.data();
  args.feedback = Feedback::apply;
  refused(args, StatusCode::invalid_argument, "none over all_reduce takes no Feedback::apply");
  args = base("none");
  args.shape.dtype = args.gradient.dtype = DType::f64;
  args.residual = e.data();
  args.feedback = Feedback::flush;
  refused(args, StatusCode::invalid_argument, "f64 gradients have no residual");
  CollectiveCall call;
  EXPECT_EQ(ExchangeMachine().next(&call).code(), StatusCode::bad_state);
  EXPECT_EQ(ExchangeMachine().next(nullptr).code(), StatusCode::invalid_argument);
}

TEST(Machine, CountsNonFiniteElementsOfBothStages) {
  run_ranks(2, [](Communicator& comm) {
    std::vector<float> g(1024, 1.0f);
    if (comm.rank() == 1) g[0] = NAN, g[1] = INFINITY;  // in the shard of rank 0
    ExchangeArgs args;
    args.shape = {default_candidate(spec_of("bf16")), g.size(), DType::f32, comm.rank(), 2, 1};
    args.gradient = {g.data(), g.size(), DType::f32};
    std::vector<std::byte> workspace(exchange_workspace_bytes(args.shape));
    args.workspace = workspace;
    ExchangeMachine machine;
    CollectiveCall call;
    ASSERT_TRUE(machine.begin(args).ok());
    ASSERT_TRUE(machine.next(&call).ok());
    GRADGATE_EXPECT_OK(comm.all_to_all(call.send, call.recv, call.count, call.dtype, {}, patient()), comm);
    ExchangeMachine moved = machine;  // a driver may keep machines by value
    ASSERT_TRUE(moved.next(&call).ok());
    GRADGATE_EXPECT_OK(comm.all_gather(call.send, call.recv, call.count, call.dtype, {}, patient()), comm);
    ASSERT_TRUE(moved.next(&call).ok());
    EXPECT_EQ(call.kind, Collective::none);
    EXPECT_EQ(moved.non_finite(), 2u);  // rank 1 encoded them, rank 0 saw them in its sum
    EXPECT_TRUE(std::isnan(g[0]));
    EXPECT_EQ(g[1], INFINITY);
    EXPECT_EQ(g[2], 1.0f);
  });
}

}  // namespace
}  // namespace gradgate
