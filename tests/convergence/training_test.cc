// What codecs do to a real training: the digits, four ranks with sorted shards, through sessions. Deterministic: no
// time is measured.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "examples/digits/trainer.h"
#include "gradgate/gradgate.h"
#include "tests/support/rank_harness.h"

namespace gradgate::test {
namespace {

constexpr int kRanks = 4;

CodecSpec codec(const std::string& text) {
  CodecSpec spec;
  Message why;
  EXPECT_TRUE(parse_codec(text, &spec, &why).ok()) << why.text;
  return spec;
}

std::string topk() {
  const digits::Recipe recipe;
  return "chunk-topk:" + std::to_string(recipe.topk_keep) + "/" + std::to_string(recipe.topk_chunk);
}

struct Outcome {
  double accuracy = 0;
  std::string chosen, phase;
  uint64_t compressed = 0;
};

/// One training. With a link the ranks share a virtual clock on which computing a gradient takes 5 ms and codecs run at
/// 2 GB/s.
Outcome train(uint64_t seed, Mode mode, const std::vector<CodecSpec>& codecs, const LinkSpec* link = nullptr,
              uint64_t steps = 0) {
  Outcome outcome;
  digits::Recipe recipe;
  if (steps != 0) recipe.steps = steps;
  std::vector<uint64_t> hashes(kRanks);
  const auto group = make_group(kRanks);
  run_on(
      *group,
      [&](Communicator& bare) {
        std::unique_ptr<Communicator> shaped;
        if (link != nullptr) {
          ASSERT_TRUE(make_shaped(bare, *link, ClockKind::virtual_time, &shaped).ok());
        }
        Communicator& comm = link != nullptr ? *shaped : bare;
        digits::Trainer trainer(static_cast<size_t>(comm.rank()), kRanks, seed, recipe);
        SessionOptions options;
        options.error_budget = 10;  // what a codec does by itself: the guard would replace topk without feedback
        options.mode = mode;
        options.codecs = codecs;
        options.timeout_s = 100;
        options.virtual_rates = {2e9, 2e9};
        std::unique_ptr<Session> session;
        Message why;
        ASSERT_TRUE(Session::create(comm, options, &session, &why).ok()) << why.text;
        std::vector<ParamSlice> slices;
        for (const digits::ParameterSlice& p : trainer.parameters()) slices.push_back({p.id, p.offset, p.count});
        const BucketLayout bucket{DType::f32, slices};
        ASSERT_TRUE(session->set_layout({&bucket, 1}).ok()) << session->last_error();
        for (uint64_t step = 0; step < recipe.steps; ++step) {
          trainer.compute_gradient(step);
          comm.advance(5e-3);
          ASSERT_TRUE(session->all_reduce(0, {trainer.gradient().data(), trainer.gradient().size(), DType::f32}).ok())
              << session->last_error();
          trainer.apply(trainer.gradient());
        }
        hashes[static_cast<size_t>(comm.rank())] = trainer.weights_hash();
        if (comm.rank() == 0) {
          outcome.accuracy = 100 * trainer.accuracy();
          outcome.chosen = format_codec(session->current(0).codec).text;
          outcome.phase = session->phase();
          outcome.compressed = session->stats().compressed_buckets;
        }
      },
      500);
  for (const uint64_t hash : hashes) EXPECT_EQ(hash, hashes[0]) << "replicas differ";
  return outcome;
}

/// Mean accuracy in percentage points over three seeds.
double mean_accuracy(Mode mode, const std::string& spec) {
  double sum = 0;
  for (const uint64_t seed : {1, 2, 3}) sum += train(seed, mode, {codec(spec)}).accuracy;
  return sum / 3;
}

TEST(Training, FeedbackKeepsTheAccuracyThatTopkAloneLoses) {
  const double dense = mean_accuracy(Mode::off, "none");
  const double int8 = mean_accuracy(Mode::on, "int8");
  const double with_feedback = mean_accuracy(Mode::on, topk());
  const double without = mean_accuracy(Mode::on, topk() + ":noef");
  RecordProperty("dense", std::to_string(dense));
  RecordProperty("int8", std::to_string(int8));
  RecordProperty("topk", std::to_string(with_feedback));
  RecordProperty("topk_noef", std::to_string(without));
  EXPECT_GE(dense, 95);
  EXPECT_NEAR(int8, dense, 1.5);
  EXPECT_NEAR(with_feedback, dense, 1.5);
  EXPECT_LE(without, dense - 3);
}

TEST(Training, AutoCompressesOnAVirtualGigabitLinkAndNotOnNvlink) {
  const LinkSpec gigabit{50e-6, 125e6}, nvlink{0.5e-6, 450e9};
  const Outcome slow = train(1, Mode::automatic, {codec("bf16"), codec("int8")}, &gigabit, 90);
  EXPECT_EQ(slow.chosen, "int8");
  EXPECT_EQ(slow.phase, "hold");
  EXPECT_GT(slow.compressed, 30u);
  const Outcome fast = train(1, Mode::automatic, {codec("bf16"), codec("int8")}, &nvlink, 90);
  EXPECT_EQ(fast.chosen, "none");
  EXPECT_EQ(fast.compressed, 0u);
}

}  // namespace
}  // namespace gradgate::test
