// One codec for all buckets, compared with what the predictions made of single buckets before the first hold begins.
#include "tests/gate/simulator.h"

namespace gradgate::gate {
namespace {

/// Two buckets on a slow link. The predictor sees the codecs' times; a step takes what `step_s` says for the two
/// candidates that run, which no sample shows.
struct Job {
  using StepTime = double (*)(int first, int second, uint64_t step);

  Job(const std::vector<SimCodec>& codecs, StepTime step_s, std::vector<double> bucket_bytes = {4e6, 4e6})
      : sim(world(codecs, std::move(bucket_bytes)), {}) {
    while (sim.lines("hold").empty() && sim.gates[0].step() < 400) {
      sim.given_step_s = step_s(sim.gates[0].plan(0).candidate, sim.gates[0].plan(1).candidate, sim.gates[0].step());
      sim.step();
    }
  }
  static World world(const std::vector<SimCodec>& codecs, std::vector<double> bucket_bytes) {
    World w;
    w.codecs = codecs, w.bucket_bytes = std::move(bucket_bytes);
    return w;
  }
  size_t challenges() const { return sim.lines("verify", "\"what\":\"challenge\"").size(); }

  Simulation sim;
};

// 8.18 ms and 7.96 ms a bucket: within 5 %, so the more faithful one is predicted to run.
const std::vector<SimCodec> kNear = {{.name = "faithful", .fidelity = 2, .ratio = 8},
                                     {.name = "lossy", .fidelity = 5, .ratio = 8.3}};

TEST(Uniform, AFasterCodecForAllBucketsTakesOverWhereItWinsByHalfTheTolerance) {
  const Job faster(kNear, [](int c, int, uint64_t) { return c == 2 ? 0.097 : c == 1 ? 0.1 : 0.3; });
  const Job near(kNear, [](int c, int, uint64_t) { return c == 2 ? 0.098 : c == 1 ? 0.1 : 0.3; });
  const Job slower(kNear, [](int c, int, uint64_t) { return c == 2 ? 0.105 : c == 1 ? 0.1 : 0.3; });
  for (const Job* job : {&faster, &near, &slower}) {
    const Simulation& sim = job->sim;
    ASSERT_EQ(sim.gates[0].step(), 10u + 32 + 32);  // start-up, against dense, against the other
    ASSERT_EQ(job->challenges(), 2u);
    for (size_t i = 0; i < 32; ++i) {
      const bool window = i < 8 || i >= 24;
      EXPECT_EQ(sim.actions[0][10 + i].candidate, window ? 1 : 0) << i;
      for (size_t b = 0; b < 2; ++b) EXPECT_EQ(sim.actions[b][42 + i].candidate, window ? 2 : 1) << i;
    }
    for (size_t b = 0; b < 2; ++b) {
      EXPECT_EQ(sim.gates[0].running(b), job == &faster ? 2 : 1);
      EXPECT_EQ(sim.gates[0].decision(b).why, job == &faster ? Why::uniform : Why::kept);
    }
    EXPECT_TRUE(sim.lines("close").empty()) << "it closes nothing for good";
    EXPECT_EQ(sim.count(0, Action::flush), 0) << "the residual goes from codec to codec";
  }
  EXPECT_NEAR(faster.sim.gates[0].totals().plan_step_s, 0.097, 1e-12);
  EXPECT_NEAR(near.sim.gates[0].totals().plan_step_s, 0.1, 1e-12);
  // Each is explained by its own numbers, whatever was compared last.
  const std::string line = faster.sim.gates[0].explain(1).text, kept = near.sim.gates[0].explain(1).text;
  EXPECT_NE(line.find("(M/8.30)"), std::string::npos) << line;
  EXPECT_NE(line.find("→ lossy (verified 3.1x)"), std::string::npos) << line;
  EXPECT_NE(kept.find("(M/8.00)"), std::string::npos) << kept;
  EXPECT_NE(kept.find("→ faithful (verified 3.0x)"), std::string::npos) << kept;
}

// Single steps vary by 5 % either way, which is more than half of what is looked for.
TEST(Uniform, NoiseOfSingleStepsDoesNotDecide) {
  static const auto noisy = [](double seconds, uint64_t step) {
    uint64_t x = (step + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return seconds * (0.95 + 0.1 * static_cast<double>((x ^ x >> 31) >> 11) / 9007199254740992.0);
  };
  const Job faster(kNear, [](int c, int, uint64_t t) { return noisy(c == 2 ? 0.091 : c == 1 ? 0.1 : 0.3, t); });
  EXPECT_EQ(faster.sim.gates[0].running(0), 2);
  EXPECT_EQ(faster.sim.gates[0].running(1), 2);
  const Job equal(kNear, [](int c, int, uint64_t t) { return noisy(c != 0 ? 0.1 : 0.3, t); });
  EXPECT_EQ(equal.sim.gates[0].running(0), 1);
  EXPECT_EQ(equal.sim.gates[0].running(1), 1);
}

// Two of three steps are faster: 16 of 24 pairs, which no sign test takes for decided (p = 0.15).
TEST(Uniform, WhereThePairsDoNotDecideTheMedianHasToReachTheMargin) {
  const Job faster(kNear, [](int c, int, uint64_t t) {
    return c == 2 ? t % 3 == 0 ? 0.105 : 0.097 : c == 1 ? 0.1 : 0.3;
  });
  const Job near(kNear, [](int c, int, uint64_t t) {
    return c == 2 ? t % 3 == 0 ? 0.105 : 0.098 : c == 1 ? 0.1 : 0.3;
  });
  for (const Job* job : {&faster, &near}) {
    EXPECT_EQ(job->sim.gates[0].step(), 10u + 32 + 64);
    EXPECT_EQ(job->sim.lines("verify", "\"verdict\":\"undecided\"").size(), 1u);
    for (size_t b = 0; b < 2; ++b) EXPECT_EQ(job->sim.gates[0].running(b), job == &faster ? 2 : 1);
  }
}

// 8.18, 7.57 and 8.60 ms a bucket. The second fastest is more faithful than what runs, so any win will do; the third is
// not tried.
TEST(Uniform, TheSecondFastestIsComparedWhereTheFastestRuns) {
  const std::vector<SimCodec> codecs = {{.name = "faithful", .fidelity = 2, .ratio = 8},
                                        {.name = "lossy", .fidelity = 5, .ratio = 8.9},
                                        {.name = "exact", .fidelity = 1, .ratio = 7.5}};
  const Job faster(codecs, [](int c, int, uint64_t) { return c == 1 ? 0.098 : c == 2 ? 0.1 : c == 3 ? 0.05 : 0.3; });
  const Job slower(codecs, [](int c, int, uint64_t) { return c == 1 ? 0.102 : c == 2 ? 0.1 : c == 3 ? 0.05 : 0.3; });
  for (const Job* job : {&faster, &slower}) {
    EXPECT_EQ(job->sim.gates[0].step(), 12u + 32 + 32);
    EXPECT_EQ(job->challenges(), 2u);
    for (size_t b = 0; b < 2; ++b) EXPECT_EQ(job->sim.gates[0].running(b), job == &faster ? 1 : 2);
  }
}

// 8.18 ms against 5.18 ms a bucket, unless the wire then takes twice as long for the faster one as its model said: 8.48
// ms.
TEST(Uniform, WhatIsPredictedFarOffWhatWasSeenIsNotCompared) {
  for (const double wire_factor : {1.0, 2.0}) {
    const Job job({{.name = "faithful", .fidelity = 2, .ratio = 8},
                   {.name = "lossy", .fidelity = 5, .ratio = 16, .wire_factor = wire_factor}},
                  [](int c, int, uint64_t) { return c == 1   ? 0.05
                                                    : c == 2 ? 0.1
                                                             : 0.3; });
    EXPECT_EQ(job.sim.gates[0].step(), wire_factor == 1 ? 10u + 32 : 10u + 32 + 32);
    EXPECT_EQ(job.sim.gates[0].running(0), wire_factor == 1 ? 2 : 1);
  }
}

// A codec with a fixed cost is the fastest in the large bucket only (7.0 against 8.2 ms, and 1.7 against 1.1 ms), so
// both get a turn: the one that loses more has to win by the margin, the other only to win.
TEST(Uniform, BothCodecsOfAMixedPlanGetATurn) {
  const std::vector<SimCodec> codecs = {{.name = "faithful", .fidelity = 2, .ratio = 8},
                                        {.name = "lossy", .fidelity = 5, .ratio = 12, .fixed_s = 0.3e-3}};
  const Job mixed(codecs, [](int a, int b, uint64_t) { return a == 0 ? 0.3 : a == b ? 0.1 : 0.09; }, {4e6, 4e5});
  EXPECT_EQ(mixed.sim.gates[0].running(0), 2);
  EXPECT_EQ(mixed.sim.gates[0].running(1), 1);
  const Job lossy(codecs, [](int a, int b, uint64_t) { return a == 0   ? 0.3
                                                              : a != b ? 0.1
                                                              : a == 2 ? 0.09
                                                                       : 0.092; },
                  {4e6, 4e5});
  EXPECT_EQ(lossy.sim.gates[0].running(0), 2);
  EXPECT_EQ(lossy.sim.gates[0].running(1), 2);
  const Job faithful(codecs, [](int a, int b, uint64_t) { return a == 0   ? 0.3
                                                                 : a != b ? 0.1
                                                                 : a == 2 ? 0.09
                                                                          : 0.088; },
                     {4e6, 4e5});
  EXPECT_EQ(faithful.sim.gates[0].running(0), 1);
  EXPECT_EQ(faithful.sim.gates[0].running(1), 1);
  for (const Job* job : {&mixed, &lossy, &faithful}) {
    EXPECT_EQ(job->sim.gates[0].step(), 10u + 32 + 32 + 32);
    EXPECT_EQ(job->challenges(), 3u);
  }
}

// A bucket in which the codec costs more than it saves keeps what it runs.
TEST(Uniform, ABucketWhereTheCodecDoesNotPayStaysDense) {
  const std::vector<SimCodec> codecs = {{.name = "faithful", .fidelity = 2, .ratio = 8, .fixed_s = 0.2e-3},
                                        {.name = "lossy", .fidelity = 5, .ratio = 8.3, .fixed_s = 0.2e-3}};
  const Job job(codecs, [](int c, int, uint64_t) { return c == 2 ? 0.09 : c == 1 ? 0.1 : 0.3; }, {4e6, 1e3});
  EXPECT_EQ(job.sim.gates[0].running(0), 2);
  EXPECT_EQ(job.sim.gates[0].running(1), 0);
  EXPECT_EQ(job.sim.count(1, Action::dense), static_cast<int>(job.sim.gates[0].step()));
}

}  // namespace
}  // namespace gradgate::gate
