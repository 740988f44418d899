// The demo's model: a multi-layer perceptron 64 -> H -> H -> 10 with ReLU and softmax cross-entropy, in plain C++. Parameters and
// gradients are flat float arrays described by named slices, as a gradient library meets them in any trainer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "examples/digits/data.h"

namespace gradgate::digits {

// A parameter's place in the flat arrays, in elements.
struct ParameterSlice {
  uint32_t id;
  const char* name;
  size_t offset;
  size_t count;
};

class Network {
 public:
  static constexpr size_t kLayers = 3;

  // `hidden` is rounded up to a multiple of 16; `max_rows` bounds a call's batch. Allocates all the scratch that calls need.
  Network(size_t hidden, size_t max_rows);

  // weights and bias of each layer, in order, without gaps: three matrices [out][in] and three vectors.
  std::span<const ParameterSlice> parameters() const noexcept { return slices_; }
  size_t parameter_count() const noexcept { return slices_.back().offset + slices_.back().count; }
  size_t max_rows() const noexcept { return max_rows_; }

  // He's uniform initialisation for weights, zeros for biases: a function of seed alone.
  void initialize(uint64_t seed, std::span<float> weights) const noexcept;

  // Sets the batch: `images` indexes dataset(), at most max_rows of them. Pixels become pixel / 16.
  void load(std::span<const uint32_t> images) noexcept;

  // Class scores [rows][10] of the loaded batch.
  std::span<const float> forward(std::span<const float> weights) noexcept;

  // After forward(): writes the gradient of the mean loss to every element of `gradient` and returns that loss.
  double backward(std::span<const float> weights, std::span<float> gradient) noexcept;

 private:
  struct Layer {
    size_t in, out, weights, bias;  // weights and bias: offsets
  };

  size_t max_rows_, rows_ = 0;
  std::array<Layer, kLayers> layers_;
  std::array<ParameterSlice, 2 * kLayers> slices_;
  std::array<std::vector<float>, kLayers + 1> activations_;  // [0] the pixels, [kLayers] the scores
  std::array<std::vector<float>, kLayers + 1> deltas_;       // loss by activation; [0] unused
  std::vector<uint8_t> labels_;
};

// e^x for x <= 0 by exact operations only (no libm, whose variants differ between machines): relative error below 1e-9, and 0
// below -700. NaN gives NaN.
double exp_nonpositive(double x) noexcept;

}  // namespace gradgate::digits
