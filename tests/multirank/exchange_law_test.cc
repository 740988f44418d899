// Nothing is lost: the conservation law through steps of every kind, and the small sequences with known outputs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/multirank/exchange_fixture.h"

namespace gradgate {
namespace {

using namespace test;
using testing::Each;

constexpr uint32_t kSteps = 24;

struct Case {
  const char* spec;
  int ranks;
};
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return test_name(std::string(info.param.spec) + "_" + std::to_string(info.param.ranks));
}

/// Runs kSteps steps of random kind (compressed; dense probe that freezes e; flush) on random gradients and returns,
/// per element, N·Σ out + Σ e and Σ g; `largest` gets the greatest |Σ over ranks of g + e| that any step had.
struct Books {
  std::vector<double> sent_and_kept, given;
  double largest = 0;
  std::vector<double> worst_residual_after_flush;
};
Books keep_books(const Case& param, size_t n, Gen gen, float unit) {
  const Candidate candidate = candidate_of(param.spec);
  Ranks ranks(param.ranks, n, DType::f32);
  Random random(static_cast<uint64_t>(param.ranks) * 77 + n);
  Books books{std::vector<double>(n), std::vector<double>(n), 0, {}};
  for (uint32_t step = 0; step < kSteps; ++step) {
    std::vector<double> sum(n);
    for (size_t r = 0; r < ranks.gradients.size(); ++r) {
      std::vector<float> g = generate(gen, n, step * 100 + r);
      for (float& x : g) x *= unit;
      if (random.below(4) == 0)
        std::fill_n(g.begin(), std::min<size_t>(n, 512), 0.0f);  // parameters without a gradient
      for (size_t i = 0; i < n; ++i) {
        books.given[i] += g[i];
        sum[i] += static_cast<double>(g[i]) + ranks.residuals[r][i];
      }
      ranks.gradients[r] = Gradient::of(g, DType::f32);
    }
    for (const double s : sum) books.largest = std::max(books.largest, std::fabs(s));
    const uint32_t kind = step + 1 == kSteps ? 9 : random.below(8);
    if (kind < 6) {
      expect_all_ok(exchange(ranks, candidate, Feedback::apply, step));
    } else if (kind == 6) {  // a probe window: plain g, e untouched
      const auto before = ranks.residuals;
      expect_all_ok(exchange(ranks, dense_candidate(), Feedback::none, step));
      EXPECT_EQ(ranks.residuals, before);
    } else {
      expect_all_ok(exchange(ranks, dense_candidate(), Feedback::flush, step));
      double worst = 0;
      for (const auto& residual : ranks.residuals) {
        for (const float e : residual) worst = std::max(worst, static_cast<double>(std::fabs(e)));
      }
      books.worst_residual_after_flush.push_back(worst);
    }
    for (size_t r = 1; r < ranks.gradients.size(); ++r)
      EXPECT_EQ(ranks.gradients[r], ranks.gradients[0]) << "step " << step;
    for (size_t i = 0; i < n; ++i)
      books.sent_and_kept[i] += static_cast<double>(param.ranks) * ranks.gradients[0].f32[i];
  }
  for (const auto& residual : ranks.residuals) {
    for (size_t i = 0; i < n; ++i) books.sent_and_kept[i] += residual[i];
  }
  return books;
}

class LawExact : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Law, LawExact,
                         testing::Values(Case{"chunk-topk:8/1024", 1}, Case{"chunk-topk:8/1024", 2},
                                         Case{"chunk-topk:8/1024", 4}, Case{"chunk-topk:8/1024", 8},
                                         Case{"chunk-topk:1/32", 2}, Case{"chunk-topk:1/32", 4},
                                         Case{"chunk-topk:1/32", 8}, Case{"chunk-topk:8/1024@all_gather", 2},
                                         Case{"chunk-topk:8/1024@all_gather", 4}, Case{"chunk-topk:1/32@all_gather", 8},
                                         Case{"topk:0.01", 2}, Case{"topk:0.1", 4}, Case{"topk:0.003", 8},
                                         Case{"randk:0.01", 1}, Case{"randk:0.01", 2}, Case{"randk:0.3", 4},
                                         Case{"randk:0.1", 8}),
                         case_name);

// Whole numbers and a power of two of ranks: no operation rounds, so the books balance to the last bit.
TEST_P(LawExact, HoldsWithEqualityOnIntegers) {
  for (const size_t n : {1, 73, 257, 5003}) {
    const Books books = keep_books(GetParam(), n, Gen::integers, 1);
    EXPECT_EQ(books.sent_and_kept, books.given) << "n " << n;
    ASSERT_FALSE(books.worst_residual_after_flush.empty());
    EXPECT_THAT(books.worst_residual_after_flush, Each(0.0));
  }
}

class LawRounded : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Law, LawRounded,
    testing::Values(Case{"bf16:ef", 2}, Case{"bf16:ef", 3}, Case{"int8:ef", 3}, Case{"int8:ef", 4}, Case{"int8:ef", 8},
                    Case{"int8:sr:ef", 3}, Case{"fp8:ef", 4}, Case{"fp16:ef", 3}, Case{"int4", 2}, Case{"int4", 5},
                    Case{"int4:sr", 3}, Case{"int4:hadamard", 4}, Case{"onebit", 2}, Case{"onebit", 3},
                    Case{"onebit", 8}, Case{"chunk-topk:8/1024", 3}, Case{"chunk-topk:8/1024", 5},
                    Case{"chunk-topk:1/32:bf16", 3}, Case{"chunk-topk:8/1024:bf16", 8}, Case{"bf16:ef@all_gather", 3},
                    Case{"int8:ef@all_gather", 5}, Case{"int4:sr@all_gather", 3}, Case{"onebit@all_gather", 4},
                    Case{"chunk-topk:8/1024@all_gather", 3}, Case{"chunk-topk:8/1024:bf16@all_gather", 8},
                    Case{"topk:0.01", 3}, Case{"topk:0.05:bf16", 5}, Case{"topk:0.05:int8", 3},
                    Case{"chunk-topk:8/1024:int8", 4}, Case{"randk:0.1", 3}, Case{"randk:0.05", 5}),
    case_name);

TEST_P(LawRounded, HoldsWithinItsRoundings) {
  for (const size_t n : {257, 5003}) {
    const Books books = keep_books(GetParam(), n, Gen::gaussian, 100);
    const double bound = kSteps * (GetParam().ranks + 3) * 0x1p-24 * books.largest;
    ASSERT_GT(books.largest, 0);
    double worst = 0;
    for (size_t i = 0; i < n; ++i) worst = std::max(worst, std::fabs(books.sent_and_kept[i] - books.given[i]));
    EXPECT_LE(worst, bound) << "n " << n;
    EXPECT_THAT(books.worst_residual_after_flush, Each(0.0)) << "an f32 gradient takes all of g + e";
  }
}

// Without feedback the same codecs lose: the test above can fail.
TEST(Law, IsBrokenWithoutFeedback) {
  Ranks ranks(2, 1024, DType::f32);
  for (size_t r = 0; r < 2; ++r) ranks.gradients[r] = Gradient::of(Gen::integers, 1024, r, DType::f32);
  const double given = ranks.gradients[0].f32[700] + ranks.gradients[1].f32[700];
  ASSERT_NE(given, 0);
  expect_all_ok(exchange(ranks, {spec_of("chunk-topk:1/1024"), Exchange::two_shot}, Feedback::none, 0));
  EXPECT_EQ(ranks.gradients[0].f32[700], 0.0f);
  EXPECT_THAT(ranks.residuals[0], Each(0.0f));
}

// bf16 gradients: a flush leaves what the cast to bf16 did not take, and no more than half a step of bf16.
TEST(Law, FlushOfBf16GradientsKeepsTheRoundingError) {
  Ranks ranks(2, 600, DType::bf16);
  std::vector<double> before(600), after(600);
  for (size_t r = 0; r < 2; ++r) {
    ranks.gradients[r] = Gradient::of(Gen::gaussian, 600, r, DType::bf16);
    for (size_t i = 0; i < 600; ++i) {
      ranks.residuals[r][i] = 0.0003f * static_cast<float>(i % 11);
      before[i] += static_cast<double>(reference::widen(ranks.gradients[r].view())[i]) + ranks.residuals[r][i];
    }
  }
  expect_all_ok(exchange(ranks, dense_candidate(), Feedback::flush, 0));
  bool rounded = false;
  for (size_t i = 0; i < 600; ++i) {
    const double out = reference::widen(ranks.gradients[0].view())[i];
    const double kept = static_cast<double>(ranks.residuals[0][i]) + ranks.residuals[1][i];
    rounded = rounded || kept != 0;
    // The sum of two bf16 values rounds once more, in the collective: that rounding is outside the law.
    EXPECT_NEAR(2 * out + kept, before[i], std::fabs(out) * 0x1.01p-7);
    EXPECT_LE(std::fabs(ranks.residuals[0][i]), 0.05f * 0x1p-8f);
  }
  EXPECT_TRUE(rounded);
}

// The owner's own gradient is never encoded on its own: it enters the sum as it is, and what the sum's encoding leaves
// out stays with the owner.
TEST(OwnShard, IsExact) {
  const size_t n = 512;  // two shards of 256
  Ranks ranks(2, n, DType::f32);
  for (size_t r = 0; r < 2; ++r) ranks.gradients[r] = Gradient::of(std::vector<float>(n, 0.0f), DType::f32);
  for (size_t i = 0; i < 256; ++i)
    ranks.gradients[0].f32[i] = static_cast<float>(i + 1) / 3.0f;  // rank 0 owns these; rank 1 has zeros there
  const std::vector<float> own = ranks.gradients[0].f32;
  expect_all_ok(exchange(ranks, {spec_of("chunk-topk:256/256"), Exchange::two_shot}, Feedback::apply, 0));
  for (size_t i = 0; i < 256; ++i) ASSERT_EQ(ranks.gradients[1].f32[i], own[i] * 0.5f);
  // With a lossy codec the residual of the owner holds y − d for its own shard, and rank 1 none there.
  ranks.gradients[0] = ranks.gradients[1] = Gradient::of(std::vector<float>(n, 0.0f), DType::f32);
  ranks.gradients[0].f32[0] = 100.0f;
  ranks.gradients[0].f32[1] = 0.003f;
  expect_all_ok(exchange(ranks, {spec_of("chunk-topk:1/256"), Exchange::two_shot}, Feedback::apply, 1));
  EXPECT_EQ(ranks.residuals[0][1], 0.003f);
  EXPECT_EQ(ranks.residuals[1][1], 0.0f);
  EXPECT_EQ(ranks.gradients[1].f32[0], 50.0f);
}

// EF-1, through the public driver: the six outputs of the reference sequence, and the same output for ever without
// feedback.
TEST(Sequence, FeedbackReachesEveryElement) {
  const std::vector<float> g{4, 3, 2, 1};
  const std::vector<std::vector<float>> outputs{{4, 0, 0, 0}, {0, 6, 0, 0}, {8, 0, 0, 0},
                                                {0, 0, 8, 0}, {0, 9, 0, 0}, {12, 0, 0, 0}};
  const std::vector<std::vector<float>> kept{{0, 3, 2, 1}, {4, 0, 4, 2}, {0, 3, 6, 3},
                                             {4, 6, 0, 4}, {8, 0, 2, 5}, {0, 3, 4, 6}};
  for (const bool feedback : {true, false}) {
    Ranks ranks(2, 4, DType::f32);
    for (size_t step = 0; step < 6; ++step) {
      ranks.gradients = {Gradient::of(g, DType::f32), Gradient::of(g, DType::f32)};
      expect_all_ok(exchange(ranks, default_candidate(spec_of("chunk-topk:1/32")),
                             feedback ? Feedback::apply : Feedback::none, static_cast<uint32_t>(step)));
      for (size_t r = 0; r < 2; ++r) {
        EXPECT_EQ(ranks.gradients[r].f32, feedback ? outputs[step] : outputs[0]) << "step " << step + 1;
        EXPECT_EQ(ranks.residuals[r], feedback ? kept[step] : std::vector<float>(4)) << "step " << step + 1;
      }
    }
  }
}

// NUM-3: an Inf or NaN of one rank is non-finite on both, its block only, and the other block is as good as ever.
TEST(Values, NonFiniteOnOneRankIsSeenOnAll) {
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    Ranks ranks(2, 512, DType::f32);
    for (size_t r = 0; r < 2; ++r) {
      std::vector<float> g(512);
      for (size_t i = 0; i < 512; ++i) g[i] = static_cast<float>(i % 4 + 1);
      if (r == 1) g[0] = bad;
      ranks.gradients[r] = Gradient::of(g, DType::f32);
    }
    expect_all_ok(exchange(ranks, default_candidate(spec_of("int8")), Feedback::none, 0));
    for (const Gradient& g : ranks.gradients) {
      EXPECT_FALSE(std::isfinite(g.f32[0]));
      for (size_t i = 256; i < 512; ++i)
        ASSERT_NEAR(g.f32[i], static_cast<float>(i % 4 + 1), 2 * 4.0 / 254);  // both stages round
    }
  }
}

// QNT-7: values are added, never codes.
TEST(Values, RanksWithDifferentScales) {
  Ranks ranks(2, 2, DType::f32);
  ranks.gradients = {Gradient::of({1.27f, -1.27f}, DType::f32), Gradient::of({127.0f, 127.0f}, DType::f32)};
  expect_all_ok(exchange(ranks, default_candidate(spec_of("int8")), Feedback::none, 0));
  for (const Gradient& g : ranks.gradients) {
    EXPECT_NEAR(g.f32[0], 64.135, 1e-4);
    // One step of the sum's scale is 128.27/127; the second element lies between two codes.
    EXPECT_NEAR(g.f32[1], 62.865, 128.27 / 254 / 2);
  }
  ranks.gradients = {Gradient::of({127.0f, 127.0f}, DType::f32), Gradient::of({127.0f, 127.0f}, DType::f32)};
  expect_all_ok(exchange(ranks, default_candidate(spec_of("int8")), Feedback::none, 0));
  EXPECT_EQ(ranks.gradients[0].f32, (std::vector<float>{127.0f, 127.0f}));
}

// COL-3: what a rank has does not change how much it sends: one rank has nothing, one a single element, one all.
TEST(Values, RanksWithVeryDifferentContent) {
  for (const char* text : {"chunk-topk:8/1024", "topk:0.002", "topk:0.002:int8", "int8"}) {
    Ranks ranks(3, 4096, DType::f32);
    std::vector<float> one(4096), all = generate(Gen::integers, 4096, 9);
    one[1500] = 100, all[1500] = 20;
    ranks.gradients = {Gradient::of(std::vector<float>(4096), DType::f32), Gradient::of(one, DType::f32),
                       Gradient::of(all, DType::f32)};
    const Candidate candidate = default_candidate(spec_of(text));
    expect_all_ok(exchange(ranks, candidate, candidate.codec.feedback ? Feedback::apply : Feedback::none, 0));
    for (const Gradient& g : ranks.gradients) {
      EXPECT_NEAR(g.f32[1500], 40, 0.5) << text;
      EXPECT_EQ(g.f32, ranks.gradients[0].f32) << text;
    }
  }
}

// TOP-8: one index sent by both ranks is added, not overwritten.
TEST(Values, TheSameIndexOnSeveralRanksIsSummed) {
  Ranks ranks(2, 128, DType::f32);
  std::vector<float> a(128), b(128);
  a[0] = 1, a[1] = 1, b[0] = 1, b[2] = 1;
  ranks.gradients = {Gradient::of(a, DType::f32), Gradient::of(b, DType::f32)};
  expect_all_ok(exchange(ranks, default_candidate(spec_of("chunk-topk:3/32")), Feedback::apply, 0));
  for (const Gradient& g : ranks.gradients) {
    EXPECT_EQ(std::vector<float>(g.f32.begin(), g.f32.begin() + 4), (std::vector<float>{1.0f, 0.5f, 0.5f, 0.0f}));
    EXPECT_THAT(std::vector<float>(g.f32.begin() + 4, g.f32.end()), Each(0.0f));
  }
}

}  // namespace
}  // namespace gradgate
