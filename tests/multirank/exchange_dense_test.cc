// The exchanges that encode nothing: dense, which must be what torch does without a hook, one rank, and no elements.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "integration/comm/half.h"
#include "tests/multirank/exchange_fixture.h"
#include "tests/support/bytes_equal.h"

namespace gradgate {
namespace {

using namespace test;

constexpr int kRanks[] = {1, 2, 3, 4, 5, 8};
constexpr size_t kCounts[] = {0, 1, 2, 73, 255, 256, 257, 1000, 100003};

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
          ASSERT_EQ(bf16.gradients[r].bf16[i], comm::float_to_bf16(sum16[i]))
              << size << " ranks, n " << n << " at " << i;
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

// NUM-6: the sum of two f16 values of 40000 is no f16; their mean is.
TEST(Dense, HalfMeansDoNotOverflow) {
  for (const char* text : {"none", "int8", "chunk-topk:1/32"}) {
    Ranks ranks(2, 1, DType::f16);
    for (Gradient& g : ranks.gradients) g.dtype = DType::f16, g.f16 = {comm::float_to_f16(40000.0f)};
    expect_all_ok(exchange(ranks, default_candidate(spec_of(text)), Feedback::none, 0));
    for (const Gradient& g : ranks.gradients) EXPECT_EQ(comm::f16_to_float(g.f16[0]), 40000.0f) << text;
  }
}

// ---- one rank, and no elements (COL-5, SHP-1, SHP-2) ----

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
  for (const char* text : {"none", "int8", "chunk-topk:1/32", "int8@all_gather"}) {
    const Candidate candidate = candidate_of(text);
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

TEST(OneRank, KeepsTheBitsOfEveryNan) {
  NoNetwork comm;
  Ranks ranks(1, 3, DType::bf16);
  ranks.gradients[0].dtype = DType::bf16;
  ranks.gradients[0].bf16 = {0x7f81, 0xffff, 0x8000};
  EXPECT_TRUE(run_exchange(comm, ranks.args(0, dense_candidate(), Feedback::none, 0), 1, {}, nullptr, nullptr).ok());
  EXPECT_EQ(ranks.gradients[0].bf16, (std::vector<uint16_t>{0x7f81, 0xffff, 0x8000}));
}

TEST(NoElements, NothingIsSentByAnyExchange) {
  NoNetwork comm;
  comm.size_ = 4;
  comm.rank_ = 2;
  for (const char* text : {"none", "bf16", "int8", "chunk-topk:8/1024", "int8@all_gather"}) {
    ExchangeArgs args;
    args.shape = {candidate_of(text), 0, DType::f32, 2, 4, 1};
    EXPECT_EQ(exchange_workspace_bytes(args.shape), 0u);
    EXPECT_TRUE(run_exchange(comm, args, 1, {1e9, 1e9}, nullptr, nullptr).ok()) << text;
  }
}

TEST(FewElements, OneElementOnFourRanks) {
  for (const char* text : {"none", "bf16", "int8", "chunk-topk:1/32"}) {
    for (const size_t n : {1, 3}) {
      Ranks ranks(4, n, DType::f32);
      for (size_t r = 0; r < 4; ++r)
        ranks.gradients[r] = Gradient::of(std::vector<float>(n, static_cast<float>(r + 1)), DType::f32);
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

}  // namespace
}  // namespace gradgate
