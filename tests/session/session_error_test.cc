// What a session refuses, and what happens on every rank when one rank is different, late or gone.
#include <atomic>
#include <chrono>

#include "tests/session/session_fixture.h"

namespace gradgate::test {
namespace {

bool contains(const char* text, const char* part) { return std::string(text).find(part) != std::string::npos; }

TEST(SessionErrors, DifferentConfigurationIsNamedOnEveryRankWithBothValues) {
  struct Case {
    const char* field;
    const char* first;
    const char* second;
    std::function<void(SessionOptions&)> change;  // on rank 1
  };
  static const CodecSpec other[] = {codec("chunk-topk:8/1024")};
  const Case cases[] = {
      {"codecs", "int8", "chunk-topk:8/1024", [](SessionOptions& o) { o.codecs = other; }},
      {"seed", "'0'", "'9'", [](SessionOptions& o) { o.seed = 9; }},
      {"mode", "auto", "observe", [](SessionOptions& o) { o.mode = Mode::observe; }},
      {"link", "beta 0", "beta 1000000",
       [](SessionOptions& o) {
         o.link = {0, 1e6};
       }},
  };
  for (const Case& c : cases) {
    on_ranks(3, nullptr, [&](int r, Communicator& comm) {
      const CodecSpec mine[] = {codec("int8")};
      SessionOptions options;
      options.codecs = mine;
      options.timeout_s = 10;
      if (r == 1) c.change(options);
      std::unique_ptr<Session> session;
      Message why;
      EXPECT_EQ(Session::create(comm, options, &session, &why).code(), StatusCode::peer_mismatch);
      EXPECT_EQ(session, nullptr);
      EXPECT_TRUE(contains(why.text, c.field) && contains(why.text, c.first) && contains(why.text, c.second) &&
                  contains(why.text, "rank 1"))
          << why.text;
    });
  }
}

TEST(SessionErrors, DifferentLayoutIsNamedOnEveryRank) {
  on_ranks(3, nullptr, [&](int r, Communicator& comm) {
    const auto session = make_session(comm, Mode::automatic, {codec("int8")});
    EXPECT_EQ(set_simple_layout(*session, {r == 2 ? 1001u : 1000u}).code(), StatusCode::peer_mismatch);
    EXPECT_TRUE(contains(session->last_error(), "layout") && contains(session->last_error(), "1000") &&
                contains(session->last_error(), "1001"))
        << session->last_error();
    float g[1] = {};
    EXPECT_EQ(session->all_reduce(0, {g, 1, DType::f32}).code(), StatusCode::bad_state);
    EXPECT_TRUE(contains(session->last_error(), "1001")) << "the first failure is kept: " << session->last_error();
  });
}

TEST(SessionErrors, RefusesBadOptionsNamingTheField) {
  on_ranks(1, nullptr, [&](int, Communicator& comm) {
    const auto refused = [&](const std::function<void(SessionOptions&)>& change, const char* text) {
      SessionOptions options;
      change(options);
      std::unique_ptr<Session> session;
      Message why;
      EXPECT_EQ(Session::create(comm, options, &session, &why).code(), StatusCode::invalid_argument);
      EXPECT_TRUE(contains(why.text, text)) << why.text;
    };
    refused([](SessionOptions& o) { o.timeout_s = 0; }, "timeout_s");
    refused([](SessionOptions& o) { o.timeout_s = NAN; }, "timeout_s");
    refused([](SessionOptions& o) { o.link = {1e-6, -1}; }, "link");
    refused([](SessionOptions& o) { o.link = {NAN, 1e9}; }, "link");
    refused([](SessionOptions& o) { o.mode = Mode::on; }, "mode on needs a codec");
    static const std::vector<CodecSpec> many(12, codec("int8"));
    refused([](SessionOptions& o) { o.codecs = many; }, "codecs");
    static const Candidate impossible{codec("int8"), Exchange::all_reduce};
    refused([](SessionOptions& o) { o.candidates = {&impossible, 1}; }, "int8 does not travel by all_reduce");
    static const Candidate two_tiers{codec("int8"), Exchange::hierarchical, Exchange::two_shot};
    refused(
        [](SessionOptions& o) {
          o.candidates = {&two_tiers, 1};
        },
        "int8@hierarchical: hierarchical needs ranks_per_node");
    refused([](SessionOptions& o) { o.ranks_per_node = 7; }, "ranks_per_node is 7, accepted: 0, or a divisor of");
    refused([](SessionOptions& o) { o.ranks_per_node = -1; }, "ranks_per_node is -1");
    refused([](SessionOptions& o) { o.node_link = {1e-6, 1e9}; }, "node_link is alpha 1e-06 s, beta 1e+09 B/s");
    static const Candidate wrong_inside{codec("int8"), Exchange::hierarchical, Exchange::all_reduce};
    refused(
        [](SessionOptions& o) {
          o.ranks_per_node = 1, o.candidates = {&wrong_inside, 1};
        },
        "int8 does not travel by all_reduce");
  });
}

TEST(SessionErrors, RefusesBadCallsWithoutHarm) {
  on_ranks(1, nullptr, [&](int, Communicator& comm) {
    const auto session = make_session(comm, Mode::automatic, {codec("int8")});
    float g[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    EXPECT_EQ(session->all_reduce(0, {g, 8, DType::f32}).code(), StatusCode::bad_state);  // no layout yet

    const ParamSlice gap[] = {{1, 0, 4}, {2, 5, 4}};
    const ParamSlice twice[] = {{1, 0, 4}, {1, 4, 4}};
    const BucketLayout bad_layouts[] = {{DType::f32, gap}, {DType::f32, twice}, {DType::u8, {}}};
    for (const BucketLayout& bad : bad_layouts)
      EXPECT_EQ(session->set_layout({&bad, 1}).code(), StatusCode::invalid_argument) << session->last_error();

    ASSERT_TRUE(set_simple_layout(*session, {8, 8}).ok());
    EXPECT_EQ(session->all_reduce(1, {g, 8, DType::f32}).code(), StatusCode::invalid_argument);  // out of order
    EXPECT_TRUE(contains(session->last_error(), "accepted now: 0")) << session->last_error();
    EXPECT_EQ(session->all_reduce(0, {g, 7, DType::f32}).code(), StatusCode::invalid_argument);
    EXPECT_EQ(session->all_reduce(0, {g, 8, DType::bf16}).code(), StatusCode::invalid_argument);
    EXPECT_TRUE(contains(session->last_error(), "bf16") && contains(session->last_error(), "f32"))
        << session->last_error();
    EXPECT_EQ(session->all_reduce(0, {nullptr, 8, DType::f32}).code(), StatusCode::invalid_argument);
    ASSERT_TRUE(session->all_reduce(0, {g, 8, DType::f32}).ok());
    EXPECT_EQ(session->flush().code(), StatusCode::bad_state);  // within a step
    EXPECT_EQ(set_simple_layout(*session, {8}).code(), StatusCode::bad_state);
    EXPECT_EQ(session->save_state({}, nullptr).code(), StatusCode::bad_state);
    ASSERT_TRUE(session->all_reduce(1, {g, 8, DType::f32}).ok());
    EXPECT_EQ(session->stats().steps, 1u);
    std::vector<std::byte> small(session->state_bytes() - 1);
    const Status s = session->save_state(small, nullptr);
    EXPECT_EQ(s.code(), StatusCode::payload_too_small);
    EXPECT_EQ(static_cast<size_t>(s.detail()), session->state_bytes());
    for (int i = 0; i < 8; ++i) EXPECT_EQ(g[i], static_cast<float>(i + 1));
  });
}

TEST(SessionErrors, AVanishedRankGivesEveryOtherRankOperationBucketStepAndTime) {
  on_ranks(3, nullptr, [&](int r, Communicator& comm) {
    const auto session = make_session(comm, Mode::on, {codec("int8")}, [](SessionOptions& o) { o.timeout_s = 0.3; });
    ASSERT_TRUE(set_simple_layout(*session, {1000, 1000}).ok());
    std::vector<float> g(1000, 1.0f);
    ASSERT_TRUE(session->all_reduce(0, {g.data(), 1000, DType::f32}).ok());
    if (r == 1) return;  // gone in the middle of step 0
    const auto start = std::chrono::steady_clock::now();
    const Status s = session->all_reduce(1, {g.data(), 1000, DType::f32});
    EXPECT_EQ(s.code(), StatusCode::timeout) << session->last_error();
    EXPECT_TRUE(contains(session->last_error(), "bucket 1") && contains(session->last_error(), "step 0") &&
                contains(session->last_error(), "all_to_all: timeout after 0.") &&
                contains(session->last_error(), "s: rank 1 had not arrived"))
        << session->last_error();
    EXPECT_GE(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), 0.25);
    EXPECT_EQ(session->all_reduce(1, {g.data(), 1000, DType::f32}).code(), StatusCode::bad_state);
  });
}

TEST(SessionErrors, AnAbortedGroupWakesEveryRank) {
  on_ranks(3, nullptr, [&](int r, Communicator& comm) {
    const auto session = make_session(comm, Mode::on, {codec("int8")}, [](SessionOptions& o) { o.timeout_s = 60; });
    ASSERT_TRUE(set_simple_layout(*session, {1000}).ok());
    if (r == 1) {
      comm.abort();
      return;
    }
    std::vector<float> g(1000, 1.0f);
    EXPECT_EQ(session->all_reduce(0, {g.data(), 1000, DType::f32}).code(), StatusCode::aborted)
        << session->last_error();
  });
}

}  // namespace
}  // namespace gradgate::test
