// The calls of every step allocate nothing, whatever the phase.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

#include "gate/gate.h"

namespace {
std::atomic<long> allocations{0};
}  // namespace

[[gnu::noinline]] void* operator new(std::size_t size) {
  ++allocations;
  if (void* p = std::malloc(size != 0 ? size : 1)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace gradgate::gate {
namespace {

TEST(GateAllocation, StepsAllocateNothing) {
  GateConfig config;
  config.ranks = 2;
  CandidateInfo int8;
  std::snprintf(int8.name, sizeof(int8.name), "int8");
  const BucketInfo buckets[] = {{4e6, {1e6}}, {2e6, {5e5}}};
  Gate gates[2];
  for (Gate& gate : gates) ASSERT_TRUE(Gate::create(config, {&int8, 1}, buckets, &gate).ok());
  gates[0].set_link(link_model({50e-6, 125e6}, 2));
  long in_steps = 0;
  int compressed = 0;
  for (int step = 0; step < 300; ++step) {
    const long before = allocations;
    for (Gate& gate : gates) {
      for (size_t b = 0; b < 2; ++b) {
        const StepPlan plan = gate.plan(b);
        compressed += plan.action == Action::compress;
        Sample sample;
        sample.candidate = plan.candidate;
        sample.encode_s = sample.decode_s = 1e-4;
        sample.transfer_s = plan.candidate != 0 ? 9e-3 : 33e-3;
        gate.record(b, sample);
        if (plan.shadow > 0) {
          sample.candidate = static_cast<uint8_t>(plan.shadow);
          sample.shadow = true;
          gate.record(b, sample);
        }
      }
      gate.end_step(gate.plan(0).action == Action::compress ? 0.03 : 0.08);
      (void)gate.agreement_due();
      (void)gate.explain(0);
      (void)gate.totals();
    }
    in_steps += allocations - before;
    if (!gates[0].agreement_due()) continue;
    std::vector<double> reports(2 * gates[0].report_size()), message(gates[0].message_size());
    for (int r = 0; r < 2; ++r) {
      ASSERT_TRUE(gates[r].write_report(std::span(reports).subspan(r * gates[r].report_size())).ok());
    }
    ASSERT_TRUE(gates[0].decide(reports, message).ok());
    for (Gate& gate : gates) ASSERT_TRUE(gate.apply(message).ok());
  }
  EXPECT_EQ(in_steps, 0);
  EXPECT_GT(compressed, 400) << "and it went through all phases";
  EXPECT_GT(allocations, 0) << "the counter counts";
}

}  // namespace
}  // namespace gradgate::gate
