// Steps allocate nothing. A program of its own: it replaces operator new, which the sanitizers' checks of the other
// tests want for themselves.
#include <gtest/gtest.h>

#include <atomic>

#include "gradgate/exchange.h"
#include "tests/support/alloc_guard.h"
#include "tests/support/gen.h"
#include "tests/support/rank_harness.h"
#include "tests/support/specs.h"

namespace gradgate {
namespace {

using namespace test;

TEST(Exchange, AllocatesNothing) {
  for (const char* text :
       {"none", "bf16", "int8:ef", "chunk-topk:8/1024", "chunk-topk:8/1024@all_gather", "topk:0.01", "randk:0.01"}) {
    std::atomic<int> failures{0};
    run_ranks(3, [&](Communicator& inner) {
      // The virtual clock exchanges more than the bare communicator does, and moves no data differently.
      std::unique_ptr<Communicator> shaped;
      ASSERT_TRUE(make_shaped(inner, {1e-6, 1e9}, ClockKind::virtual_time, &shaped).ok());
      Communicator& comm = *shaped;
      const Candidate candidate = candidate_of(text);
      std::vector<float> g = generate(Gen::gaussian, 20000, static_cast<uint64_t>(comm.rank())), e(g.size());
      ExchangeArgs args;
      args.shape = {candidate, g.size(), DType::f32, comm.rank(), 3, 1};
      args.gradient = {g.data(), g.size(), DType::f32};
      args.feedback = candidate.codec.feedback ? Feedback::apply : Feedback::none;
      args.residual = candidate.codec.feedback ? e.data() : nullptr;
      std::vector<std::byte> workspace(exchange_workspace_bytes(args.shape)),
          scratch(exchange_shadow_bytes(args.shape));
      args.workspace = workspace;
      ExchangeTimes times;
      Message why;
      // All ranks are past their own allocations before the count starts, and stay until it ends.
      GRADGATE_EXPECT_OK(comm.barrier({}, patient()), comm);
      const uint64_t before = allocations();
      for (int step = 0; step < 3; ++step) {
        if (!run_exchange(comm, args, kWatchdogSeconds, {}, &times, &why).ok()) ++failures;
        if (!shadow_exchange(comm, args, scratch, {}, &times).ok()) ++failures;
      }
      if (!comm.barrier({}, patient()).ok()) ++failures;
      const uint64_t after = allocations();
      GRADGATE_EXPECT_OK(comm.barrier({}, patient()), comm);
      EXPECT_EQ(after - before, 0u) << text;
    });
    EXPECT_EQ(failures, 0) << text << ": an exchange failed";
  }
}

}  // namespace
}  // namespace gradgate
