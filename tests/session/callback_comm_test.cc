// A transport of the caller's own behind the C interface: a session runs over functions, failures keep their text.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gradgate/communicator.h"
#include "gradgate/gradgate_c.h"

namespace {

using gradgate::Communicator;
using gradgate::Deadline;
using gradgate::DType;

/// Thread ranks, seen only through the functions.
struct Transport {
  Communicator* inner = nullptr;
  int fail_after = -1;  ///< collectives that work; −1: all
  std::string error;

  static bool works(void* self) {
    auto& t = *static_cast<Transport*>(self);
    if (t.fail_after < 0) return true;
    if (t.fail_after-- > 0) return true;
    t.fail_after = 0;
    t.error = "the cable was pulled";
    return false;
  }
  static int code(gradgate::Status s) { return static_cast<int>(s.code()); }
  static int all_reduce(void* self, const void* send, void* recv, size_t n, int dtype, double left) {
    if (!works(self)) return 8;
    return code(static_cast<Transport*>(self)->inner->all_reduce_sum(send, recv, n, static_cast<DType>(dtype), {},
                                                                     Deadline::after(left)));
  }
  static int all_gather(void* self, const void* send, void* recv, size_t n, int dtype, double left) {
    if (!works(self)) return 8;
    return code(static_cast<Transport*>(self)->inner->all_gather(send, recv, n, static_cast<DType>(dtype), {},
                                                                 Deadline::after(left)));
  }
  static int all_to_all(void* self, const void* send, void* recv, size_t n, int dtype, double left) {
    if (!works(self)) return 8;
    return code(static_cast<Transport*>(self)->inner->all_to_all(send, recv, n, static_cast<DType>(dtype), {},
                                                                 Deadline::after(left)));
  }
  static int broadcast(void* self, void* data, size_t n, int dtype, int root, double left) {
    if (!works(self)) return 8;
    return code(static_cast<Transport*>(self)->inner->broadcast(data, n, static_cast<DType>(dtype), root, {},
                                                                Deadline::after(left)));
  }
  static int barrier(void* self, double left) {
    if (!works(self)) return 8;
    return code(static_cast<Transport*>(self)->inner->barrier({}, Deadline::after(left)));
  }
  static const char* last_error(void* self) { return static_cast<Transport*>(self)->error.c_str(); }
};

gg_communicator_ops operations() {
  gg_communicator_ops ops = {};
  ops.size = sizeof(ops);
  ops.all_reduce_sum = Transport::all_reduce;
  ops.all_gather = Transport::all_gather;
  ops.all_to_all = Transport::all_to_all;
  ops.broadcast = Transport::broadcast;
  ops.barrier = Transport::barrier;
  ops.last_error = Transport::last_error;
  return ops;
}

void on_two_ranks(int fail_after, const std::function<void(int, gg_comm*)>& body) {
  std::unique_ptr<gradgate::ThreadGroup> group;
  ASSERT_TRUE(gradgate::ThreadGroup::create(2, &group).ok());
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      Transport transport{&group->rank(r), fail_after, {}};
      const gg_communicator_ops ops = operations();
      gg_comm* comm = nullptr;
      char why[200] = "";
      ASSERT_EQ(gg_comm_create_callbacks(r, 2, &ops, &transport, "test", &comm, why, sizeof(why)), 0) << why;
      body(r, comm);
      gg_comm_destroy(comm);
    });
  }
  for (auto& t : threads) t.join();
}

TEST(CallbackComm, CarriesASessionThatOpensAndCloses) {
  on_two_ranks(-1, [](int r, gg_comm* comm) {
    gg_session_options options;
    gg_session_options_init(&options);
    options.codecs = "int8,chunk-topk:8/1024";
    gg_session* session = nullptr;
    char why[200] = "";
    ASSERT_EQ(gg_session_create(comm, &options, &session, why, sizeof(why)), 0) << why;
    const gg_param_slice slice = {5, 0, 4096};
    const gg_bucket bucket = {GG_F32, &slice, 1};
    ASSERT_EQ(gg_session_set_layout(session, &bucket, 1), 0) << gg_session_last_error(session);
    std::vector<float> g(4096);
    for (int step = 0; step < 80; ++step) {
      g.assign(g.size(), static_cast<float>(r + 1));
      gg_session_bucket_ready(session, 0, gg_now());
      ASSERT_EQ(gg_session_all_reduce(session, 0, g.data(), g.size(), GG_F32), 0) << gg_session_last_error(session);
    }
    gg_session_stats stats;
    gg_session_get_stats(session, &stats);
    EXPECT_EQ(stats.steps, 80u);
    EXPECT_EQ(stats.skipped_steps, 0u);
    gg_session_destroy(session);
  });
}

TEST(CallbackComm, AFailureKeepsTheTextOfTheTransport) {
  on_two_ranks(1, [](int, gg_comm* comm) {
    gg_session_options options;
    gg_session_options_init(&options);
    options.mode = GG_OFF;
    gg_session* session = nullptr;
    char why[200] = "";
    ASSERT_EQ(gg_session_create(comm, &options, &session, why, sizeof(why)), 0) << why;  // the one that works
    const gg_param_slice slice = {5, 0, 8};
    const gg_bucket bucket = {GG_F32, &slice, 1};
    EXPECT_EQ(gg_session_set_layout(session, &bucket, 1), 8);
    EXPECT_NE(std::string(gg_session_last_error(session)).find("the cable was pulled"), std::string::npos)
        << gg_session_last_error(session);
    std::vector<float> g(8);
    EXPECT_NE(gg_session_all_reduce(session, 0, g.data(), g.size(), GG_F32), 0);
    gg_session_destroy(session);
  });
}

TEST(CallbackComm, RefusesWhatIsMissingByName) {
  gg_communicator_ops ops = operations();
  gg_comm* comm = reinterpret_cast<gg_comm*>(1);
  char why[200] = "";
  ops.all_to_all = nullptr;
  EXPECT_EQ(gg_comm_create_callbacks(0, 2, &ops, nullptr, nullptr, &comm, why, sizeof(why)), 1);
  EXPECT_EQ(comm, nullptr);
  EXPECT_NE(std::string(why).find("all_to_all"), std::string::npos) << why;
  ops = operations();
  ops.size = 3;
  EXPECT_EQ(gg_comm_create_callbacks(0, 2, &ops, nullptr, nullptr, &comm, why, sizeof(why)), 1);
  EXPECT_NE(std::string(why).find("size"), std::string::npos) << why;
  ops.size = sizeof(ops);
  EXPECT_EQ(gg_comm_create_callbacks(2, 2, &ops, nullptr, nullptr, &comm, why, sizeof(why)), 1);
  EXPECT_NE(std::string(why).find("rank 2"), std::string::npos) << why;
  EXPECT_EQ(gg_comm_create_callbacks(0, 2, nullptr, nullptr, nullptr, &comm, nullptr, 0), 1);
  EXPECT_EQ(gg_comm_create_callbacks(0, 2, &ops, nullptr, nullptr, nullptr, nullptr, 0), 1);
}

}  // namespace
