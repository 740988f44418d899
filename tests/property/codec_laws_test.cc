// What must hold for any input, without a reference: error bounds, the law of error feedback, adding, repetition.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "tests/support/codec_calls.h"
#include "tests/support/gen.h"

namespace gradgate::test {
namespace {

constexpr size_t kSizes[] = {1, 31, 256, 257, 1025, 5000};

class CodecLaws : public ::testing::TestWithParam<std::string> {
 protected:
  const std::string name = GetParam();
  const char* text = name.c_str();
  CodecSpec spec = spec_of(text);

  // Calls check(gen, n) over generators and sizes until one fails.
  template <class Check>
  void for_all(Check check) {
    for (const Gen gen : kAllGens) {
      for (const size_t n : kSizes) {
        SCOPED_TRACE(std::string(text) + " " + gen_name(gen) + " n=" + std::to_string(n));
        check(gen, n);
        if (HasFatalFailure()) return;
      }
    }
  }
};
class FeedbackLaws : public CodecLaws {};
class SelectionLaws : public CodecLaws {};

double value(float v) { return v; }

// Elements that share a scale, and what is known of them.
size_t block_of(const CodecSpec& spec) {
  return spec.id == CodecId::int4 ? 128 : spec.id == CodecId::onebit ? 1024 : 256;
}
struct BlockFacts {
  bool finite = true;
  double greatest = 0, sum = 0;  // of the magnitudes
};
bool has_scales(const CodecSpec& spec) {
  return spec.id == CodecId::int8 || spec.id == CodecId::fp8 || spec.id == CodecId::int4 || spec.id == CodecId::onebit;
}

// How far d may be from x, by docs/format.md §3; `vector` holds of the whole vector. Two roundings of an f32 on top.
double bound(const CodecSpec& spec, double x, const BlockFacts& block, const BlockFacts& vector, bool sent) {
  constexpr double kRoundings = 1 + 0x1p-18, kLeast = 0x1p-149;
  const double a = block.greatest, size = std::fabs(x);
  switch (spec.id) {
    case CodecId::none:
      return 0;
    case CodecId::bf16:
      return std::max(size * 0x1p-8, 0x1p-134);
    case CodecId::fp16:
      return std::max(size * 0x1.02p-11, vector.greatest * 0x1p-39) + kLeast;
    case CodecId::int8:
      return (spec.param1 == 0 ? a / 254 : a / 127) * kRoundings + kLeast;
    case CodecId::fp8:
      return (spec.param1 == 0 ? std::max(size * 0x1p-4, a / 448 * 0x1p-10)
                               : std::max(size * 0x1p-3, a / 57344 * 0x1p-17)) *
                 kRoundings +
             kLeast;
    case CodecId::int4: {
      // A rotated element is at most the sum of the magnitudes; an error is at most the mean of the rotated ones'.
      const double greatest = spec.param1 % 2 == 0 ? a : block.sum;
      return greatest / (spec.param1 < 2 ? 14 : 7) * kRoundings + kLeast;
    }
    case CodecId::onebit:
      return a * kRoundings + kLeast;
    case CodecId::topk:
    case CodecId::randk:
    case CodecId::chunk_topk:
      if (!sent) return size;
      if (spec.value == DType::u8) return vector.greatest / 254 * kRoundings + kLeast;
      return spec.value == DType::bf16 ? std::max(size * 0x1p-8, 0x1p-134) : 0;
  }
  return -1;
}

TEST_P(CodecLaws, ErrorIsBounded) {
  for_all([&](Gen gen, size_t n) {
    const std::vector<float> x = generate(gen, n, 1);
    const std::vector<float> d = round_trip(text, x);
    const auto facts = [&](size_t begin, size_t end) {
      BlockFacts block;
      for (size_t i = begin; i < end; ++i) {
        block.finite = block.finite && std::isfinite(x[i]);
        if (!std::isfinite(x[i])) continue;
        block.greatest = std::max(block.greatest, std::fabs(value(x[i])));
        block.sum += std::fabs(value(x[i]));
      }
      return block;
    };
    const BlockFacts vector = facts(0, n);
    // A value that is not finite may spoil the whole stratum of a sample.
    const size_t length = spec.id == CodecId::randk ? n : block_of(spec);
    for (size_t begin = 0; begin < n; begin += length) {
      const size_t end = std::min(n, begin + length);
      const BlockFacts block = facts(begin, end);
      for (size_t i = begin; i < end; ++i) {
        const bool dropped = is_sparse(spec) && d[i] == 0.0f;
        if (!block.finite) {
          // Never hidden: what has scales marks the block, others the element (which chunk-topk drops only for other
          // non-finite ones).
          if (has_scales(spec)) {
            const bool zero_part = spec.id == CodecId::onebit && d[i] == 0.0f && x[i] == 0.0f;
            ASSERT_TRUE(std::isnan(d[i]) || zero_part);
          } else if (!std::isfinite(x[i]) && !dropped) {
            ASSERT_EQ(std::isnan(d[i]), std::isnan(x[i]) || spec.value == DType::u8);
            ASSERT_FALSE(std::isfinite(d[i]));
          }
          continue;
        }
        ASSERT_TRUE(std::isfinite(d[i])) << n << " " << i;
        ASSERT_LE(std::fabs(value(d[i]) - x[i]), bound(spec, x[i], block, vector, !dropped))
            << n << " " << i << " x " << x[i] << " d " << d[i];
      }
    }
  });
}

TEST_P(FeedbackLaws, ResidualIsWhatWasNotSent) {
  for_all([&](Gen gen, size_t n) {
    const std::vector<float> g = generate(gen, n, 1), before = generate(gen == Gen::zeros ? Gen::gaussian : gen, n, 2);
    std::vector<float> e = before;
    const std::vector<float> d = decode(text, encode(text, g, &e), n);
    for (size_t begin = 0; begin < n; begin += 256) {
      const size_t end = std::min(n, begin + 256);
      bool zero = true;
      for (size_t i = begin; i < end; ++i) zero = zero && g[i] == 0.0f;
      for (size_t i = begin; i < end; ++i) {
        const float x = zero ? 0.0f : std::isfinite(g[i]) ? g[i] + before[i] : g[i];
        if (zero || !std::isfinite(x) || !std::isfinite(d[i])) {
          ASSERT_EQ(std::bit_cast<uint32_t>(e[i]), std::bit_cast<uint32_t>(before[i])) << n << " " << i;
        } else {
          ASSERT_EQ(std::bit_cast<uint32_t>(e[i]), std::bit_cast<uint32_t>(x - d[i])) << n << " " << i;
        }
      }
    }
  });
}

TEST_P(CodecLaws, AddIsAdditionOfWhatIsDecoded) {
  for_all([&](Gen gen, size_t n) {
    const Payload payload = encode(text, generate(gen, n, 1));
    const std::vector<float> d = decode(text, payload, n, 0.5f), base = generate(Gen::gaussian, n, 3);
    std::vector<float> out = base;
    DecodeArgs args;
    args.payload = payload.view();
    args.out = {out.data(), n, DType::f32};
    args.scale = 0.5f;
    args.into = Into::add;
    ASSERT_TRUE(decode(spec, args).ok());
    for (size_t i = 0; i < n; ++i) {
      const float expected = base[i] + d[i];
      ASSERT_TRUE(out[i] == expected || (std::isnan(out[i]) && std::isnan(expected))) << n << " " << i;
    }
  });
}

TEST_P(CodecLaws, EncodingAgainGivesTheSameBytes) {
  for_all([&](Gen gen, size_t n) {
    const std::vector<float> x = generate(gen, n, 1);
    EXPECT_TRUE(encode(text, x) == encode(text, x));
  });
}

TEST_P(SelectionLaws, ChosenComeBeforeTheOthers) {
  for_all([&](Gen gen, size_t n) {
    const size_t chunk = spec.param1;
    const std::vector<float> x = generate(gen, n, 1);
    const size_t entries = n / chunk * spec.param0 + std::min<size_t>(n % chunk, spec.param0);
    const std::vector<uint16_t> index = topk_indices(encode(text, x), entries, spec.value);
    // (key, place) as one number that falls in the order of choice.
    const auto order = [&](size_t i) {
      const uint32_t mag = std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
      return static_cast<uint64_t>(std::isnan(x[i]) ? 0x7f800001u : mag) << 32 | (0xffffffffu - i);
    };
    size_t entry = 0;
    for (size_t begin = 0; begin < n; begin += chunk) {
      const size_t length = std::min(chunk, n - begin), k = std::min<size_t>(spec.param0, length);
      std::vector<bool> chosen(length);
      uint64_t least_chosen = UINT64_MAX, greatest_left = 0;
      for (size_t j = 0; j < k; ++j, ++entry) {
        ASSERT_LT(index[entry], length);
        ASSERT_FALSE(chosen[index[entry]]);
        chosen[index[entry]] = true;
      }
      for (size_t i = 0; i < length; ++i) {
        if (chosen[i]) {
          least_chosen = std::min(least_chosen, order(begin + i));
        } else {
          greatest_left = std::max(greatest_left, order(begin + i));
        }
      }
      ASSERT_GT(least_chosen, greatest_left) << "chunk at " << begin;
    }
  });
}

std::vector<std::string> specs_that(bool (*fits)(const CodecSpec&)) {
  std::vector<std::string> some;
  for (const char* text : kSpecs) {
    if (fits(spec_of(text))) some.push_back(text);
  }
  return some;
}
std::string name_of(const ::testing::TestParamInfo<std::string>& p) { return test_name(p.param); }

INSTANTIATE_TEST_SUITE_P(Codecs, CodecLaws, ::testing::ValuesIn(specs_that([](const CodecSpec&) { return true; })),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Codecs, FeedbackLaws, ::testing::ValuesIn(specs_that(takes_feedback)), name_of);
INSTANTIATE_TEST_SUITE_P(Codecs, SelectionLaws, ::testing::ValuesIn(specs_that([](const CodecSpec& s) {
                           return s.id == CodecId::chunk_topk;
                         })),
                         name_of);

// Nothing is lost over many steps, whatever is sent when: exactly, on small integers, for a codec that sends values as
// they are.
TEST(Conservation, ExactOnIntegers) {
  for (const char* text : {"chunk-topk:8/1024", "chunk-topk:1/32", "chunk-topk:63/64", "topk:0.01", "topk:0.3",
                           "randk:0.01", "randk:0.3"}) {
    const size_t n = 3000;
    std::vector<float> e(n, 0.0f);
    std::vector<double> sent(n, 0.0), given(n, 0.0);
    for (uint64_t step = 0; step < 60; ++step) {
      std::vector<float> g = generate(step % 5 == 4 ? Gen::zeros : Gen::integers, n, step);
      if (step % 3 == 0) std::fill(g.begin() + 512, g.begin() + 1024, 0.0f);
      const Payload payload = encode(text, g, &e, nullptr, step % 7 == 6);
      const std::vector<float> d = decode(text, payload, n);
      for (size_t i = 0; i < n; ++i) sent[i] += d[i], given[i] += g[i];
    }
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(sent[i] + e[i], given[i]) << text << " " << i;
  }
}

// And within the roundings of the steps for the others.
TEST(Conservation, WithinRoundingElsewhere) {
  for (const char* text :
       {"bf16", "fp16", "int8", "int8:sr", "fp8", "fp8:e5m2", "int4", "int4:hadamard:sr", "onebit",
        "chunk-topk:8/1024:bf16", "topk:0.02:bf16", "chunk-topk:8/1024:int8", "topk:0.02:int8", "randk:0.02:bf16"}) {
    const size_t n = 3000;
    std::vector<float> e(n, 0.0f);
    std::vector<double> sent(n, 0.0), given(n, 0.0), most(n, 0.0);
    for (uint64_t step = 0; step < 60; ++step) {
      const std::vector<float> g = generate(Gen::gaussian, n, step);
      const std::vector<float> d = decode(text, encode(text, g, &e), n);
      for (size_t i = 0; i < n; ++i) {
        sent[i] += d[i], given[i] += g[i];
        most[i] = std::max({most[i], std::fabs(value(e[i])) + std::fabs(value(d[i])) + std::fabs(value(g[i]))});
      }
    }
    for (size_t i = 0; i < n; ++i)
      ASSERT_LE(std::fabs(sent[i] + e[i] - given[i]), 60 * 2 * 0x1p-24 * most[i]) << text << " " << i;
  }
}

}  // namespace
}  // namespace gradgate::test
