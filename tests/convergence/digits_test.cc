// The demo's data, network and trainer are right before anything is concluded from training with them.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "examples/digits/data.h"
#include "examples/digits/dense_math.h"
#include "examples/digits/network.h"
#include "examples/digits/random.h"
#include "examples/digits/trainer.h"

namespace gradgate::digits {
namespace {

TEST(DigitsData, IsTheTestSetOfUci) {
  const Dataset& digits = dataset();
  ASSERT_EQ(digits.count(), 1797u);
  ASSERT_EQ(digits.pixels.size(), 1797u * kPixels);
  std::array<int, kClasses> histogram{};
  for (uint8_t label : digits.labels) ++histogram[label];
  EXPECT_EQ(histogram, (std::array<int, kClasses>{178, 182, 177, 183, 181, 182, 181, 179, 174, 180}));
  EXPECT_EQ(*std::max_element(digits.pixels.begin(), digits.pixels.end()), 16);
  uint64_t sum = 0;
  for (uint8_t pixel : digits.pixels) sum += pixel;
  EXPECT_EQ(sum, 561718u);
  // The first line of the published file: a zero.
  const std::array<uint8_t, 16> first = {0, 0, 5, 13, 9, 1, 0, 0, 0, 0, 13, 15, 10, 15, 5, 0};
  EXPECT_TRUE(std::equal(first.begin(), first.end(), digits.image(0).begin()));
  EXPECT_EQ(digits.labels[0], 0);
}

TEST(DigitsData, DamagedFilesAreRefused) {
  const auto packed = packed_digits();
  ASSERT_TRUE(unpack_digits(packed).has_value());
  EXPECT_FALSE(unpack_digits({}).has_value());
  for (size_t length : {size_t{8}, size_t{23}, size_t{24}, packed.size() - 41, packed.size() - 1}) {
    EXPECT_FALSE(unpack_digits(packed.first(length)).has_value()) << length;
  }
  std::vector<uint8_t> damaged(packed.begin(), packed.end());
  for (size_t at : {size_t{0}, size_t{8}, size_t{11}, size_t{12}, size_t{15}, size_t{16}, size_t{23}, size_t{24}, damaged.size() - 1}) {
    damaged[at] ^= 1;
    EXPECT_FALSE(unpack_digits(damaged).has_value()) << "byte " << at;
    damaged[at] ^= 1;
  }
  damaged.push_back(0);
  EXPECT_FALSE(unpack_digits(damaged).has_value());
}

// A file with a valid checksum and one image, of which the test chooses the record.
std::vector<uint8_t> one_image(const std::array<uint8_t, 41>& record) {
  std::vector<uint8_t> file = {'O', 'P', 'T', 'D', 'I', 'G', 'I', 'T', 1, 0, 0, 0, 8, 8, 5, 10};
  uint64_t sum = 0xcbf29ce484222325u;
  for (uint8_t byte : record) sum = (sum ^ byte) * 0x100000001b3u;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<uint8_t>(sum >> (8 * i)));
  file.insert(file.end(), record.begin(), record.end());
  return file;
}

TEST(DigitsData, PixelsAndLabelsOutOfRangeAreRefused) {
  std::array<uint8_t, 41> record{};
  record[0] = 16;
  record[40] = 9;
  const auto good = unpack_digits(one_image(record));
  ASSERT_TRUE(good.has_value());
  EXPECT_EQ(good->pixels[0], 16);
  EXPECT_EQ(good->labels[0], 9);
  record[0] = 17;
  EXPECT_FALSE(unpack_digits(one_image(record)).has_value());
  record[0] = 16;
  record[40] = 10;
  EXPECT_FALSE(unpack_digits(one_image(record)).has_value());
}

std::vector<float> random_floats(size_t count, uint64_t stream) {
  Random random(7, stream);
  std::vector<float> values(count);
  for (float& v : values) v = random.symmetric();
  return values;
}

TEST(DenseMath, ProductsOfEveryShapeMatchPlainLoops) {
  for (size_t rows : {1u, 3u, 4u, 9u}) {
    for (size_t in : {16u, 48u, 64u}) {
      for (size_t out : {1u, 3u, 4u, 10u, 33u}) {
        SCOPED_TRACE(testing::Message() << rows << " x " << in << " x " << out);
        const LayerShape shape{rows, in, out};
        const auto x = random_floats(rows * in, 0), w = random_floats(out * in, 1), b = random_floats(out, 2), dy = random_floats(rows * out, 3);
        std::vector<float> y(rows * out), dx(rows * in), dw(out * in), db(out);
        forward_product(shape, x.data(), w.data(), b.data(), y.data());
        backward_input(shape, dy.data(), w.data(), dx.data());
        backward_weights(shape, dy.data(), x.data(), dw.data(), db.data());
        for (size_t r = 0; r < rows; ++r) {
          for (size_t o = 0; o < out; ++o) {
            double sum = b[o];
            for (size_t i = 0; i < in; ++i) sum += static_cast<double>(x[r * in + i]) * w[o * in + i];
            ASSERT_NEAR(y[r * out + o], sum, 1e-5);
          }
          for (size_t i = 0; i < in; ++i) {
            double sum = 0;
            for (size_t o = 0; o < out; ++o) sum += static_cast<double>(dy[r * out + o]) * w[o * in + i];
            ASSERT_NEAR(dx[r * in + i], sum, 1e-5);
          }
        }
        for (size_t o = 0; o < out; ++o) {
          double bias = 0;
          for (size_t r = 0; r < rows; ++r) bias += dy[r * out + o];
          ASSERT_NEAR(db[o], bias, 1e-5);
          for (size_t i = 0; i < in; ++i) {
            double sum = 0;
            for (size_t r = 0; r < rows; ++r) sum += static_cast<double>(dy[r * out + o]) * x[r * in + i];
            ASSERT_NEAR(dw[o * in + i], sum, 1e-5);
          }
        }
      }
    }
  }
}

TEST(DenseMath, TilesDoNotChangeBits) {
  const LayerShape all{9, 64, 10};
  const auto x = random_floats(9 * 64, 0), w = random_floats(10 * 64, 1), b = random_floats(10, 2);
  std::vector<float> together(9 * 10), alone(10);
  forward_product(all, x.data(), w.data(), b.data(), together.data());
  for (size_t r = 0; r < 9; ++r) {
    for (size_t o = 0; o < 10; ++o) forward_product({1, 64, 1}, x.data() + r * 64, w.data() + o * 64, b.data() + o, &alone[o]);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + static_cast<ptrdiff_t>(r * 10))) << "row " << r;
  }
}

TEST(Network, ExpIsAccurate) {
  for (double x = 0; x > -699; x -= 0.37) EXPECT_NEAR(exp_nonpositive(x) / std::exp(x), 1, 1e-9) << x;
  EXPECT_EQ(exp_nonpositive(0), 1);
  EXPECT_EQ(exp_nonpositive(-1e6), 0);
  EXPECT_TRUE(std::isnan(exp_nonpositive(std::nan(""))));
}

// The mean loss of a batch in double, by plain loops that share nothing with the network but its parameters' order.
double plain_loss(std::span<const ParameterSlice> parameters, std::span<const double> weights, std::span<const uint32_t> images) {
  double loss = 0;
  for (uint32_t image : images) {
    std::vector<double> x;
    for (uint8_t pixel : dataset().image(image)) x.push_back(pixel / 16.0);
    for (size_t layer = 0; layer < 3; ++layer) {
      const auto w = weights.subspan(parameters[2 * layer].offset), b = weights.subspan(parameters[2 * layer + 1].offset);
      std::vector<double> y(parameters[2 * layer + 1].count);
      for (size_t o = 0; o < y.size(); ++o) {
        y[o] = b[o];
        for (size_t i = 0; i < x.size(); ++i) y[o] += w[o * x.size() + i] * x[i];
        if (layer < 2) y[o] = std::max(y[o], 0.0);
      }
      x = y;
    }
    double sum = 0;
    for (double score : x) sum += std::exp(score);
    loss += std::log(sum) - x[dataset().labels[image]];
  }
  return loss / static_cast<double>(images.size());
}

TEST(Network, GradientMatchesFiniteDifferences) {
  Network network(32, 8);
  const auto parameters = network.parameters();
  ASSERT_EQ(parameters.size(), 6u);
  ASSERT_EQ(network.parameter_count(), 64u * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10);
  std::vector<float> weights(network.parameter_count()), gradient(weights.size());
  network.initialize(3, weights);
  const auto biases = random_floats(32, 5);
  for (size_t p : {size_t{1}, size_t{3}}) {  // biases start at zero, which would hide a mistake
    for (size_t i = 0; i < 32; ++i) weights[parameters[p].offset + i] = 0.1f * biases[i];
  }
  const std::vector<uint32_t> images = {0, 5, 100, 700, 1500, 1796, 42};
  network.load(images);
  network.forward(weights);
  std::vector<double> exact(weights.begin(), weights.end());
  EXPECT_NEAR(network.backward(weights, gradient), plain_loss(parameters, exact, images), 1e-5);

  for (const ParameterSlice& p : parameters) {
    double largest = 0, worst = 0;
    for (size_t i = 0; i < p.count; i += p.count > 400 ? 7 : 1) {
      const size_t at = p.offset + i;
      const double kStep = 1e-5, centre = exact[at];
      exact[at] = centre + kStep;
      const double up = plain_loss(parameters, exact, images);
      exact[at] = centre - kStep;
      const double down = plain_loss(parameters, exact, images);
      exact[at] = centre;
      const double numeric = (up - down) / (2 * kStep);
      largest = std::max(largest, std::fabs(numeric));
      worst = std::max(worst, std::fabs(numeric - gradient[at]));
    }
    EXPECT_GT(largest, 1e-3) << p.name;
    EXPECT_LT(worst, 1e-5 * std::max(1.0, largest)) << p.name;
  }
}

TEST(Trainer, ShardsCutTheTrainingImagesByClass) {
  const auto train = train_images(), test = test_images();
  EXPECT_EQ(train.size(), kTrainImages);
  EXPECT_EQ(test.size(), kTestImages);
  std::set<uint32_t> seen(test.begin(), test.end());
  for (size_t ranks : {1u, 2u, 3u, 4u, 5u, 8u}) {
    std::vector<uint32_t> joined;
    for (size_t r = 0; r < ranks; ++r) {
      const auto part = shard(r, ranks);
      EXPECT_GE(part.size(), kTrainImages / ranks);
      std::set<uint8_t> classes;
      for (uint32_t image : part) classes.insert(dataset().labels[image]);
      EXPECT_LE(classes.size(), kClasses / ranks + 2) << r << " of " << ranks;
      joined.insert(joined.end(), part.begin(), part.end());
    }
    EXPECT_TRUE(std::equal(joined.begin(), joined.end(), train.begin(), train.end()));
  }
  EXPECT_TRUE(std::is_sorted(train.begin(), train.end(), [](uint32_t a, uint32_t b) { return dataset().labels[a] < dataset().labels[b]; }));
  seen.insert(train.begin(), train.end());
  EXPECT_EQ(seen.size(), dataset().count());
  EXPECT_EQ(*seen.rbegin(), 1796u);
}

TEST(Trainer, ParametersTileTheGradient) {
  Trainer trainer(0, 4, 1);
  size_t end = 0;
  uint32_t id = 0;
  for (const ParameterSlice& p : trainer.parameters()) {
    EXPECT_EQ(p.id, id++);
    EXPECT_EQ(p.offset, end);
    EXPECT_GT(p.count, 0u);
    EXPECT_FALSE(std::string(p.name).empty());
    end += p.count;
  }
  EXPECT_EQ(end, trainer.gradient().size());
  EXPECT_EQ(end, 994570u);
}

Recipe small_recipe() {
  Recipe recipe;
  recipe.hidden = 48;
  recipe.momentum = 0.5f;
  return recipe;
}

uint64_t hash_after(size_t rank, uint64_t seed, uint64_t steps) {
  Trainer trainer(rank, 4, seed, small_recipe());
  for (uint64_t step = 0; step < steps; ++step) {
    trainer.compute_gradient(step);
    trainer.apply(trainer.gradient());
  }
  return trainer.weights_hash();
}

TEST(Trainer, RunsRepeatBitForBit) {
  EXPECT_EQ(hash_after(0, 1, 0), hash_after(3, 1, 0));  // ranks start alike
  EXPECT_NE(hash_after(0, 1, 0), hash_after(0, 2, 0));
  EXPECT_EQ(hash_after(1, 1, 60), hash_after(1, 1, 60));
  EXPECT_NE(hash_after(1, 1, 60), hash_after(2, 1, 60));
  // The same on every machine: all of the arithmetic is IEEE operations in a fixed order.
  EXPECT_EQ(hash_after(1, 1, 60), 2354855041165806394u);
}

TEST(Trainer, AStepIsAFunctionOfItsNumber) {
  Trainer forward(2, 4, 1, small_recipe()), jumping(2, 4, 1, small_recipe());
  std::vector<std::vector<float>> gradients;
  for (uint64_t step = 0; step < 50; ++step) {  // more than two epochs of the shard
    forward.compute_gradient(step);
    gradients.emplace_back(forward.gradient().begin(), forward.gradient().end());
  }
  for (uint64_t step : {49u, 0u, 22u, 23u, 22u}) {
    jumping.compute_gradient(step);
    EXPECT_TRUE(std::equal(gradients[step].begin(), gradients[step].end(), jumping.gradient().begin())) << step;
  }
  EXPECT_NE(gradients[0], gradients[1]);
}

TEST(Trainer, TheLearningRateFallsToNothing) {
  Recipe recipe = small_recipe();
  recipe.momentum = 0;
  recipe.steps = 10;
  recipe.cooldown = 4;
  const auto change = [&](uint64_t step) {
    Trainer trainer(0, 1, 1, recipe);
    const std::vector<float> before(trainer.weights().begin(), trainer.weights().end());
    trainer.compute_gradient(step);
    trainer.apply(std::vector<float>(before.size(), 1.0f));
    return static_cast<double>(before[0]) - trainer.weights()[0];
  };
  EXPECT_NEAR(change(0), recipe.learning_rate, 1e-6);
  EXPECT_NEAR(change(6), recipe.learning_rate, 1e-6);
  EXPECT_NEAR(change(7), recipe.learning_rate * 0.75, 1e-6);
  EXPECT_NEAR(change(9), recipe.learning_rate * 0.25, 1e-6);
  EXPECT_EQ(change(10), 0);
}

TEST(Trainer, LearnsWithoutAnyGate) {
  Recipe recipe = small_recipe();
  std::vector<Trainer> ranks;
  for (size_t r = 0; r < 4; ++r) ranks.emplace_back(r, 4, 1, recipe);
  EXPECT_LT(ranks[0].accuracy(), 0.3);
  std::vector<float> mean(ranks[0].gradient().size());
  for (uint64_t step = 0; step < recipe.steps; ++step) {
    std::fill(mean.begin(), mean.end(), 0.0f);
    for (Trainer& rank : ranks) {
      rank.compute_gradient(step);
      for (size_t i = 0; i < mean.size(); ++i) mean[i] += 0.25f * rank.gradient()[i];
    }
    for (Trainer& rank : ranks) rank.apply(mean);
  }
  for (Trainer& rank : ranks) EXPECT_EQ(rank.weights_hash(), ranks[0].weights_hash());
  EXPECT_GE(ranks[0].accuracy(), 0.95);
}

}  // namespace
}  // namespace gradgate::digits
