// The runs behind `gradgate demo`: the digits training over ranks as threads, once per codec for accuracy, and per link
// for step times. No printing.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "examples/digits/trainer.h"
#include "gradgate/gradgate.h"
#include "integration/cli/ranks.h"

namespace gradgate::cli {

/// What the demo compares. codecs[0] is "none"; the gate chooses among all of them.
struct DemoSetup {
  int ranks = 4;
  uint64_t seed = 1;
  digits::Recipe recipe;
  std::vector<std::string> codecs = {
      "none", "bf16", "int8",
      "chunk-topk:" + std::to_string(recipe.topk_keep) + "/" + std::to_string(recipe.topk_chunk)};
  int rounds = 8;         ///< of interleaved windows per link
  int window = 6;         ///< steps of a window; the first kWindowDiscard are not counted
  double timeout_s = 60;  ///< of every wait
};
inline constexpr int kWindowDiscard = 2;

/// Called now and then from rank 0's thread: what is running, and how far it is (0 … 1).
using DemoProgress = std::function<void(const std::string& what, double fraction)>;

struct TrainingResult {
  std::string codec;
  double accuracy = 0;          ///< share of the test images, on rank 0
  double wire_ratio = 1;        ///< gradient bytes ÷ bytes that were sent in their place
  bool replicas_equal = false;  ///< the parameters of all ranks ended bit-identical
};
/// One training per codec, unshaped. Over ranks on devices (Ranks::open) a gradient is reduced in device memory: copied
/// there, reduced, copied back. Throws RunError with rank and message when a rank fails.
std::vector<TrainingResult> train_per_codec(Ranks& ranks, const DemoSetup& setup, const DemoProgress& progress);

/// Seconds of a step: median with the 10 % and 90 % quantiles, of the MAX over ranks.
struct StepTime {
  double median_s = 0, low_s = 0, high_s = 0;
  int samples = 0;
};
struct LinkResult {
  std::vector<StepTime> fixed;  ///< one per codec of the setup
  StepTime automatic;
  std::string chosen;       ///< the codec auto settled on
  std::string phase;        ///< of the gate, when its training ended
  std::string explanation;  ///< the inequality
  double accuracy = 0;      ///< of the training under auto, after equal steps
  bool replicas_equal = false;
  int settle_steps = 0;  ///< steps until the gate was in hold; −1: not within the training
  double gate_s = 0;     ///< probing, shadow measurements and agreements of that training
  double settle_s = 0;   ///< wall time of the steps before hold
};
/// Trains under auto on the link (without one: the ranks as they are), then times all codecs and auto in interleaved
/// windows. Throws as train_per_codec().
LinkResult run_link(Ranks& ranks, const DemoSetup& setup, const std::optional<NamedLink>& link,
                    const DemoProgress& progress);

}  // namespace gradgate::cli
