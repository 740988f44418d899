#include "examples/digits/network.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "examples/digits/dense_math.h"
#include "examples/digits/random.h"

namespace gradgate::digits {

double exp_nonpositive(double x) noexcept {
  if (x < -700) return 0;
  if (!(x <= 0)) return x > 0 ? 1 : x;  // rounding may leave a hair above zero; NaN passes through
  // e^x = 2^k e^r with |r| <= ln(2) / 2. Adding and subtracting 1.5 * 2^52 rounds to the nearest integer.
  constexpr double kLog2E = 0x1.71547652b82fep+0, kLn2 = 0x1.62e42fefa39efp-1, kRound = 0x1.8p52;
  const double k = (x * kLog2E + kRound) - kRound;
  const double r = x - k * kLn2;
  double sum = 1;
  for (int n = 11; n > 0; --n) sum = 1 + sum * r / n;
  return sum * std::bit_cast<double>(static_cast<uint64_t>(1023 + static_cast<int64_t>(k)) << 52);
}

Network::Network(size_t hidden, size_t max_rows) : max_rows_(max_rows) {
  static constexpr const char* kNames[2 * kLayers] = {"hidden1.weight", "hidden1.bias", "hidden2.weight",
                                                      "hidden2.bias",   "output.weight", "output.bias"};
  hidden = (hidden + kLanes - 1) / kLanes * kLanes;
  const std::array<size_t, kLayers + 1> width = {kPixels, hidden, hidden, kClasses};
  size_t offset = 0;
  uint32_t id = 0;
  const auto add = [&](size_t count) {
    slices_[id] = {id, kNames[id], offset, count};
    ++id;
    offset += count;
    return offset - count;
  };
  for (size_t l = 0; l < kLayers; ++l) {
    layers_[l] = {width[l], width[l + 1], 0, 0};
    layers_[l].weights = add(width[l] * width[l + 1]);
    layers_[l].bias = add(width[l + 1]);
  }
  for (size_t l = 0; l <= kLayers; ++l) {
    activations_[l].resize(max_rows * width[l]);
    deltas_[l].resize(l == 0 ? 0 : max_rows * width[l]);
  }
  labels_.resize(max_rows);
}

void Network::initialize(uint64_t seed, std::span<float> weights) const noexcept {
  std::fill(weights.begin(), weights.end(), 0.0f);
  for (size_t l = 0; l < kLayers; ++l) {
    Random random(seed, l);
    const auto bound = static_cast<float>(std::sqrt(6.0 / static_cast<double>(layers_[l].in)));
    for (float& w : weights.subspan(layers_[l].weights, layers_[l].in * layers_[l].out)) w = bound * random.symmetric();
  }
}

void Network::load(std::span<const uint32_t> images) noexcept {
  rows_ = images.size();
  for (size_t r = 0; r < rows_; ++r) {
    const auto image = dataset().image(images[r]);
    float* out = activations_[0].data() + r * kPixels;
    for (size_t p = 0; p < kPixels; ++p) out[p] = static_cast<float>(image[p]) * (1.0f / kMaxPixel);
    labels_[r] = dataset().labels[images[r]];
  }
}

std::span<const float> Network::forward(std::span<const float> weights) noexcept {
  for (size_t l = 0; l < kLayers; ++l) {
    const Layer& layer = layers_[l];
    float* y = activations_[l + 1].data();
    forward_product({rows_, layer.in, layer.out}, activations_[l].data(), weights.data() + layer.weights,
                    weights.data() + layer.bias, y);
    if (l + 1 == kLayers) break;
    for (size_t i = 0; i < rows_ * layer.out; ++i) y[i] = y[i] > 0 ? y[i] : 0.0f;
  }
  return {activations_[kLayers].data(), rows_ * kClasses};
}

double Network::backward(std::span<const float> weights, std::span<float> gradient) noexcept {
  double loss = 0;
  for (size_t r = 0; r < rows_; ++r) {  // softmax in double, so that its rounding is far below that of float
    const float* scores = activations_[kLayers].data() + r * kClasses;
    float* delta = deltas_[kLayers].data() + r * kClasses;
    const double top = *std::max_element(scores, scores + kClasses);
    double power[kClasses], sum = 0;
    for (size_t c = 0; c < kClasses; ++c) sum += power[c] = exp_nonpositive(scores[c] - top);
    for (size_t c = 0; c < kClasses; ++c) {
      const double target = c == labels_[r] ? 1 : 0;
      delta[c] = static_cast<float>((power[c] / sum - target) / static_cast<double>(rows_));
    }
    loss += std::log(sum) + top - scores[labels_[r]];
  }
  for (size_t l = kLayers; l-- > 0;) {
    const Layer& layer = layers_[l];
    const LayerShape shape{rows_, layer.in, layer.out};
    backward_weights(shape, deltas_[l + 1].data(), activations_[l].data(), gradient.data() + layer.weights,
                     gradient.data() + layer.bias);
    if (l == 0) break;
    float* dx = deltas_[l].data();
    const float* x = activations_[l].data();
    backward_input(shape, deltas_[l + 1].data(), weights.data() + layer.weights, dx);
    for (size_t i = 0; i < rows_ * layer.in; ++i) dx[i] = x[i] > 0 ? dx[i] : 0.0f;
  }
  return loss / static_cast<double>(rows_);
}

}  // namespace gradgate::digits
