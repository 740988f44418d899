// Loss scaling: residuals follow the scale, skipped steps leave them alone. Steps with buckets that the layout does not
// know. Dense scaling by division.
#include <cmath>
#include <limits>

#include "tests/session/session_fixture.h"

namespace gradgate::test {
namespace {

constexpr size_t kCount = 3000;

void fill(std::vector<float>& g, int rank, uint64_t step, float scale) {
  for (size_t i = 0; i < g.size(); ++i) g[i] = scale * small_integer(rank, step, i);
}

std::vector<float> copy_residual(const Session& session, size_t count = kCount) {
  const float* e = session.residual(0);
  return e == nullptr ? std::vector<float>() : std::vector<float>(e, e + count);
}

/// Scales grow, fall back after an overflow on one rank, and grow again; the same training without scaling must see the
/// same numbers, bit for bit.
TEST(SessionScale, ScaledTrainingWithSkippedStepsEqualsUnscaled) {
  on_ranks(3, nullptr, [](int rank, Communicator& comm) {
    auto scaled = make_session(comm, Mode::on, {codec("chunk-topk:8/1024")});
    auto plain = make_session(comm, Mode::on, {codec("chunk-topk:8/1024")});
    ASSERT_TRUE(set_simple_layout(*scaled, {kCount}).ok());
    ASSERT_TRUE(set_simple_layout(*plain, {kCount}).ok());
    std::vector<float> a(kCount), b(kCount);
    double scale = 1024;
    for (uint64_t step = 0; step < 12; ++step) {
      ASSERT_TRUE(scaled->set_gradient_scale(scale).ok()) << scaled->last_error();
      const bool overflow = step == 4 || step == 5 || step == 9;
      fill(a, rank, step, static_cast<float>(scale));
      if (overflow && rank == 1) a[777] = std::numeric_limits<float>::infinity();
      ASSERT_TRUE(scaled->all_reduce(0, {a.data(), kCount, DType::f32}).ok()) << scaled->last_error();
      if (overflow) {
        EXPECT_FALSE(std::isfinite(a[777]));
        scale /= 2;
        continue;  // a trainer that skips: the unscaled one does not see this step
      }
      fill(b, rank, step, 1);
      ASSERT_TRUE(plain->all_reduce(0, {b.data(), kCount, DType::f32}).ok()) << plain->last_error();
      for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(a[i], b[i] * static_cast<float>(scale)) << step << " " << i;
      const auto e = copy_residual(*scaled), f = copy_residual(*plain);
      for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(e[i], f[i] * static_cast<float>(scale)) << step << " " << i;
      if (step % 3 == 2) scale *= 2;
    }
    EXPECT_EQ(scaled->stats().skipped_steps, 3u);
    EXPECT_EQ(scaled->stats().steps, 12u);
    if (rank != 2) {  // the sender and the owner of element 777 see it
      EXPECT_GT(scaled->stats().non_finite, 0u);
    }
    EXPECT_EQ(plain->stats().skipped_steps, 0u);
  });
}

TEST(SessionScale, AStepSkippedElsewhereTakesBackEveryBucket) {
  on_ranks(2, nullptr, [](int rank, Communicator& comm) {
    auto session = make_session(comm, Mode::on, {codec("chunk-topk:8/1024")});
    ASSERT_TRUE(set_simple_layout(*session, {kCount, kCount}).ok());
    EXPECT_EQ(session->skip_step().code(), StatusCode::bad_state);  // there is no second residual yet
    ASSERT_TRUE(session->set_gradient_scale(2).ok());
    std::vector<float> g(kCount);
    for (uint64_t step = 0; step < 3; ++step) {
      const auto before = copy_residual(*session);
      if (step == 2) {
        ASSERT_TRUE(session->skip_step().ok());
      }
      for (uint32_t b = 0; b < 2; ++b) {
        fill(g, rank, step + 10 * b, 1);
        ASSERT_TRUE(session->all_reduce(b, {g.data(), kCount, DType::f32}).ok()) << session->last_error();
      }
      EXPECT_EQ(copy_residual(*session) == before, step == 2) << step;
    }
    EXPECT_EQ(session->stats().skipped_steps, 1u);
  });
}

TEST(SessionScale, AFlushThatIsSkippedIsStillPending) {
  on_ranks(2, nullptr, [](int rank, Communicator& comm) {
    auto session = make_session(comm, Mode::on, {codec("chunk-topk:8/1024")});
    ASSERT_TRUE(set_simple_layout(*session, {kCount}).ok());
    ASSERT_TRUE(session->set_gradient_scale(1).ok());
    std::vector<float> g(kCount);
    fill(g, rank, 0, 1);
    ASSERT_TRUE(session->all_reduce(0, {g.data(), kCount, DType::f32}).ok());
    const auto before = copy_residual(*session);
    ASSERT_TRUE(session->flush().ok());
    fill(g, rank, 1, 1);
    if (rank == 0) g[5] = std::numeric_limits<float>::quiet_NaN();
    ASSERT_TRUE(session->all_reduce(0, {g.data(), kCount, DType::f32}).ok());
    EXPECT_EQ(copy_residual(*session), before);
  });
}

TEST(SessionScale, RefusesScalesThatAreNone) {
  on_ranks(1, nullptr, [](int, Communicator& comm) {
    auto session = make_session(comm, Mode::off, {});
    for (const double bad : {0.0, -1.0, std::numeric_limits<double>::infinity(), std::nan("")}) {
      EXPECT_EQ(session->set_gradient_scale(bad).code(), StatusCode::invalid_argument);
      EXPECT_NE(std::string(session->last_error()).find("gradient scale"), std::string::npos);
    }
  });
}

TEST(SessionScale, TheScaleIsPartOfTheState) {
  on_ranks(2, nullptr, [](int rank, Communicator& comm) {
    std::vector<std::byte> state;
    std::vector<float> g(kCount), expected;
    for (int run = 0; run < 2; ++run) {
      auto session = make_session(comm, Mode::on, {codec("chunk-topk:8/1024")});
      ASSERT_TRUE(set_simple_layout(*session, {kCount}).ok());
      ASSERT_TRUE(session->set_gradient_scale(run == 0 ? 64 : 1).ok());
      if (run == 0) {
        fill(g, rank, 0, 64);
        ASSERT_TRUE(session->all_reduce(0, {g.data(), kCount, DType::f32}).ok());
        state.resize(session->state_bytes());
        ASSERT_TRUE(session->save_state(state, nullptr).ok());
        ASSERT_TRUE(session->set_gradient_scale(128).ok());
        expected = copy_residual(*session);
      } else {
        ASSERT_TRUE(session->load_state(state).ok()) << session->last_error();
        ASSERT_TRUE(session->set_gradient_scale(128).ok());
        EXPECT_EQ(copy_residual(*session), expected);
      }
    }
  });
}

/// The buckets of a step change after its first one: the rest goes dense, residuals stay, the new layout takes over.
TEST(SessionLayout, AStepMayLeaveItsLayout) {
  on_ranks(2, nullptr, [](int rank, Communicator& comm) {
    auto session = make_session(comm, Mode::on, {codec("chunk-topk:8/1024")});
    std::vector<float> g(kCount), odd(10);
    ASSERT_TRUE(session->all_reduce_dense({g.data(), kCount, DType::f32}).ok()) << session->last_error();
    ASSERT_TRUE(set_simple_layout(*session, {kCount, kCount}).ok()) << session->last_error();
    EXPECT_EQ(session->stats().steps, 1u);
    for (uint32_t b = 0; b < 2; ++b) {
      fill(g, rank, b, 1);
      ASSERT_TRUE(session->all_reduce(b, {g.data(), kCount, DType::f32}).ok());
    }
    const auto residual = copy_residual(*session);
    fill(g, rank, 7, 1);
    ASSERT_TRUE(session->all_reduce(0, {g.data(), kCount, DType::f32}).ok());
    const auto after = copy_residual(*session);
    EXPECT_NE(residual, after);
    odd.assign(10, static_cast<float>(rank + 1));
    ASSERT_TRUE(session->all_reduce_dense({odd.data(), 10, DType::f32}).ok());
    EXPECT_EQ(odd[3], 1.5f);
    EXPECT_EQ(session->all_reduce(1, {g.data(), kCount, DType::f32}).code(), StatusCode::bad_state);
    EXPECT_EQ(session->flush().code(), StatusCode::bad_state);
    ASSERT_TRUE(set_simple_layout(*session, {kCount, 10, kCount}).ok()) << session->last_error();
    EXPECT_EQ(session->stats().steps, 3u);
    EXPECT_EQ(copy_residual(*session), after);  // followed its parameter
    EXPECT_EQ(session->all_reduce_dense({nullptr, 4, DType::f32}).code(), StatusCode::invalid_argument);
  });
}

TEST(SessionDense, DividesWhenAsked) {
  on_ranks(3, nullptr, [](int rank, Communicator& comm) {
    auto session = make_session(comm, Mode::off, {});
    ASSERT_TRUE(set_simple_layout(*session, {1}).ok());
    bool differs = false;
    for (int i = 1; i < 200; ++i) {
      const float x = 0.1f * static_cast<float>(i);
      float divided = rank == 0 ? x : 0, multiplied = divided;
      session->set_dense_division(true);
      ASSERT_TRUE(session->all_reduce(0, {&divided, 1, DType::f32}).ok());
      session->set_dense_division(false);
      ASSERT_TRUE(session->all_reduce(0, {&multiplied, 1, DType::f32}).ok());
      EXPECT_EQ(divided, x / 3.0f);
      EXPECT_EQ(multiplied, x * static_cast<float>(1.0 / 3.0));
      differs = differs || divided != multiplied;
    }
    EXPECT_TRUE(differs);
  });
}

}  // namespace
}  // namespace gradgate::test
