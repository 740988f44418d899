// Sessions over nodes: two links, two prices, one result on every rank.
#include <gmock/gmock.h>

#include "tests/session/session_fixture.h"

namespace gradgate {
namespace {

using namespace test;
using ::testing::HasSubstr;

Candidate candidate(const char* text) {
  Candidate parsed;
  Message why;
  EXPECT_TRUE(parse_candidate(text, &parsed, &why).ok()) << why.text;
  return parsed;
}

float value(int rank, uint64_t step, size_t i) {
  return static_cast<float>(static_cast<int>((i * 7 + step * 13 + static_cast<size_t>(rank) * 5) % 17) - 8);
}

struct RankRun {
  std::vector<std::vector<float>> outputs;
  std::vector<float> residual;
  std::vector<std::byte> state;
  std::string chosen;
  Lines log, explained;
};

/// Steps `from` … `to` of 4 ranks with one bucket; loads a state first if there is one, saves at the end.
std::vector<RankRun> run(const std::vector<const char*>& texts, Mode mode, int ranks_per_node, LinkSpec link,
                         LinkSpec node_link, int from, int to, const std::vector<RankRun>* previous = nullptr,
                         size_t count = 5003) {
  std::vector<RankRun> runs(4);
  on_ranks(4, &link, [&](int r, Communicator& comm) {
    RankRun& mine = runs[static_cast<size_t>(r)];
    std::vector<Candidate> candidates;
    for (const char* text : texts) candidates.push_back(candidate(text));
    const auto session = make_session(comm, mode, {}, [&](SessionOptions& o) {
      o.candidates = candidates;
      o.ranks_per_node = ranks_per_node;
      o.link = node_link.beta_bytes_per_s > 0 ? link : LinkSpec{};
      o.node_link = node_link;
      o.log = Lines::log, o.log_context = &mine.log;
      o.explain = Lines::explain, o.explain_context = &mine.explained;
    });
    ASSERT_TRUE(set_simple_layout(*session, {count}).ok()) << session->last_error();
    if (previous != nullptr) {
      ASSERT_TRUE(session->load_state((*previous)[static_cast<size_t>(r)].state).ok()) << session->last_error();
    }
    for (int step = from; step < to; ++step) {
      std::vector<float> g(count);
      for (size_t i = 0; i < count; ++i) g[i] = value(r, static_cast<uint64_t>(step), i);
      comm.advance(1e-3);
      ASSERT_TRUE(session->all_reduce(0, {g.data(), count, DType::f32}).ok()) << session->last_error();
      mine.outputs.push_back(std::move(g));
    }
    mine.chosen = format_candidate(session->current(0)).text;
    if (session->residual(0) != nullptr) mine.residual.assign(session->residual(0), session->residual(0) + count);
    mine.state.resize(session->state_bytes());
    size_t written = 0;
    ASSERT_TRUE(session->save_state(mine.state, &written).ok()) << session->last_error();
  });
  return runs;
}

constexpr LinkSpec kSlow{50e-6, 12.5e6}, kFast{1e-6, 50e9};

TEST(SessionNodes, EveryRankHasTheSameBits) {
  for (const char* text : {"int8@hierarchical", "topk:0.02@hierarchical", "randk:0.1@hierarchical",
                           "chunk-topk:8/1024@hierarchical/all_gather"}) {
    for (const int per_node : {1, 2, 4}) {
      const auto runs = run({text}, Mode::on, per_node, kSlow, kFast, 0, 6);
      EXPECT_EQ(runs[0].chosen, text);
      for (size_t r = 1; r < 4; ++r) EXPECT_EQ(runs[r].outputs, runs[0].outputs) << text << " " << per_node;
    }
  }
}

// Two nodes of two: half of the vector crosses the link between nodes, in an exchange of two ranks in the place of
// four. That is worth it where the link inside costs nothing, and not where both are alike.
TEST(SessionNodes, TheGatePricesBothLinks) {
  for (const LinkSpec& inside : {kFast, kSlow}) {
    const bool fast = inside.beta_bytes_per_s == kFast.beta_bytes_per_s;
    const auto runs = run({"int8", "int8@hierarchical"}, Mode::automatic, 2, kSlow, inside, 0, 40, nullptr, 400000);
    for (const RankRun& mine : runs) {
      EXPECT_EQ(mine.outputs, runs[0].outputs);
      size_t predictions = 0;
      for (const std::string& line : mine.log.lines) {
        if (line.find("\"event\":\"predict\"") == std::string::npos) continue;
        ++predictions;
        EXPECT_THAT(line, HasSubstr(fast ? "\"chosen\":\"int8@hierarchical\"" : "\"chosen\":\"int8\""));
      }
      EXPECT_GE(predictions, 1u);
    }
  }
}

// Without given links both tiers are probed; the same plan on every rank. (Nodes of one rank: flat int8 by another
// name.)
TEST(SessionNodes, BothTiersAreProbed) {
  const auto runs = run({"int8@hierarchical"}, Mode::automatic, 1, kSlow, {}, 0, 160, nullptr, 400000);
  for (const RankRun& mine : runs) EXPECT_EQ(mine.chosen, runs[0].chosen);
  EXPECT_EQ(runs[0].chosen, "int8@hierarchical");
  EXPECT_TRUE(runs[0].explained.any_contains("T_hierarchical")) << "and a price was found";
}

TEST(SessionNodes, StatesResumeBitForBit) {
  for (const char* text : {"topk:0.02@hierarchical", "randk:0.1@hierarchical", "int8:ef@hierarchical"}) {
    const auto whole = run({text}, Mode::on, 2, kSlow, kFast, 0, 6);
    const auto first = run({text}, Mode::on, 2, kSlow, kFast, 0, 2);
    const auto rest = run({text}, Mode::on, 2, kSlow, kFast, 2, 6, &first);
    for (size_t r = 0; r < 4; ++r) {
      for (size_t step = 2; step < 6; ++step)
        EXPECT_EQ(whole[r].outputs[step], rest[r].outputs[step - 2]) << text << " step " << step;
      EXPECT_EQ(whole[r].residual, rest[r].residual) << text;
    }
  }
}

TEST(SessionNodes, RanksThatDisagreeAreToldWhichField) {
  on_ranks(4, nullptr, [&](int r, Communicator& comm) {
    const Candidate two_tiers = candidate("int8@hierarchical");
    SessionOptions options;
    options.mode = Mode::on;
    options.candidates = {&two_tiers, 1};
    options.ranks_per_node = r == 3 ? 4 : 2;
    options.timeout_s = 20;
    std::unique_ptr<Session> session;
    Message why;
    EXPECT_EQ(Session::create(comm, options, &session, &why).code(), StatusCode::peer_mismatch);
    EXPECT_THAT(why.text, HasSubstr("nodes"));
  });
}

}  // namespace
}  // namespace gradgate
