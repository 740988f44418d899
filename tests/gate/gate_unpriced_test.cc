// A black box in the place of a codec: not predicted, only verified.
#include "tests/gate/simulator.h"

namespace gradgate::gate {
namespace {

/// One unpriced candidate; steps with it take `hook_s`, dense ones 10 ms.
struct BlackBox {
  explicit BlackBox(double hook_s) {
    CandidateInfo info;
    std::strncpy(info.name, "PowerSGD", sizeof(info.name) - 1);
    info.fidelity = 1;
    info.unpriced = true;
    BucketInfo bucket{1e6, {1e6}};
    GateConfig config;
    config.ranks = 2;
    for (Gate& gate : gates) EXPECT_TRUE(Gate::create(config, {&info, 1}, {&bucket, 1}, &gate).ok());
    for (int step = 0; step < 400; ++step) {
      const StepPlan plan = gates[0].plan(0);
      EXPECT_EQ(plan.shadow, -1);
      actions.push_back(plan.action);
      for (Gate& gate : gates) gate.end_step(plan.action == Action::compress ? hook_s : 10e-3);
      if (!gates[0].agreement_due()) continue;
      const size_t n = gates[0].report_size();
      std::vector<double> reports(2 * n), message(gates[0].message_size());
      for (size_t r = 0; r < 2; ++r) EXPECT_TRUE(gates[r].write_report(std::span(reports).subspan(r * n, n)).ok());
      EXPECT_TRUE(gates[0].decide(reports, message).ok());
      for (Gate& gate : gates) EXPECT_TRUE(gate.apply(message).ok());
    }
  }
  Gate gates[2];
  std::vector<Action> actions;
};

TEST(GateUnpriced, AFasterOneIsVerifiedAndRuns) {
  BlackBox box(8e-3);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(static_cast<int>(box.actions[static_cast<size_t>(i)]), 0) << i;
  EXPECT_EQ(box.gates[0].running(0), 1);
  const std::string line = box.gates[0].explain(0).text;
  EXPECT_NE(line.find("→ PowerSGD (verified 1.2x)"), std::string::npos) << line;
  EXPECT_EQ(line.find("T_enc"), std::string::npos) << line;
  EXPECT_GT(box.gates[0].totals().saved_s, 0);
}

TEST(GateUnpriced, ASlowerOneIsClosedForGoodAndFlushed) {
  BlackBox box(12e-3);
  EXPECT_EQ(box.gates[0].running(0), 0);
  EXPECT_EQ(std::count(box.actions.begin(), box.actions.end(), Action::flush), 1);
  EXPECT_EQ(std::count(box.actions.end() - 300, box.actions.end(), Action::compress), 0);
  EXPECT_NE(std::string(box.gates[0].explain(0).text).find("closed for good"), std::string::npos);
}

TEST(GateUnpriced, AnEqualOneIsUndecidedAndStaysOff) {
  BlackBox box(10e-3);
  EXPECT_EQ(box.gates[0].running(0), 0);
  EXPECT_EQ(box.gates[0].decision(0).why, Why::undecided);
}

}  // namespace
}  // namespace gradgate::gate
