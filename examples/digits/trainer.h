// One rank of a data-parallel training. The trainer computes gradients and applies averaged ones; bringing the average about is the
// caller's part, so this library knows no gradient exchange:
//
//   Trainer trainer(rank, ranks, seed);
//   for (uint64_t step = 0; step < trainer.recipe().steps; ++step) {
//     trainer.compute_gradient(step);
//     average(trainer.gradient());           // over ranks, in place, the same bits on every rank
//     trainer.apply(trainer.gradient());
//   }
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "examples/digits/network.h"

namespace gradgate::digits {

// The training that the demo and the convergence tests run. README.md tells how the numbers were chosen.
struct Recipe {
  size_t ranks = 4;
  size_t hidden = 960;  // 994,570 parameters: 3.98 MB of gradient
  size_t batch = 16;    // images per rank and step
  uint64_t steps = 200;
  float learning_rate = 0.1f;  // falls linearly to nothing over the last `cooldown` steps
  uint64_t cooldown = 40;
  float momentum = 0;  // sparsified gradients arrive late, and momentum repeats them
  // chunk-topk:keep/chunk, the setting with which feedback is shown to matter.
  size_t topk_keep = 6;
  size_t topk_chunk = 1024;
};

constexpr size_t kTrainImages = 1437;
constexpr size_t kTestImages = 360;

// A fixed random split of dataset(), the same for every seed and number of ranks. train_images() is ordered by class.
std::span<const uint32_t> train_images();
std::span<const uint32_t> test_images();

// The part of train_images() that a rank trains on: a contiguous cut, so that a rank meets only some of the classes, and the ranks'
// gradients differ as much as they can. 0 <= rank < ranks.
std::span<const uint32_t> shard(size_t rank, size_t ranks);

class Trainer {
 public:
  // Initial parameters depend on `seed` alone and so agree on all ranks; the order of images depends on seed and rank. Allocates
  // everything that later calls need. 0 <= rank < ranks <= kTrainImages.
  Trainer(size_t rank, size_t ranks, uint64_t seed, const Recipe& recipe = {});

  const Recipe& recipe() const noexcept { return recipe_; }
  std::span<const ParameterSlice> parameters() const noexcept { return network_.parameters(); }

  // Gradient of the mean loss over this rank's batch of `step`, into gradient(); returns that loss. A function of the parameters,
  // the seed, the rank and the step: steps may be repeated or skipped.
  double compute_gradient(uint64_t step) noexcept;
  std::span<float> gradient() noexcept { return gradient_; }

  // One step of SGD with momentum, at the learning rate of the step that compute_gradient() was last called with. `averaged`: the
  // mean over ranks of their gradients, of the length of gradient().
  void apply(std::span<const float> averaged) noexcept;

  // Share of the test images that the present parameters classify right, 0..1.
  double accuracy() noexcept;

  std::span<const float> weights() const noexcept { return weights_; }
  // FNV-1a over the bits of all parameters: equal on all ranks after every step, or the exchange is broken.
  uint64_t weights_hash() const noexcept;

 private:
  void fill_batch(uint64_t step) noexcept;

  Recipe recipe_;
  Network network_;
  std::vector<float> weights_, velocity_, gradient_;
  std::span<const uint32_t> shard_;
  std::vector<uint32_t> order_, batch_;
  uint64_t order_key_, epoch_, step_ = 0;
};

}  // namespace gradgate::digits
