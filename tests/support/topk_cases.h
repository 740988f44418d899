// Vectors that are hard to choose from exactly, with the specs that are tried on them: the same for the CPU's topk and
// the device's.
#pragma once

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "tests/support/gen.h"

namespace gradgate::test {

/// Several chunks and a part of one.
inline constexpr size_t kLong = 3 * 65536 + 777;

struct TopkCase {
  const char* spec;
  std::vector<float> x;
  std::string what;
};

inline std::vector<TopkCase> topk_all_equal() {
  std::vector<TopkCase> cases;
  for (const char* spec : {"topk:0.01", "topk:0.4", "topk:0.2:int8"}) {
    cases.push_back({spec, std::vector<float>(kLong, 0.25f), "all equal"});
    cases.push_back({spec, std::vector<float>(kLong, -0.0f), "all zero"});
  }
  return cases;
}

inline std::vector<TopkCase> topk_sorted() {
  std::vector<float> x(kLong);
  for (size_t i = 0; i < kLong; ++i) x[i] = static_cast<float>(i + 1) * (i % 2 == 0 ? 1.0f : -1.0f);
  const std::vector<float> y(x.rbegin(), x.rend());
  std::vector<TopkCase> cases;
  for (const char* spec : {"topk:0.01", "topk:0.2:bf16", "topk:0.2:int8"}) {
    cases.push_back({spec, x, "ascending"});
    cases.push_back({spec, y, "descending"});
  }
  return cases;
}

inline std::vector<TopkCase> topk_spikes() {
  std::vector<float> x(kLong, 0.0f);
  x[kLong - 3] = -7.0f;
  std::vector<TopkCase> cases = {{"topk:0.01", x, "one spike: the zeros of the lowest indices fill up"}};
  for (size_t i = 100; i < kLong; i += 1000) x[i] = static_cast<float>(i);
  cases.push_back({"topk:0.0005", x, "few non-zeros"});
  for (const char* spec : {"topk:0.01", "topk:0.01:int8"}) cases.push_back({spec, x, "fewer non-zeros than entries"});
  return cases;
}

inline std::vector<TopkCase> topk_last_bits() {
  std::vector<float> x(kLong), y(kLong);
  Random random(3);
  for (float& v : x) v = std::bit_cast<float>(0x3f800000u + random.below(4));
  for (size_t i = 0; i < kLong; ++i) y[i] = std::bit_cast<float>(0x3f800000u + static_cast<uint32_t>(i));
  return {{"topk:0.01", x, "four neighbours"}, {"topk:0.01", y, "ascending by one bit"}};
}

inline std::vector<TopkCase> topk_non_finite() {
  std::vector<float> x = generate(Gen::gaussian, kLong, 4);
  Random random(9);
  for (size_t i = 0; i < 400; ++i) x[random.below(kLong)] = std::bit_cast<float>(0x7f800000u | (random.below(2) << 31));
  for (size_t i = 0; i < 300; ++i) x[random.below(kLong)] = std::bit_cast<float>(0xffc00000u + random.below(9));
  return {{"topk:0.01", x, "some of each"},
          {"topk:0.0005", x, "more NaN than entries"},
          {"topk:0.0025", x, "more NaN and Inf than entries"},
          {"topk:0.004:int8", x, "some of each as codes"},
          {"topk:0.01", std::vector<float>(kLong, std::bit_cast<float>(0xffc00001u)), "nothing but NaN"},
          {"topk:0.01:bf16", std::vector<float>(kLong, -INFINITY), "nothing but Inf"}};
}

}  // namespace gradgate::test
