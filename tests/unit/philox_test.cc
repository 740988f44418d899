// The random numbers of docs/format.md §5: known answers, and which numbers belong to which element.
#include "codecs/philox.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <tuple>

namespace gradgate::test {
namespace {

using codecs::PhiloxBlock;

// Known answers of Random123 (kat_vectors, philox4x32 10), the library of the paper's authors.
TEST(Philox, KnownAnswers) {
  struct Answer {
    uint32_t counter[4], key[2], words[4];
  };
  constexpr Answer kAnswers[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
       {0xffffffff, 0xffffffff},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Answer& a : kAnswers) {
    const PhiloxBlock block =
        codecs::philox4x32_10(a.counter[0], a.counter[1], a.counter[2], a.counter[3], a.key[0], a.key[1]);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(block.word[i], a.words[i]) << i;
  }
}

TEST(Philox, SeedFillsCounterAndKey) {
  // The third known answer again, through a seed.
  const Seed seed{0x299f31d0a4093822u, 0x85a308d3u, 0x13198a2eu, 0x03707344u};
  EXPECT_EQ(codecs::random_block(seed, 0x243f6a88u).word[0], 0xd16cfe09u);
  // Past 2^32 blocks the index reaches into the key.
  const Seed other{seed.key ^ (uint64_t{5} << 32), seed.tensor, seed.step, seed.stream};
  EXPECT_EQ(codecs::random_block(other, (uint64_t{5} << 32) + 0x243f6a88u).word[0], 0xd16cfe09u);
}

// Every field of a seed changes the numbers.
TEST(Philox, StreamsDiffer) {
  std::set<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>> seen;
  size_t blocks = 0;
  for (uint64_t key : {0ull, 1ull, 1ull << 32})
    for (uint32_t tensor : {0u, 1u})
      for (uint32_t step : {0u, 1u})
        for (uint32_t stream : {0u, 1u, ~0u})
          for (uint64_t index : {0ull, 1ull, 1ull << 33}) {
            const PhiloxBlock b = codecs::random_block({key, tensor, step, stream}, index);
            seen.insert({b.word[0], b.word[1], b.word[2], b.word[3]});
            ++blocks;
          }
  EXPECT_EQ(seen.size(), blocks);
}

// The elements of a group use all 16-bit halves of its 32 blocks, each once.
TEST(Philox, ElementsOfAGroupShareNoBits) {
  for (const uint64_t first : {uint64_t{0}, uint64_t{256}, uint64_t{1} << 40}) {
    std::set<std::tuple<uint64_t, int>> used;
    for (uint64_t i = first; i < first + 256; ++i) {
      const uint64_t block = codecs::element_block(i);
      EXPECT_GE(block, first / 8);
      EXPECT_LT(block, first / 8 + 32);
      int place = -1;
      for (int half = 0; half < 8; ++half) {  // which half of which word it is
        PhiloxBlock probe{};
        probe.word[half / 2] = 0xabcdu << (half % 2 * 16);
        if (codecs::element_bits(probe, i) == 0xabcdu) place = half;
      }
      ASSERT_GE(place, 0);
      EXPECT_TRUE(used.insert({block, place}).second) << i;
    }
    EXPECT_EQ(used.size(), 256u);
  }
}

TEST(Philox, DitherIsExactAndCentred) {
  double sum = 0;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const double expected = (bits + 0.5) / 65536 - 0.5;
    ASSERT_EQ(static_cast<double>(codecs::dither(bits)), expected);
    sum += expected;
  }
  EXPECT_EQ(sum, 0.0);
}

}  // namespace
}  // namespace gradgate::test
