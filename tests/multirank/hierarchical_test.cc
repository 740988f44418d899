// Two tiers: against plain sums where nothing is lost, under the law, and with failures on either tier.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "tests/multirank/exchange_fixture.h"

namespace gradgate {
namespace {

using namespace test;
using testing::HasSubstr;

struct Shape {
  int nodes, per_node;
};
constexpr Shape kShapes[] = {{2, 2}, {2, 3}, {4, 2}, {1, 3}, {3, 1}};

/// One hierarchical exchange on all ranks; `change` may alter a rank's arguments.
std::vector<Outcome> two_tiers(Ranks& ranks, const Candidate& candidate, int per_node, Feedback feedback, uint32_t step,
                               const std::function<void(ExchangeArgs&)>& change = {}) {
  return exchange(ranks, candidate, feedback, step, [&](ExchangeArgs& args) {
    args.shape.ranks_per_node = per_node;
    if (change) change(args);
  });
}

void expect_equal_everywhere(const Ranks& ranks) {
  for (size_t r = 1; r < ranks.gradients.size(); ++r) EXPECT_EQ(ranks.gradients[r], ranks.gradients[0]) << "rank " << r;
}

// Codecs that send everything as it is: what is left are the roundings of 1/N and of the gradient's dtype.
TEST(Hierarchical, IsTheAverageWhereNothingIsLost) {
  for (const Shape& shape : kShapes) {
    const int n_ranks = shape.nodes * shape.per_node;
    for (const char* text :
         {"none@hierarchical", "chunk-topk:32/32:noef@hierarchical", "topk:1:noef@hierarchical",
          "none@hierarchical/two_shot", "randk:1:noef@hierarchical", "chunk-topk:32/32:noef@hierarchical/all_gather"}) {
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        for (const size_t n : {0, 1, 255, 257, 1000, 70001}) {
          Ranks ranks(n_ranks, n, dtype);
          std::vector<double> sum(n);
          for (size_t r = 0; r < ranks.gradients.size(); ++r) {
            const std::vector<float> g = generate(Gen::integers, n, r);
            ranks.gradients[r] = Gradient::of(g, dtype);
            for (size_t i = 0; i < n; ++i) sum[i] += g[i];
          }
          expect_all_ok(two_tiers(ranks, candidate_of(text), shape.per_node, Feedback::none, 1));
          expect_equal_everywhere(ranks);
          const std::vector<float> got = reference::widen(ranks.gradients[0].view());
          for (size_t i = 0; i < n; ++i)
            ASSERT_NEAR(got[i], sum[i] / n_ranks, std::fabs(sum[i] / n_ranks) * 0x1p-8 + 1e-5)
                << text << " n " << n << " " << i;
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

struct Case {
  const char* spec;
  int nodes, per_node;
};
std::string case_name(const testing::TestParamInfo<Case>& info) {
  return test_name(std::string(info.param.spec) + "_" + std::to_string(info.param.nodes) + "x" +
                   std::to_string(info.param.per_node));
}

class HierarchicalLaw : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Law, HierarchicalLaw,
                         testing::Values(Case{"chunk-topk:8/1024@hierarchical", 2, 2},
                                         Case{"chunk-topk:8/1024@hierarchical/all_gather", 4, 2},
                                         Case{"topk:0.02@hierarchical", 2, 2}, Case{"topk:0.02@hierarchical", 2, 4},
                                         Case{"randk:0.02@hierarchical", 2, 2}, Case{"randk:0.3@hierarchical", 2, 4},
                                         Case{"chunk-topk:1/32@hierarchical", 4, 1},
                                         Case{"chunk-topk:1/32@hierarchical", 1, 4}),
                         case_name);

// Nothing is lost: N·Σ out + Σ e = Σ g, with equality on whole numbers, through compressed steps and a last flush.
TEST_P(HierarchicalLaw, HoldsWithEqualityOnIntegers) {
  const auto [text, nodes, per_node] = GetParam();
  const Candidate candidate = candidate_of(text);
  for (const size_t n : {1, 257, 5003}) {
    Ranks ranks(nodes * per_node, n, DType::f32);
    std::vector<double> balance(n);
    for (uint32_t step = 0; step < 12; ++step) {
      for (size_t r = 0; r < ranks.gradients.size(); ++r) {
        ranks.gradients[r] = Gradient::of(Gen::integers, n, step * 100 + r, DType::f32);
        for (size_t i = 0; i < n; ++i) balance[i] -= ranks.gradients[r].f32[i];
      }
      if (step % 5 == 4) {
        expect_all_ok(exchange(ranks, dense_candidate(), Feedback::flush, step));
      } else {
        expect_all_ok(two_tiers(ranks, candidate, per_node, Feedback::apply, step));
      }
      expect_equal_everywhere(ranks);
      for (size_t i = 0; i < n; ++i) balance[i] += static_cast<double>(ranks.size()) * ranks.gradients[0].f32[i];
    }
    for (const auto& residual : ranks.residuals) {
      for (size_t i = 0; i < n; ++i) balance[i] += residual[i];
    }
    EXPECT_THAT(balance, testing::Each(0.0)) << "n " << n;
  }
}

TEST(Hierarchical, RoundedCodecsStayWithinTheirBound) {
  Ranks ranks(6, 5003, DType::f32);
  std::vector<double> sum(5003), magnitude(5003);
  for (size_t r = 0; r < 6; ++r) {
    ranks.gradients[r] = Gradient::of(Gen::gaussian, 5003, r, DType::f32);
    for (size_t i = 0; i < 5003; ++i) sum[i] += ranks.gradients[r].f32[i], magnitude[i] += 0.1;
  }
  expect_all_ok(two_tiers(ranks, candidate_of("int8@hierarchical"), 3, Feedback::none, 1));
  expect_equal_everywhere(ranks);
  for (size_t i = 0; i < 5003; ++i) ASSERT_NEAR(ranks.gradients[0].f32[i] * 6, sum[i], magnitude[i] * 2.1 / 254);
}

TEST(Hierarchical, AFailingRankIsReportedByAll) {
  for (const int bad : {0, 3}) {
    Ranks ranks(4, 3000, DType::f32);
    for (size_t r = 0; r < 4; ++r) ranks.gradients[r] = Gradient::of(Gen::gaussian, 3000, r, DType::f32);
    const Ranks before = ranks;
    std::vector<Status> statuses(4);
    std::vector<std::string> texts(4);
    run_ranks(4, [&](Communicator& comm) {
      NodeTiers tiers;
      ASSERT_TRUE(split_nodes(comm, 2, kWatchdogSeconds, &tiers, nullptr).ok());
      ExchangeArgs args = ranks.args(comm.rank(), candidate_of("int8@hierarchical"), Feedback::none, 3);
      args.shape.ranks_per_node = 2;
      std::vector<std::byte> workspace(exchange_workspace_bytes(args.shape));
      args.workspace = workspace;
      ExchangeMachine machine;
      ASSERT_TRUE(machine.begin(args).ok()) << machine.last_error();
      if (comm.rank() == bad) machine.fail(StatusCode::out_of_memory);
      const auto r = static_cast<size_t>(comm.rank());
      for (;;) {
        CollectiveCall call;
        statuses[r] = machine.next(&call);
        if (!statuses[r].ok() || call.kind == Collective::none) break;
        Communicator& on = call.tier == Tier::node ? *tiers.node : *tiers.between;
        const Status moved = call.kind == Collective::reduce_scatter
                                 ? on.reduce_scatter_sum(call.send, call.recv, call.count, call.dtype, {}, patient())
                             : call.kind == Collective::all_to_all
                                 ? on.all_to_all(call.send, call.recv, call.count, call.dtype, {}, patient())
                                 : on.all_gather(call.send, call.recv, call.count, call.dtype, {}, patient());
        GRADGATE_EXPECT_OK(moved, on);
      }
      texts[r] = machine.last_error();
    });
    for (int r = 0; r < 4; ++r) {
      const auto at = static_cast<size_t>(r);
      EXPECT_EQ(statuses[at].code(), r == bad ? StatusCode::out_of_memory : StatusCode::peer_failed) << texts[at];
      EXPECT_THAT(texts[at], HasSubstr("failed"));
      EXPECT_EQ(ranks.gradients[at], before.gradients[at]);
    }
  }
}

TEST(Hierarchical, ARankThatIsAStepBehindIsAMismatchOnAll) {
  Ranks ranks(4, 3000, DType::f32);
  for (size_t r = 0; r < 4; ++r) ranks.gradients[r] = Gradient::of(Gen::gaussian, 3000, r, DType::f32);
  const auto outcomes = two_tiers(ranks, candidate_of("int8@hierarchical"), 2, Feedback::none, 5,
                                  [](ExchangeArgs& args) { args.seed.step -= args.shape.rank == 1 ? 1 : 0; });
  for (const Outcome& outcome : outcomes)
    EXPECT_EQ(outcome.status.code(), StatusCode::peer_mismatch) << outcome.why.text;
}

TEST(Hierarchical, UnequalNodesAreRefused) {
  run_ranks(3, [](Communicator& comm) {
    NodeTiers tiers;
    Message why;
    EXPECT_EQ(split_nodes(comm, 2, 1, &tiers, &why).code(), StatusCode::invalid_argument);
    EXPECT_STREQ(why.text, "3 ranks are not equal nodes of 2 ranks");
  });
  float g[4] = {};
  ExchangeArgs args;
  args.shape = {candidate_of("int8@hierarchical"), 4, DType::f32, 0, 6, 1, 4};
  args.gradient = {g, 4, DType::f32};
  ExchangeMachine machine;
  EXPECT_EQ(machine.begin(args).code(), StatusCode::invalid_argument);
  EXPECT_THAT(machine.last_error(), HasSubstr("6 ranks are not equal nodes of 4 ranks"));
}

TEST(Hierarchical, TheLauncherSaysHowManyRanksShareANode) {
  for (const char* name :
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"})
    unsetenv(name);
  EXPECT_EQ(launcher_ranks_per_node(), 0);
  setenv("SLURM_NTASKS_PER_NODE", "8", 1);
  EXPECT_EQ(launcher_ranks_per_node(), 8);
  setenv("LOCAL_WORLD_SIZE", "two", 1);
  EXPECT_EQ(launcher_ranks_per_node(), 8) << "what is no number is not read";
  setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
  EXPECT_EQ(launcher_ranks_per_node(), 2);
  for (const char* name : {"OMPI_COMM_WORLD_LOCAL_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"}) unsetenv(name);
}

}  // namespace
}  // namespace gradgate
