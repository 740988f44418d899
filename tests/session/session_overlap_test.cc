// Buckets that stay on the wire while the next one is encoded: the same bits, the same order on every rank.
#include <deque>

#include "tests/session/forwarding.h"
#include "tests/session/session_fixture.h"
#include "tests/support/bytes_equal.h"

namespace gradgate::test {
namespace {

/// Can start all_gathers; they happen when they are waited for. Keeps the order of what it was asked for.
class Starting final : public Forwarding {
 public:
  using Forwarding::Forwarding;
  bool can_start() const noexcept override { return true; }
  Status start_all_gather(const void* send, void* recv, size_t count, DType dtype, Deadline) noexcept override {
    calls.emplace_back("start");
    if (fail_start-- == 0) {
      const Bytes payload{static_cast<std::byte*>(const_cast<void*>(send)), count};
      const Status made =
          encode_error(codec("int8"), DType::f32, failing_count, failing_seed, StatusCode::internal, payload);
      EXPECT_TRUE(made.ok());
    }
    started_.push_back({send, recv, count, dtype});
    return {};
  }
  Status finish_all_gather(Deadline deadline) noexcept override {
    calls.emplace_back("finish");
    const Call call = started_.front();
    started_.pop_front();
    return inner_.all_gather(call.send, call.recv, call.count, call.dtype, {}, deadline);
  }
  Status all_reduce_sum(const void* s, void* r, size_t n, DType t, Stream q, Deadline d) noexcept override {
    calls.emplace_back("all_reduce");
    return inner_.all_reduce_sum(s, r, n, t, q, d);
  }

  std::vector<std::string> calls;
  int fail_start = -1;  ///< of the start after so many, the payload becomes an error
  size_t failing_count = 0;
  Seed failing_seed;

 private:
  struct Call {
    const void* send;
    void* recv;
    size_t count;
    DType dtype;
  };
  std::deque<Call> started_;
};

std::unique_ptr<Session> session_with(Communicator& comm, const char* name) {
  Candidate candidate;
  Message why;
  EXPECT_TRUE(parse_candidate(name, &candidate, &why).ok()) << why.text;
  return make_session(comm, Mode::on, {}, [&](SessionOptions& o) { o.candidates = {&candidate, 1}; });
}

const std::vector<size_t> kCounts = {5000, 1, 4096, 0, 777};

std::vector<std::vector<float>> gradients(int rank, uint64_t step) {
  std::vector<std::vector<float>> buckets;
  for (const size_t count : kCounts) {
    std::vector<float>& bucket = buckets.emplace_back(count);
    for (size_t i = 0; i < count; ++i) bucket[i] = 0.37f * small_integer(rank, step, i + 31 * buckets.size());
  }
  return buckets;
}

TEST(SessionOverlap, HasTheBitsOfOneBucketAfterTheOther) {
  for (const char* name : {"bf16@all_gather", "int8@all_gather", "int4@all_gather", "chunk-topk:8/1024@all_gather",
                           "topk:0.01", "int8", "randk:0.05", "bf16@all_reduce"}) {
    on_ranks(2, nullptr, [&](int rank, Communicator& bare) {
      Starting starting(bare);
      auto session = session_with(starting, name), reference = session_with(bare, name);
      ASSERT_TRUE(set_simple_layout(*session, kCounts).ok());
      ASSERT_TRUE(set_simple_layout(*reference, kCounts).ok());
      for (uint64_t step = 0; step < 40; ++step) {  // the agreement after 32 looks at what is lost
        auto found = gradients(rank, step), expected = found;
        for (uint32_t b = 0; b < kCounts.size(); ++b) {
          ASSERT_TRUE(session->all_reduce_overlapped(b, {found[b].data(), kCounts[b], DType::f32}).ok())
              << session->last_error();
        }
        ASSERT_FALSE(session->unfinished());
        for (uint32_t b = 0; b < kCounts.size(); ++b) {
          ASSERT_TRUE(reference->all_reduce(b, {expected[b].data(), kCounts[b], DType::f32}).ok());
          ASSERT_TRUE(bytes_equal(expected[b].data(), found[b].data(), kCounts[b] * sizeof(float), sizeof(float)))
              << name << " step " << step << " bucket " << b;
        }
      }
      EXPECT_EQ(session->stats().steps, 40u);
      EXPECT_EQ(session->stats().compressed_buckets, reference->stats().compressed_buckets);
    });
  }
}

Status reduce(Session& session, uint32_t bucket, std::vector<float>& gradient) {
  return session.all_reduce_overlapped(bucket, {gradient.data(), gradient.size(), DType::f32});
}

/// A rank with a session over Starting and three buckets: 100 ones, 200 twos, 300 threes.
struct ThreeBuckets {
  Starting comm;
  std::unique_ptr<Session> session = session_with(comm, "int8@all_gather");
  std::vector<float> a = std::vector<float>(100, 1.0f), b = std::vector<float>(200, 2.0f),
                     c = std::vector<float>(300, 3.0f);

  explicit ThreeBuckets(Communicator& bare) : comm(bare) {
    EXPECT_TRUE(set_simple_layout(*session, {a.size(), b.size(), c.size()}).ok());
    comm.calls.clear();
  }
};

TEST(SessionOverlap, StartsABucketBeforeItWaitsForTheOneBefore) {
  on_ranks(2, nullptr, [&](int rank, Communicator& bare) {
    ThreeBuckets three(bare);
    auto& [comm, session, a, b, c] = three;
    ASSERT_TRUE(reduce(*session, 0, a).ok());
    EXPECT_TRUE(session->unfinished());
    ASSERT_TRUE(reduce(*session, 1, b).ok());
    EXPECT_TRUE(session->unfinished());
    EXPECT_EQ(reduce(*session, 1, b).code(), StatusCode::invalid_argument);
    ASSERT_TRUE(reduce(*session, 2, c).ok());
    EXPECT_FALSE(session->unfinished());
    EXPECT_EQ(comm.calls, (std::vector<std::string>{"start", "start", "finish", "start", "finish", "finish"})) << rank;
  });
}

TEST(SessionOverlap, FinishEndsABucketAtAnyTime) {
  on_ranks(2, nullptr, [&](int rank, Communicator& bare) {
    ThreeBuckets three(bare);
    auto& [comm, session, a, b, c] = three;
    EXPECT_TRUE(session->finish().ok());  // nothing to do
    ASSERT_TRUE(reduce(*session, 0, a).ok());
    if (rank == 0) {
      ASSERT_TRUE(session->finish().ok());
      EXPECT_FALSE(session->unfinished());
      EXPECT_EQ(a, std::vector<float>(100, 1.0f));
    }
    ASSERT_TRUE(reduce(*session, 1, b).ok());
    if (rank == 1) {
      ASSERT_TRUE(session->finish().ok());
    }
    ASSERT_TRUE(reduce(*session, 2, c).ok());
    EXPECT_EQ(a, std::vector<float>(100, 1.0f));
    EXPECT_EQ(b, std::vector<float>(200, 2.0f));
    EXPECT_EQ(c, std::vector<float>(300, 3.0f));
  });
}

TEST(SessionOverlap, ADenseBucketEndsTheOneBefore) {
  on_ranks(2, nullptr, [&](int, Communicator& bare) {
    Starting comm(bare);
    auto session = session_with(comm, "int8@all_gather");
    ASSERT_TRUE(set_simple_layout(*session, {100, 200}).ok());
    std::vector<float> planned(100, 2.0f), other(50, 4.0f);
    comm.calls.clear();
    ASSERT_TRUE(reduce(*session, 0, planned).ok());
    ASSERT_TRUE(session->all_reduce_dense({other.data(), other.size(), DType::f32}).ok());
    EXPECT_FALSE(session->unfinished());
    EXPECT_EQ(planned, std::vector<float>(100, 2.0f));
    EXPECT_EQ(other, std::vector<float>(50, 4.0f));
    EXPECT_EQ(comm.calls, (std::vector<std::string>{"start", "finish", "all_reduce"}));
  });
}

// One rank fails; a rank that was idle learns of it before the next bucket is under way, the others after.
void expect_repeated(int idle) {
  on_ranks(2, nullptr, [&](int rank, Communicator& bare) {
    Starting comm(bare);
    auto session = session_with(comm, "int8@all_gather");
    ASSERT_TRUE(set_simple_layout(*session, {100, 200}).ok());
    if (rank == 1) comm.fail_start = 0, comm.failing_count = 100, comm.failing_seed = {0, 0, 0, 1};
    std::vector<float> a(100, 1.0f + static_cast<float>(rank)), b(200, 5.0f);
    comm.calls.clear();
    ASSERT_TRUE(reduce(*session, 0, a).ok());
    if (rank == idle) {
      ASSERT_TRUE(session->finish().ok());
    }
    ASSERT_TRUE(reduce(*session, 1, b).ok()) << session->last_error();
    EXPECT_EQ(a, std::vector<float>(100, 1.5f));
    EXPECT_EQ(b, std::vector<float>(200, 5.0f));
    EXPECT_EQ(session->stats().failed_exchanges, 1u);
    EXPECT_EQ(session->stats().steps, 1u);
    const std::vector<std::string> before = {"start", "finish", "all_reduce", "start", "finish"};
    const std::vector<std::string> after = {"start", "start", "finish", "all_reduce", "finish"};
    EXPECT_EQ(comm.calls, rank == idle ? before : after);
  });
}

TEST(SessionOverlap, AFailedBucketIsRepeatedByRanksOfAnyTiming) {
  for (const int idle : {-1, 0, 1}) expect_repeated(idle);
}

TEST(SessionOverlap, LeavesNothingWhereTheCommunicatorCannotStart) {
  on_ranks(2, nullptr, [&](int, Communicator& comm) {
    auto session = session_with(comm, "int8@all_gather");
    ASSERT_TRUE(set_simple_layout(*session, {100, 200}).ok());
    std::vector<float> a(100, 3.0f), b(200, 1.0f);
    ASSERT_TRUE(reduce(*session, 0, a).ok());
    EXPECT_FALSE(session->unfinished());
    EXPECT_EQ(a, std::vector<float>(100, 3.0f));
    ASSERT_TRUE(reduce(*session, 1, b).ok());
  });
}

}  // namespace
}  // namespace gradgate::test
