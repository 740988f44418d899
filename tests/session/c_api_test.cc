// The C interface: the exchange machine driven by hand between two ranks, sessions over a thread group, and bad
// arguments.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "gradgate/gradgate_c.h"

namespace {

/// Two ranks without any communicator: both machines are stepped, and the test moves the bytes.
void exchange_by_hand(const char* codec, const std::vector<int>& expected_kinds) {
  SCOPED_TRACE(codec);
  constexpr size_t n = 1000;
  std::vector<float> gradient[2], residual[2];
  gg_exchange* machine[2] = {};
  for (int r = 0; r < 2; ++r) {
    gradient[r].assign(n, static_cast<float>(r + 1) * 127.0f);
    residual[r].assign(n, 0.0f);
    char why[200];
    ASSERT_EQ(gg_exchange_create(codec, n, GG_F32, r, 2, &machine[r], why, sizeof(why)), 0) << why;
    ASSERT_EQ(gg_exchange_begin(machine[r], gradient[r].data(), residual[r].data(), GG_FEEDBACK_APPLY, 1, 0, 0), 0)
        << gg_exchange_last_error(machine[r]);
  }
  std::vector<int> kinds;
  for (;;) {
    gg_call call[2];
    for (int r = 0; r < 2; ++r)
      ASSERT_EQ(gg_exchange_next(machine[r], &call[r]), 0) << gg_exchange_last_error(machine[r]);
    ASSERT_EQ(call[0].kind, call[1].kind);
    if (call[0].kind == GG_DONE) break;
    kinds.push_back(call[0].kind);
    ASSERT_EQ(call[0].dtype, GG_U8);
    const size_t bytes = call[0].count;
    for (int to = 0; to < 2; ++to) {
      for (int from = 0; from < 2; ++from) {
        const auto* block = static_cast<const unsigned char*>(call[from].send) +
                            (call[0].kind == GG_ALL_TO_ALL ? static_cast<size_t>(to) * bytes : 0);
        std::memmove(static_cast<unsigned char*>(call[to].recv) + static_cast<size_t>(from) * bytes, block, bytes);
      }
    }
  }
  EXPECT_EQ(kinds, expected_kinds);
  for (int r = 0; r < 2; ++r) {
    for (size_t i = 0; i < n; ++i)
      ASSERT_EQ(gradient[r][i], 190.5f);  // (127 + 254) / 2, exact: every block is constant
    gg_exchange_destroy(machine[r]);
  }
}

TEST(CApi, ExchangeMachineRunsOverAnyTransport) {
  exchange_by_hand("int8:ef", {GG_ALL_TO_ALL, GG_ALL_GATHER});
  exchange_by_hand("int8:ef@all_gather", {GG_ALL_GATHER});
}

TEST(CApi, SessionAveragesExplainsAndSaves) {
  gg_thread_group* group = nullptr;
  ASSERT_EQ(gg_thread_group_create(2, &group), 0);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([group, r] {
      gg_comm* shaped = nullptr;
      ASSERT_EQ(gg_comm_create_shaped(gg_thread_group_rank(group, r), 50e-6, 125e6, 1, &shaped), 0);
      gg_session_options options;
      gg_session_options_init(&options);
      options.mode = GG_ON;
      options.codecs = "chunk-topk:8/1024";
      gg_session* session = nullptr;
      char why[200];
      ASSERT_EQ(gg_session_create(shaped, &options, &session, why, sizeof(why)), 0) << why;
      const gg_param_slice slice = {5, 0, 2048};
      const gg_bucket bucket = {GG_F32, &slice, 1};
      ASSERT_EQ(gg_session_set_layout(session, &bucket, 1), 0) << gg_session_last_error(session);
      std::vector<float> g(2048, 0.0f);
      g[77] = static_cast<float>(r + 1);
      ASSERT_EQ(gg_session_all_reduce(session, 0, g.data(), g.size(), GG_F32), 0) << gg_session_last_error(session);
      EXPECT_EQ(g[77], 1.5f);
      gg_session_stats stats;
      gg_session_get_stats(session, &stats);
      EXPECT_EQ(stats.steps, 1u);
      EXPECT_EQ(stats.compressed_buckets, 1u);
      EXPECT_NE(std::string(gg_session_explain(session, 0)).find("chunk-topk"), std::string::npos)
          << gg_session_explain(session, 0);
      std::vector<unsigned char> state(gg_session_state_bytes(session));
      size_t written = 0;
      ASSERT_EQ(gg_session_save_state(session, state.data(), state.size(), &written), 0);
      EXPECT_EQ(gg_session_load_state(session, state.data(), written), 0) << gg_session_last_error(session);
      EXPECT_EQ(gg_session_flush(session), 0);
      gg_session_destroy(session);
      gg_comm_destroy(shaped);
    });
  }
  for (auto& t : threads) t.join();
  gg_thread_group_destroy(group);
}

/// Virtual seconds that two ranks spend creating a session on a gigabit link, with the profile for that many ranks.
double seconds_to_create(uint32_t profile_ranks, std::string* said) {
  gg_thread_group* group = nullptr;
  EXPECT_EQ(gg_thread_group_create(2, &group), 0);
  double spent[2] = {};
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      gg_comm* shaped = nullptr;
      ASSERT_EQ(gg_comm_create_shaped(gg_thread_group_rank(group, r), 50e-6, 125e6, 1, &shaped), 0);
      gg_session_options options;
      gg_session_options_init(&options);
      options.profile = {profile_ranks, 50e-6, 125e6, 50e-6, 125e6, 50e-6, 125e6};
      options.explain_context = said;
      options.explain = [](void* context, const char* line) { static_cast<std::string*>(context)->append(line); };
      gg_session* session = nullptr;
      char why[200];
      ASSERT_EQ(gg_session_create(shaped, &options, &session, why, sizeof(why)), 0) << why;
      gg_session_stats stats;
      gg_session_get_stats(session, &stats);
      spent[r] = stats.gate_s;
      gg_session_destroy(session);
      gg_comm_destroy(shaped);
    });
  }
  for (auto& t : threads) t.join();
  gg_thread_group_destroy(group);
  return spent[0];
}

TEST(CApi, AProfileSparesTheProbe) {
  std::string nothing, ignored;
  const double probed = seconds_to_create(0, &nothing);
  EXPECT_LT(seconds_to_create(2, &nothing), probed / 10);
  EXPECT_EQ(nothing, "");
  EXPECT_GE(seconds_to_create(5, &ignored), probed);  // of other ranks: probed after all, and said
  EXPECT_NE(ignored.find("5 ranks"), std::string::npos) << ignored;
}

TEST(CApi, RefusesBadArgumentsWithATextAndNoHandle) {
  char why[200] = "";
  gg_exchange* exchange = reinterpret_cast<gg_exchange*>(1);
  EXPECT_EQ(gg_exchange_create("int9", 10, GG_F32, 0, 2, &exchange, why, sizeof(why)), 1);
  EXPECT_EQ(exchange, nullptr);
  EXPECT_NE(std::string(why).find("int9"), std::string::npos) << why;
  EXPECT_EQ(gg_exchange_create("int8", 10, 9, 0, 2, &exchange, why, sizeof(why)), 1);
  EXPECT_EQ(gg_exchange_create("int8", 10, GG_F32, 2, 2, &exchange, why, sizeof(why)), 1);
  EXPECT_EQ(gg_exchange_create("bf16", 10, GG_BF16, 0, 2, &exchange, why, sizeof(why)),
            2);  // unsupported: it is bf16 already
  EXPECT_EQ(gg_exchange_create(nullptr, 10, GG_F32, 0, 2, &exchange, nullptr, 0), 1);

  gg_thread_group* group = nullptr;
  EXPECT_EQ(gg_thread_group_create(0, &group), 1);
  ASSERT_EQ(gg_thread_group_create(1, &group), 0);
  EXPECT_EQ(gg_thread_group_rank(group, 1), nullptr);
  gg_session* session = reinterpret_cast<gg_session*>(1);
  gg_session_options options;
  gg_session_options_init(&options);
  options.codecs = "int8,";
  options.size = 3;
  EXPECT_EQ(gg_session_create(gg_thread_group_rank(group, 0), &options, &session, why, sizeof(why)), 1);
  EXPECT_EQ(session, nullptr);
  gg_session_options_init(&options);
  options.codecs = "int8,chunk-topk:0/1024";
  EXPECT_EQ(gg_session_create(gg_thread_group_rank(group, 0), &options, &session, why, sizeof(why)), 1);
  EXPECT_NE(std::string(why).find("c"), std::string::npos) << why;
  EXPECT_EQ(gg_session_create(nullptr, &options, &session, nullptr, 0), 1);
  EXPECT_EQ(gg_session_all_reduce(nullptr, 0, nullptr, 0, GG_F32), 1);
  EXPECT_STREQ(gg_status_message(6), "peer mismatch");
  gg_thread_group_destroy(group);
}

}  // namespace
