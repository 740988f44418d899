// The session with its gate on virtual links: what it decides, what it says, and that every rank does the same.
#include <nlohmann/json.hpp>

#include "tests/session/session_fixture.h"

namespace gradgate::test {
namespace {

struct RunResult {
  std::string chosen, phase, explanation;
  SessionStats stats;
  Lines log, said;
  bool dense_exact = true;
};

/// `steps` steps of one bucket of `count` f32 on 4 ranks; 10 ms of virtual computation per step.
std::vector<RunResult> run(const LinkSpec& link, Mode mode, const std::vector<CodecSpec>& codecs, int steps,
                           size_t count = 1 << 18, bool give_link = false) {
  const int ranks = 4;
  std::vector<RunResult> results(ranks);
  on_ranks(ranks, &link, [&](int r, Communicator& comm) {
    RunResult& result = results[static_cast<size_t>(r)];
    const auto session = make_session(comm, mode, codecs, [&](SessionOptions& o) {
      o.log = Lines::log;
      o.log_context = &result.log;
      o.explain = Lines::explain;
      o.explain_context = &result.said;
      if (give_link) o.link = link;
    });
    ASSERT_TRUE(set_simple_layout(*session, {count}).ok()) << session->last_error();
    std::vector<float> gradient(count);
    for (int step = 0; step < steps; ++step) {
      for (size_t i = 0; i < count; ++i) gradient[i] = static_cast<float>((static_cast<size_t>(r) + i * 7) % 64);
      comm.advance(10e-3);
      ASSERT_TRUE(session->all_reduce(0, {gradient.data(), count, DType::f32}).ok()) << session->last_error();
      float expected = 0;  // quarters of small integers: the dense sum is exact
      for (int q = 0; q < ranks; ++q) expected += static_cast<float>((static_cast<size_t>(q) + 5 * 7) % 64) / 4;
      result.dense_exact = result.dense_exact && gradient[5] == expected;
    }
    result.chosen = format_codec(session->current(0).codec).text;
    result.phase = session->phase();
    result.explanation = session->explain(0);
    result.stats = session->stats();
  });
  return results;
}

TEST(SessionGate, SlowLinkCompressesVerifiesAndHolds) {
  const auto results = run(kGigabit, Mode::automatic, {codec("bf16"), codec("int8")}, 150);
  for (const RunResult& r : results) {
    EXPECT_EQ(r.chosen, "int8");
    EXPECT_EQ(r.phase, "hold");
    EXPECT_GT(r.stats.saved_s, 0);
    EXPECT_GT(r.stats.compressed_buckets, 50u);
    EXPECT_LT(r.stats.wire_bytes, r.stats.dense_bytes);
  }
  EXPECT_NE(results[0].explanation.find("int8"), std::string::npos) << results[0].explanation;
  EXPECT_NE(results[0].explanation.find("verified"), std::string::npos) << results[0].explanation;
  EXPECT_NE(results[0].explanation.find("<"), std::string::npos) << results[0].explanation;
}

TEST(SessionGate, FastLinkStaysDenseBitForBit) {
  for (const bool give_link : {false, true}) {
    const auto results = run(kNvlink, Mode::automatic, {codec("bf16"), codec("int8")}, 120, 1 << 16, give_link);
    for (const RunResult& r : results) {
      EXPECT_EQ(r.chosen, "none");
      EXPECT_TRUE(r.dense_exact);
      EXPECT_EQ(r.stats.compressed_buckets, 0u);
      EXPECT_EQ(r.stats.wire_bytes, r.stats.dense_bytes);
    }
    EXPECT_NE(results[0].explanation.find("dense"), std::string::npos) << results[0].explanation;
  }
}

TEST(SessionGate, CandidateLossierThanInt8OnlyWhenListed) {
  for (const RunResult& r : run(kGigabit, Mode::automatic, {codec("int8")}, 150)) EXPECT_EQ(r.chosen, "int8");
  for (const RunResult& r : run(kGigabit, Mode::automatic, {codec("int8"), codec("chunk-topk:8/1024")}, 150))
    EXPECT_EQ(r.chosen, "chunk-topk:8/1024");
}

TEST(SessionGate, DecisionsAndLogsAreIdenticalOnAllRanksAndStrictJson) {
  const auto results = run(kGigabit, Mode::automatic, {codec("int8"), codec("chunk-topk:8/1024")}, 150);
  ASSERT_FALSE(results[0].log.lines.empty());
  for (const RunResult& r : results) EXPECT_EQ(r.log.lines, results[0].log.lines);
  for (const std::string& line : results[0].log.lines) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    ASSERT_FALSE(json.is_discarded()) << line;
    EXPECT_TRUE(json.contains("event")) << line;
  }
  EXPECT_FALSE(results[0].said.lines.empty());
  for (size_t r = 1; r < results.size(); ++r) EXPECT_TRUE(results[r].said.lines.empty()) << "only rank 0 talks";
}

TEST(SessionGate, ObserveNeverChangesAnythingAndGivesAVerdict) {
  const auto results = run(kGigabit, Mode::observe, {codec("int8")}, 130);
  for (const RunResult& r : results) {
    EXPECT_TRUE(r.dense_exact);
    EXPECT_EQ(r.stats.compressed_buckets, 0u);
    EXPECT_EQ(r.chosen, "none");
  }
  EXPECT_TRUE(results[0].said.any_contains("predicted"))
      << (results[0].said.lines.empty() ? "nothing said" : results[0].said.lines.back());
}

TEST(SessionGate, OffMeasuresNothingAndOnAlwaysCompresses) {
  for (const RunResult& r : run(kGigabit, Mode::off, {codec("int8")}, 30)) {
    EXPECT_TRUE(r.dense_exact);
    EXPECT_EQ(r.stats.gate_s, 0);
    EXPECT_EQ(r.stats.compressed_buckets, 0u);
    EXPECT_LE(r.log.lines.size(), 1u);  // that the session started
  }
  for (const RunResult& r : run(kNvlink, Mode::on, {codec("int8")}, 30, 1 << 16)) {
    EXPECT_EQ(r.stats.compressed_buckets, 30u);
    EXPECT_EQ(r.stats.dense_buckets, 0u);
    EXPECT_EQ(r.chosen, "int8");
  }
}

TEST(SessionGate, BucketsThatNoCodecTakesGoDenseWithOneWarning) {
  on_ranks(2, &kGigabit, [&](int r, Communicator& comm) {
    Lines said;
    const auto session = make_session(comm, Mode::automatic, {codec("int8")}, [&](SessionOptions& o) {
      o.explain = Lines::explain;
      o.explain_context = &said;
    });
    ASSERT_TRUE(set_simple_layout(*session, {1000, 2000}, DType::f64).ok()) << session->last_error();
    for (int step = 0; step < 60; ++step) {
      std::vector<double> a(1000, r + 1), b(2000, 1e300);
      ASSERT_TRUE(session->all_reduce(0, {a.data(), a.size(), DType::f64}).ok()) << session->last_error();
      ASSERT_TRUE(session->all_reduce(1, {b.data(), b.size(), DType::f64}).ok()) << session->last_error();
      ASSERT_EQ(a[999], 1.5);
      ASSERT_EQ(b[1999], 1e300);
    }
    EXPECT_EQ(session->stats().compressed_buckets, 0u);
    int warnings = 0;
    for (const std::string& line : said.lines) warnings += line.find("f64") != std::string::npos ? 1 : 0;
    EXPECT_EQ(warnings, r == 0 ? 1 : 0);
  });
}

TEST(SessionGate, OneRankIsDenseAndUntouched) {
  for (const Mode mode : {Mode::automatic, Mode::on, Mode::off, Mode::observe}) {
    on_ranks(1, nullptr, [&](int, Communicator& comm) {
      const auto session = make_session(comm, mode, {codec("chunk-topk:1/32")});
      ASSERT_TRUE(set_simple_layout(*session, {3}).ok());
      for (int step = 0; step < 5; ++step) {
        float g[3] = {1.1f, -2.2f, 3.3f};
        ASSERT_TRUE(session->all_reduce(0, {g, 3, DType::f32}).ok()) << session->last_error();
        EXPECT_EQ(g[0], 1.1f);
        EXPECT_EQ(g[1], -2.2f);
        EXPECT_EQ(g[2], 3.3f);
      }
    });
  }
}

}  // namespace
}  // namespace gradgate::test
