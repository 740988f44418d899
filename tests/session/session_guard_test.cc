// The session's guard on real payloads, and exchanges that fail on one rank while the session goes on.
#include <cmath>

#include "tests/session/forwarding.h"
#include "tests/session/session_fixture.h"

namespace gradgate::test {
namespace {

constexpr size_t kCount = 1 << 16;

/// Roughly normal: the sum of four uniform numbers.
void fill_noise(std::vector<float>& g, int rank, uint64_t step) {
  uint64_t state = static_cast<uint64_t>(rank + 1) * 0x9e3779b97f4a7c15ull + step;
  for (float& value : g) {
    double sum = 0;
    for (int i = 0; i < 4; ++i) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      sum += static_cast<double>(state >> 40) / static_cast<double>(1 << 24) - 0.5;
    }
    value = static_cast<float>(sum);
  }
}

struct Outcome {
  std::string chosen;
  SessionStats stats;
  Lines log, said;
};

std::vector<Outcome> train(double error_budget, const std::vector<CodecSpec>& codecs, int steps) {
  std::vector<Outcome> outcomes(3);
  on_ranks(3, &kGigabit, [&](int rank, Communicator& comm) {
    Outcome& outcome = outcomes[static_cast<size_t>(rank)];
    auto session = make_session(comm, Mode::automatic, codecs, [&](SessionOptions& o) {
      o.error_budget = error_budget;
      o.log = Lines::log;
      o.log_context = &outcome.log;
    });
    ASSERT_TRUE(set_simple_layout(*session, {kCount}).ok());
    std::vector<float> g(kCount);
    for (int step = 0; step < steps; ++step) {
      fill_noise(g, rank, static_cast<uint64_t>(step));
      comm.advance(2e-3);
      ASSERT_TRUE(session->all_reduce(0, {g.data(), kCount, DType::f32}).ok()) << session->last_error();
    }
    outcome.chosen = format_codec(session->current(0).codec).text;
    outcome.stats = session->stats();
  });
  return outcomes;
}

TEST(SessionGuard, CodecsWithinTheBudgetRunAndTheirErrorIsReported) {
  for (const Outcome& o : train(0.1, {codec("bf16"), codec("int8")}, 120)) {
    EXPECT_EQ(o.chosen, "int8");
    EXPECT_EQ(o.stats.demotions, 0u);
    EXPECT_GT(o.stats.compression_error, 1e-3);  // a code is 1/127 of the largest of 256: about 0.7 % of such noise
    EXPECT_LT(o.stats.compression_error, 2e-2);
    EXPECT_TRUE(o.log.any_contains("\"event\":\"guard\""));
  }
}

TEST(SessionGuard, OverTheBudgetInt8GivesWayToBf16AndThatToDense) {
  for (const Outcome& o : train(4e-3, {codec("bf16"), codec("int8")}, 300)) {
    EXPECT_EQ(o.chosen, "bf16");
    EXPECT_EQ(o.stats.demotions, 1u);
    EXPECT_TRUE(o.log.any_contains("\"why\":\"guard_error\""));
  }
  for (const Outcome& o : train(1e-4, {codec("bf16"), codec("int8")}, 400)) {
    EXPECT_EQ(o.chosen, "none");
    EXPECT_EQ(o.stats.demotions, 2u);
  }
}

TEST(SessionGuard, ACodecWithFeedbackIsJudgedByItsResidual) {
  for (const Outcome& o : train(1e-4, {codec("chunk-topk:8/1024")}, 200)) {
    EXPECT_EQ(o.chosen, "chunk-topk:8/1024");  // bf16 is over this budget, this one is not judged by it
    EXPECT_GT(o.stats.residual_ratio, 1);      // what waits is more than one step's gradient
    EXPECT_LT(o.stats.residual_ratio, 2 * 85);
  }
}

TEST(SessionGuard, RefusesABudgetThatIsNone) {
  on_ranks(1, nullptr, [](int, Communicator& comm) {
    SessionOptions options;
    options.error_budget = 0;
    std::unique_ptr<Session> session;
    Message why;
    EXPECT_EQ(Session::create(comm, options, &session, &why).code(), StatusCode::invalid_argument);
    EXPECT_NE(std::string(why.text).find("error_budget"), std::string::npos) << why.text;
  });
}

/// Damages one byte of what arrives in one all_to_all.
class Damaging final : public Forwarding {
 public:
  Damaging(Communicator& inner, int at) : Forwarding(inner), at_(at) {}
  Status all_to_all(const void* s, void* r, size_t n, DType t, Stream q, Deadline d) noexcept override {
    const Status status = inner_.all_to_all(s, r, n, t, q, d);
    if (at_-- == 0) static_cast<unsigned char*>(r)[(rank() == 0 ? n : 0) + 3] ^= 0x40;
    return status;
  }
  Status split(int c, int k, std::unique_ptr<Communicator>* out, Deadline d) noexcept override {
    const Status status = inner_.split(c, k, out, d);
    // The second split of a session over nodes is the one between them.
    if (status.ok() && ++splits_ == 2) {
      auto part = std::make_unique<Damaging>(**out, at_);
      part->owned_ = std::move(*out);
      *out = std::move(part);
    }
    return status;
  }

 private:
  std::unique_ptr<Communicator> owned_;
  int at_, splits_ = 0;
};

// Between two of four ranks: the others hear of it in their nodes, and all repeat the step dense.
TEST(SessionFailure, AFailureBetweenNodesReachesEveryRank) {
  on_ranks(4, nullptr, [&](int rank, Communicator& bare) {
    Damaging comm(bare, rank == 1 ? 2 : -1);
    Candidate candidate;
    ASSERT_TRUE(parse_candidate("int8@hierarchical", &candidate, nullptr).ok());
    auto session = make_session(comm, Mode::on, {}, [&](SessionOptions& o) {
      o.candidates = {&candidate, 1};
      o.ranks_per_node = 2;
    });
    ASSERT_TRUE(set_simple_layout(*session, {kCount}).ok());
    ASSERT_TRUE(session->set_gradient_scale(1).ok());
    std::vector<float> g(kCount);
    for (uint64_t step = 0; step < 5; ++step) {
      for (size_t i = 0; i < kCount; ++i) g[i] = 4 * small_integer(rank, step, i);
      ASSERT_TRUE(session->all_reduce(0, {g.data(), kCount, DType::f32}).ok()) << session->last_error();
      if (step != 2) continue;
      for (size_t i = 0; i < kCount; ++i) {
        const float sum = small_integer(0, step, i) + small_integer(1, step, i) + small_integer(2, step, i) +
                          small_integer(3, step, i);
        ASSERT_NEAR(g[i], sum, 1e-5) << i;  // the plain dense average
      }
    }
    EXPECT_EQ(session->stats().failed_exchanges, 1u);
    EXPECT_EQ(session->stats().compressed_buckets, 4u);
  });
}

TEST(SessionFailure, AllRanksRepeatAFailedExchangeDenseAndGoOn) {
  for (const char* name : {"int8", "chunk-topk:8/1024"}) {
    Lines said;
    on_ranks(3, nullptr, [&](int rank, Communicator& bare) {
      Damaging comm(bare, rank == 1 ? 2 : -1);
      auto session = make_session(comm, Mode::on, {codec(name)}, [&](SessionOptions& o) {
        o.explain = Lines::explain;
        o.explain_context = &said;
      });
      ASSERT_TRUE(set_simple_layout(*session, {kCount}).ok());
      ASSERT_TRUE(session->set_gradient_scale(1).ok());
      std::vector<float> g(kCount), residual;
      for (uint64_t step = 0; step < 5; ++step) {
        for (size_t i = 0; i < kCount; ++i) g[i] = 3 * small_integer(rank, step, i);
        if (session->residual(0) != nullptr) residual.assign(session->residual(0), session->residual(0) + kCount);
        ASSERT_TRUE(session->all_reduce(0, {g.data(), kCount, DType::f32}).ok()) << session->last_error();
        if (step != 2) continue;
        for (size_t i = 0; i < kCount; ++i) {
          const float sum = small_integer(0, step, i) + small_integer(1, step, i) + small_integer(2, step, i);
          ASSERT_NEAR(g[i], sum, 1e-5) << i;  // the plain dense average
        }
        if (session->residual(0) != nullptr) {
          EXPECT_TRUE(std::equal(residual.begin(), residual.end(), session->residual(0)));
        }
      }
      EXPECT_EQ(session->stats().failed_exchanges, 1u);
      EXPECT_EQ(session->stats().compressed_buckets, 4u);
      EXPECT_EQ(session->stats().dense_buckets, 1u);
    });
    EXPECT_TRUE(said.any_contains("reduced dense"));
  }
}

TEST(SessionFailure, TheGateClosesTheCandidateAtTheNextAgreement) {
  std::vector<std::string> chosen(3);
  on_ranks(3, &kGigabit, [&](int rank, Communicator& shaped) {
    Damaging comm(shaped, rank == 1 ? 14 : -1);
    Lines log;
    auto session = make_session(comm, Mode::automatic, {codec("int8")}, [&](SessionOptions& o) {
      o.link = kGigabit;
      o.log = Lines::log;
      o.log_context = &log;
    });
    ASSERT_TRUE(set_simple_layout(*session, {kCount}).ok());
    std::vector<float> g(kCount);
    for (uint64_t step = 0; step < 300; ++step) {
      fill_noise(g, rank, step);
      comm.advance(2e-3);
      ASSERT_TRUE(session->all_reduce(0, {g.data(), kCount, DType::f32}).ok()) << session->last_error();
    }
    EXPECT_EQ(session->stats().failed_exchanges, 1u);
    EXPECT_TRUE(log.any_contains("\"why\":\"codec_failed\""));
    chosen[static_cast<size_t>(rank)] = format_codec(session->current(0).codec).text;
  });
  EXPECT_EQ(chosen[0], "bf16");
  EXPECT_EQ(chosen[1], chosen[0]);
  EXPECT_EQ(chosen[2], chosen[0]);
}

TEST(SessionFailure, WithoutACopyOfTheResidualTheSessionEnds) {
  on_ranks(2, nullptr, [&](int rank, Communicator& bare) {
    Damaging comm(bare, rank == 1 ? 0 : -1);
    auto session = make_session(comm, Mode::on, {codec("chunk-topk:8/1024")});
    ASSERT_TRUE(set_simple_layout(*session, {kCount}).ok());
    std::vector<float> g(kCount, 1.0f);
    const Status s = session->all_reduce(0, {g.data(), kCount, DType::f32});
    EXPECT_EQ(s.code(), rank == 1 ? StatusCode::bad_payload : StatusCode::peer_failed);
    EXPECT_EQ(session->all_reduce(0, {g.data(), kCount, DType::f32}).code(), StatusCode::bad_state);
  });
}

}  // namespace
}  // namespace gradgate::test
