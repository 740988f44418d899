// Exchanges against sequential reference code: results and residuals equal in every bit, on every rank, for any number
// of ranks and any length.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "tests/multirank/exchange_fixture.h"
#include "tests/support/bytes_equal.h"
#include "tests/support/threads.h"

namespace gradgate {
namespace {

using namespace test;

constexpr int kRanks[] = {2, 3, 4, 5, 8};  // one rank encodes nothing: exchange_dense_test.cc
constexpr size_t kCounts[] = {0, 1, 2, 73, 255, 256, 257, 1000, 100003};

void expect_identical(const Ranks& got, const Ranks& expected, const std::string& what) {
  SCOPED_TRACE(what);
  for (size_t r = 0; r < got.gradients.size(); ++r) {
    EXPECT_TRUE(bytes_equal(expected.gradients[r].data(), got.gradients[r].data(), got.gradients[r].bytes(),
                            dtype_bytes(got.dtype)))
        << "gradient, rank " << r;
    EXPECT_TRUE(bytes_equal(expected.residuals[r].data(), got.residuals[r].data(), got.count * sizeof(float), 4))
        << "residual, rank " << r;
  }
}

struct Case {
  const char* spec;
  DType dtype;
};
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return test_name(std::string(info.param.spec) + "_" + dtype_name(info.param.dtype));
}

class Coded : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Exchange, Coded,
    testing::Values(
        Case{"none@two_shot", DType::f32}, Case{"none@two_shot", DType::bf16}, Case{"none@two_shot", DType::f16},
        Case{"int8", DType::f16}, Case{"chunk-topk:8/1024", DType::f16}, Case{"int8@all_gather", DType::f16},
        Case{"bf16", DType::f32}, Case{"int8", DType::f32}, Case{"int8", DType::bf16}, Case{"int8:sr", DType::f32},
        Case{"int8:sr@all_gather", DType::f32}, Case{"fp8", DType::f32}, Case{"fp8:e5m2", DType::bf16},
        Case{"int4", DType::f32}, Case{"int4:hadamard:sr", DType::f32}, Case{"onebit", DType::f32},
        Case{"onebit", DType::f16}, Case{"onebit@all_gather", DType::f32}, Case{"fp16", DType::f32},
        Case{"chunk-topk:8/1024", DType::f32}, Case{"chunk-topk:8/1024:bf16", DType::f32},
        Case{"chunk-topk:8/1024", DType::bf16}, Case{"chunk-topk:1/32", DType::f32},
        Case{"chunk-topk:1/32", DType::bf16}, Case{"none@all_gather", DType::f32}, Case{"bf16@all_gather", DType::f32},
        Case{"int8@all_gather", DType::f32}, Case{"int8@all_gather", DType::bf16},
        Case{"chunk-topk:8/1024@all_gather", DType::f32}, Case{"chunk-topk:8/1024:bf16@all_gather", DType::bf16},
        Case{"chunk-topk:1/32@all_gather", DType::f32}, Case{"topk:0.01", DType::f32},
        Case{"topk:0.2:bf16", DType::bf16}, Case{"topk:0.05", DType::f16}, Case{"chunk-topk:8/1024:int8", DType::f32},
        Case{"chunk-topk:8/1024:int8@all_gather", DType::bf16}, Case{"topk:0.05:int8", DType::f32},
        Case{"randk:0.01", DType::f32}, Case{"randk:0.4", DType::f32}, Case{"randk:0.3:bf16", DType::bf16},
        Case{"randk:0.05", DType::f16}, Case{"randk:0.05@all_gather", DType::f32}, Case{"bf16@all_reduce", DType::f32}),
    case_name);

// Sanitizers slow the reference code down tenfold and more; one step of the longest vector is enough for them.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint32_t kStepsOfLong = 1;
#else
constexpr uint32_t kStepsOfLong = 3;
#endif

// Three steps each, so that the residuals of one step enter the next.
TEST_P(Coded, EqualsSequentialReferenceOnAllRanks) {
  const auto [text, dtype] = GetParam();
  const Candidate candidate = candidate_of(text);
  for (const int size : kRanks) {
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
          reference_exchange(expected, candidate, feedback, step);
          expect_identical(got, expected,
                           std::to_string(size) + " ranks, n " + std::to_string(n) + (feedback ? ", feedback" : "") +
                               ", step " + std::to_string(step));
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

// Inf and NaN of one rank reach every rank, and where they do the residual is kept.
TEST_P(Coded, NonFiniteValuesAreTheSameEverywhere) {
  const auto [text, dtype] = GetParam();
  const Candidate candidate = candidate_of(text);
  const bool feedback = takes_feedback(candidate.codec);
  Ranks got(3, 5000, dtype), expected(3, 5000, dtype);
  for (size_t r = 0; r < 3; ++r) {
    got.gradients[r] = expected.gradients[r] = Gradient::of(r == 1 ? Gen::non_finite : Gen::gaussian, 5000, r, dtype);
    for (size_t i = 0; i < 5000; ++i)
      got.residuals[r][i] = expected.residuals[r][i] = static_cast<float>(i % 7) * 0.001f;
  }
  expect_all_ok(exchange(got, candidate, feedback ? Feedback::apply : Feedback::none, 9));
  reference_exchange(expected, candidate, feedback, 9);
  expect_identical(got, expected, text);
}

TEST_P(Coded, ExecutorThreadsChangeNothing) {
  const auto [text, dtype] = GetParam();
  const Candidate candidate = candidate_of(text);
  const Feedback feedback = takes_feedback(candidate.codec) ? Feedback::apply : Feedback::none;
  Ranks inline_ranks(2, 70001, dtype), threaded(2, 70001, dtype);
  for (size_t r = 0; r < 2; ++r)
    inline_ranks.gradients[r] = threaded.gradients[r] = Gradient::of(Gen::heavy_tail, 70001, r, dtype);
  expect_all_ok(exchange(inline_ranks, candidate, feedback, 1));
  expect_all_ok(exchange(threaded, candidate, feedback, 1, [](ExchangeArgs& args) {
    args.executor = threads(3);
    args.shape.width = 3;
  }));
  expect_identical(threaded, inline_ranks, text);
}

TEST_P(Coded, WorkspaceIsExactAndChecked) {
  const auto [text, dtype] = GetParam();
  Ranks ranks(1, 1000, dtype);
  ranks.gradients[0] = Gradient::of(Gen::gaussian, 1000, 1, dtype);
  ExchangeArgs args = ranks.args(0, candidate_of(text), Feedback::none, 0);
  args.shape.ranks = 4;
  const size_t needed = exchange_workspace_bytes(args.shape);
  const Exchange travels = args.shape.candidate.exchange;
  const size_t copies = travels == Exchange::all_reduce ? 1 : travels == Exchange::two_shot ? 2 : 4;
  ASSERT_GT(needed, copies * exchange_wire_bytes(args.shape));
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

// The other slots of a rank are payloads of shards; its own is unused and zero, and so is what a short shard leaves of
// its slot.
TEST_P(Coded, UnusedBytesOfSlotsAreZero) {
  const auto [text, dtype] = GetParam();
  Ranks ranks(1, 300, dtype);
  ranks.gradients[0] = Gradient::of(Gen::gaussian, 300, 1, dtype);
  ExchangeArgs args = ranks.args(0, candidate_of(text), Feedback::none, 5);
  args.shape.ranks = 3;
  std::vector<std::byte> workspace(exchange_workspace_bytes(args.shape), std::byte{0xa5});
  args.workspace = workspace;
  ExchangeMachine machine;
  CollectiveCall call;
  ASSERT_TRUE(machine.begin(args).ok());
  ASSERT_TRUE(machine.next(&call).ok());
  if (args.shape.candidate.exchange == Exchange::all_gather) {  // one payload of the whole vector, and no other bytes
    ASSERT_EQ(call.kind, Collective::all_gather);
    ASSERT_EQ(call.count, payload_bytes(args.shape.candidate.codec, dtype, 300));
    EXPECT_EQ(call.send, call.recv) << "rank 0 sends from its own block";
    const ConstBytes payload{static_cast<const std::byte*>(call.send), call.count};
    EXPECT_TRUE(check_payload(args.shape.candidate.codec, dtype, 300, payload).ok());
    return;
  }
  if (args.shape.candidate.exchange == Exchange::all_reduce) {  // the witness and the values, and no other bytes
    ASSERT_EQ(call.kind, Collective::all_reduce);
    EXPECT_EQ(call.send, call.recv);
    EXPECT_EQ(call.count * dtype_bytes(call.dtype), exchange_wire_bytes(args.shape));
    for (size_t b = 0; b < 24; ++b) {
      const auto one = [&](size_t i) {
        uint32_t bits = 0;
        std::memcpy(&bits, static_cast<const std::byte*>(call.send) + i * dtype_bytes(call.dtype),
                    dtype_bytes(call.dtype));
        return bits != 0;
      };
      EXPECT_NE(one(2 * b), one(2 * b + 1)) << "bit " << b << " of the hash and its complement";
      if (b < 16) {
        EXPECT_FALSE(one(48 + b)) << "no rank failed";
      }
    }
    return;
  }
  ASSERT_EQ(call.kind, Collective::all_to_all);
  const CodecSpec& codec = args.shape.candidate.codec;
  const size_t unit = codec.id == CodecId::onebit ? 1024 : std::max<size_t>(256, codec.param1);
  const size_t slot = payload_bytes(args.shape.candidate.codec, dtype, unit);
  ASSERT_EQ(call.count, slot);
  const size_t counts[] = {std::min<size_t>(unit, 300), 300 - std::min<size_t>(unit, 300), 0};
  for (size_t r = 0; r < 3; ++r) {
    const auto* bytes = static_cast<const std::byte*>(call.send) + r * slot;
    const size_t used = r == 0 ? 0 : payload_bytes(args.shape.candidate.codec, dtype, counts[r]);
    EXPECT_EQ(std::count(bytes + used, bytes + slot, std::byte{0}), static_cast<std::ptrdiff_t>(slot - used))
        << "slot " << r;
    if (r != 0) {
      EXPECT_TRUE(check_payload(args.shape.candidate.codec, dtype, counts[r], {bytes, used}).ok()) << "slot " << r;
    }
  }
}

// Longer than most sizes above and not a multiple of anything: n/ranks does not divide, the last shard is short.
TEST(Exchange, AMillionAndThreeElements) {
  for (const int size : {3, 4}) {
    Ranks got(size, 1000003, DType::f32), expected(size, 1000003, DType::f32);
    for (size_t r = 0; r < got.gradients.size(); ++r)
      got.gradients[r] = expected.gradients[r] = Gradient::of(Gen::gaussian, 1000003, r, DType::f32);
    expect_all_ok(exchange(got, candidate_of("int8:ef"), Feedback::apply, 1));
    reference_two_shot(expected, spec_of("int8:ef"), true, 1);
    expect_identical(got, expected, std::to_string(size));
  }
}

#if defined(__SSE2__)
// One rank's thread flushes subnormals, as trainers set it: results are still the same everywhere, and the thread keeps
// its setting.
TEST(Environment, FlushToZeroChangesNothing) {
  for (const char* text : {"none", "int8:ef", "chunk-topk:8/1024", "topk:0.01", "randk:0.01"}) {
    const Candidate candidate = default_candidate(spec_of(text));
    const Feedback feedback = candidate.codec.feedback ? Feedback::apply : Feedback::none;
    Ranks plain(3, 30000, DType::f32), flushing(3, 30000, DType::f32);
    for (size_t r = 0; r < 3; ++r)
      plain.gradients[r] = flushing.gradients[r] = Gradient::of(Gen::subnormal, 30000, r, DType::f32);
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
    EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float x) { return x != 0 && std::fabs(x) < 0x1p-126f; }))
        << text << ": nothing to flush";
  }
}
#endif

// All ranks draw the same elements, others in every step; what was not drawn waits.
TEST(Randk, AllRanksSendTheSameElements) {
  Ranks ranks(4, 5000, DType::f32);
  std::vector<float> before;
  for (uint32_t step = 0; step < 3; ++step) {
    for (size_t r = 0; r < 4; ++r) {
      ranks.residuals[r].assign(5000, 0.0f);
      ranks.gradients[r] = Gradient::of(std::vector<float>(5000, static_cast<float>(r + 1)), DType::f32);
    }
    expect_all_ok(exchange(ranks, candidate_of("randk:0.02"), Feedback::apply, step));
    const std::vector<float>& out = ranks.gradients[0].f32;
    EXPECT_EQ(std::count(out.begin(), out.end(), 2.5f), 100) << "the mean of 1, 2, 3 and 4";
    EXPECT_EQ(std::count(out.begin(), out.end(), 0.0f), 4900);
    EXPECT_NE(out, before) << "another sample in every step";
    for (size_t r = 0; r < 4; ++r) {
      EXPECT_EQ(ranks.gradients[r].f32, out);
      for (size_t i = 0; i < 5000; ++i)
        ASSERT_EQ(ranks.residuals[r][i], out[i] != 0 ? 0.0f : static_cast<float>(r + 1)) << r << " " << i;
    }
    before = out;
  }
}

// ---- machine and sizes ----

TEST(Sizes, WireBytesAreWhatTravels) {
  const auto wire = [](const char* text, size_t n, int ranks, DType dtype = DType::f32) {
    return exchange_wire_bytes({default_candidate(spec_of(text)), n, dtype, 0, ranks, 1});
  };
  EXPECT_EQ(wire("none", 1000, 4), 4000u);
  EXPECT_EQ(wire("none", 1000, 4, DType::f64), 8000u);
  EXPECT_EQ(wire("int8", 4096, 4), 4u * (32 + 16 + 1024));  // 4 shards of 1024: header, 4 scales, codes
  EXPECT_EQ(wire("bf16", 1, 4), 4u * (32 + 512));           // shards are whole groups
  EXPECT_EQ(wire("bf16", 1000, 4, DType::bf16), 0u);
  EXPECT_EQ(wire("int8", 1000, 4, DType::f16), wire("int8", 1000, 4));
  EXPECT_EQ(wire("int8", 1000, 4, DType::f64), 0u);
  EXPECT_EQ(wire("int8", SIZE_MAX, 1000), 0u);
  EXPECT_EQ(wire("randk:0.01", 4096, 4), 4u * (64 + 41));  // witness and values
  EXPECT_EQ(exchange_wire_bytes({candidate_of("bf16@all_reduce"), 4096, DType::f32, 0, 4, 1}), 2u * (64 + 4096));
  EXPECT_EQ(wire("randk:0.01", (size_t{1} << 31) + 1, 4), 0u);
  EXPECT_EQ(exchange_wire_bytes({candidate_of("int8@all_gather"), 4096, DType::f32, 0, 4, 1}), 32u + 64 + 4096);
  EXPECT_EQ(exchange_wire_bytes({candidate_of("int8@all_gather"), SIZE_MAX / 2, DType::f32, 0, 4, 1}), 0u);
  EXPECT_EQ(default_candidate(spec_of("none")), dense_candidate());
  EXPECT_EQ(default_candidate(spec_of("int8:ef")).exchange, Exchange::two_shot);
}

TEST(CandidateText, ComesBackAndIsRefusedByName) {
  for (const char* text : {"none", "bf16", "int8:ef", "chunk-topk:8/1024", "chunk-topk:8/1024@all_gather",
                           "chunk-topk:8/1024:bf16:noef@all_gather", "none@two_shot", "int8@all_gather",
                           "int8@hierarchical", "int8@hierarchical/all_gather", "none@hierarchical",
                           "topk:0.01@hierarchical", "randk:0.01", "randk:0.01@hierarchical", "bf16@all_reduce"}) {
    EXPECT_STREQ(format_candidate(candidate_of(text)).text, text);
  }
  EXPECT_STREQ(format_candidate(candidate_of("int8@two_shot")).text, "int8") << "the default needs no name";
  EXPECT_EQ(candidate_of("chunk-topk:8/1024@all_gather").exchange, Exchange::all_gather);
  const struct {
    const char *text, *says;
  } cases[] = {
      {"int9@all_gather", "'int9'"},
      {"int8@", "exchange '' is not known or cannot carry it; accepted: two_shot, all_gather, hierarchical"},
      {"int8@allgather", "'allgather'"},
      {"int8@all_reduce", "int8: exchange 'all_reduce' is not known or cannot carry it"},
      {"int8@two_shot@all_gather", "'two_shot@all_gather'"},
      {"topk:0.01@two_shot",
       "topk: exchange 'two_shot' is not known or cannot carry it; accepted: all_gather, hierarchical"},
      {"int8@all_gather:ef", "'all_gather:ef'"},
      {"@all_gather", "''"},
  };
  for (const auto& c : cases) {
    Candidate candidate = candidate_of("bf16:ef");
    Message why;
    EXPECT_EQ(parse_candidate(c.text, &candidate, &why), StatusCode::invalid_argument) << c.text;
    EXPECT_THAT(why.text, testing::HasSubstr(c.says)) << c.text;
    EXPECT_EQ(candidate, candidate_of("bf16:ef")) << c.text << " changed the candidate";
    EXPECT_EQ(parse_candidate(c.text, &candidate, nullptr), StatusCode::invalid_argument);
  }
  EXPECT_EQ(parse_candidate("int8", nullptr, nullptr), StatusCode::invalid_argument);
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
  args.shape.candidate.exchange = Exchange::hierarchical;
  refused(args, StatusCode::invalid_argument, "2 ranks are not equal nodes of 0 ranks");
  args.shape.ranks_per_node = 1;
  refused(args, StatusCode::unsupported, "int8 does not travel by all_reduce with f32 gradients");
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
  args = base("randk:0.01");
  args.residual = e.data();
  args.feedback = Feedback::flush;
  refused(args, StatusCode::invalid_argument, "randk:0.01 over all_reduce takes no Feedback::flush");
  args = base("none");
  args.shape.candidate.codec = spec_of("topk:0.01");
  refused(args, StatusCode::unsupported, "topk:0.01 does not travel by all_reduce with f32 gradients");
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
