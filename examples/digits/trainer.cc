#include "examples/digits/trainer.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "examples/digits/dense_math.h"
#include "examples/digits/random.h"

namespace gradgate::digits {
namespace {

constexpr uint64_t kSplitSeed = 1797;
constexpr size_t kEvaluationRows = 60;
constexpr uint64_t kNoEpoch = ~uint64_t{0};

struct Split {
  std::vector<uint32_t> train, test;

  Split() {
    std::vector<uint32_t> all(dataset().count());
    std::iota(all.begin(), all.end(), 0u);
    Random(kSplitSeed, 0).shuffle(std::span(all));
    const size_t cut = std::min(kTrainImages, all.size());
    train.assign(all.begin(), all.begin() + static_cast<ptrdiff_t>(cut));
    test.assign(all.begin() + static_cast<ptrdiff_t>(cut), all.end());
    std::stable_sort(train.begin(), train.end(),
                     [](uint32_t a, uint32_t b) { return dataset().labels[a] < dataset().labels[b]; });
  }
};

const Split& split() {
  static const Split instance;
  return instance;
}

}  // namespace

std::span<const uint32_t> train_images() { return split().train; }
std::span<const uint32_t> test_images() { return split().test; }

std::span<const uint32_t> shard(size_t rank, size_t ranks) {
  const auto all = train_images();
  const size_t first = all.size() * rank / ranks, last = all.size() * (rank + 1) / ranks;
  return all.subspan(first, last - first);
}

Trainer::Trainer(size_t rank, size_t ranks, uint64_t seed, const Recipe& recipe)
    : recipe_(recipe),
      network_(recipe.hidden, std::max(recipe.batch, kEvaluationRows)),
      weights_(network_.parameter_count()),
      velocity_(network_.parameter_count()),
      gradient_(network_.parameter_count()),
      shard_(shard(rank, ranks)),
      order_(shard_.size()),
      batch_(recipe.batch),
      order_key_(Random(seed, 1000 + rank).next()),
      epoch_(kNoEpoch) {
  network_.initialize(seed, weights_);
}

// Batches run through the shard in a random order that is drawn anew each time the shard is used up.
void Trainer::fill_batch(uint64_t step) noexcept {
  for (size_t i = 0; i < batch_.size(); ++i) {
    const uint64_t position = step * batch_.size() + i;
    const uint64_t epoch = position / order_.size();
    if (epoch != epoch_) {
      std::copy(shard_.begin(), shard_.end(), order_.begin());
      Random(order_key_, epoch).shuffle(std::span(order_));
      epoch_ = epoch;
    }
    batch_[i] = order_[position % order_.size()];
  }
}

double Trainer::compute_gradient(uint64_t step) noexcept {
  step_ = step;
  fill_batch(step);
  network_.load(batch_);
  network_.forward(weights_);
  return network_.backward(weights_, gradient_);
}

void Trainer::apply(std::span<const float> averaged) noexcept {
  const uint64_t left = recipe_.steps > step_ ? recipe_.steps - step_ : 0;
  const float scale = left < recipe_.cooldown ? static_cast<float>(left) / static_cast<float>(recipe_.cooldown) : 1.0f;
  momentum_step(weights_.size(), scale * recipe_.learning_rate, recipe_.momentum, averaged.data(), velocity_.data(),
                weights_.data());
}

double Trainer::accuracy() noexcept {
  const auto images = test_images();
  size_t right = 0;
  for (size_t first = 0; first < images.size(); first += kEvaluationRows) {
    const auto rows = images.subspan(first, std::min(kEvaluationRows, images.size() - first));
    network_.load(rows);
    const auto scores = network_.forward(weights_);
    for (size_t r = 0; r < rows.size(); ++r) {
      const auto row = scores.subspan(r * kClasses, kClasses);
      right += static_cast<size_t>(std::max_element(row.begin(), row.end()) - row.begin()) == dataset().labels[rows[r]];
    }
  }
  return static_cast<double>(right) / static_cast<double>(images.size());
}

uint64_t Trainer::weights_hash() const noexcept {
  uint64_t value = 0xcbf29ce484222325u;
  for (float w : weights_) value = (value ^ std::bit_cast<uint32_t>(w)) * 0x100000001b3u;
  return value;
}

}  // namespace gradgate::digits
