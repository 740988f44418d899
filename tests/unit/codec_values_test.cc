// What codecs make of particular values: the cases that broke other libraries, with their right answers.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "codecs/reference.h"
#include "tests/support/codec_calls.h"
#include "tests/support/gen.h"

namespace gradgate::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

using Values = std::vector<float>;

Values concat(Values a, const Values& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
// x, filled up with zeros to a whole block, and then another block.
Values two_blocks(Values first, const Values& second) {
  first.resize(256);
  return concat(first, second);
}

TEST(AllZeroBlock, DecodesToZero_NUM1) {
  const Values g = two_blocks({}, Values(256, 1.0f));
  for (const char* text :
       {"none", "bf16", "fp16", "int8", "int8:sr", "fp8", "int4", "onebit", "chunk-topk:4/256", "topk:0.0078125"}) {
    Values e(512);
    const Payload payload = spec_of(text).id == CodecId::none ? encode(text, g) : encode(text, g, &e);
    const Values d = decode(text, payload, 512);
    for (size_t i = 0; i < 256; ++i) {
      EXPECT_EQ(d[i], 0.0f);
      EXPECT_EQ(e[i], 0.0f);
    }
    for (size_t i = 256; i < 512; ++i) {
      const bool sent = !is_sparse(spec_of(text)) || i < 260;
      EXPECT_EQ(d[i], sent ? 1.0f : 0.0f) << text << " " << i;
    }
  }
  for (const char* text : kSpecs) {
    for (const float v : round_trip(text, Values(512, 0.0f))) EXPECT_EQ(std::bit_cast<uint32_t>(v), 0u) << text;
  }
}

TEST(NonFiniteInABlock, StaysVisibleAndInItsBlock_NUM3) {
  for (const float odd : {kInf, -kInf, kNan}) {
    const Values g = two_blocks({odd, 1, 2, 3}, {1, 2, 3, 4});
    EncodeStats stats;
    const Payload int8 = encode("int8", g, nullptr, &stats);
    EXPECT_EQ(stats.non_finite, 1u);
    EXPECT_EQ(int8.get<uint8_t>(7), 2u);
    Values d = decode("int8", int8, g.size());
    for (size_t i = 0; i < 256; ++i)
      EXPECT_EQ(std::bit_cast<uint32_t>(d[i]), 0x7fc00000u);  // the whole block, documented
    for (size_t i = 256; i < 260; ++i) EXPECT_NEAR(d[i], g[i], 4.0 / 254);
    for (const char* text : {"none", "bf16", "chunk-topk:4/256"}) {
      d = round_trip(text, g);
      EXPECT_FALSE(std::isfinite(d[0])) << text;
      EXPECT_EQ(std::isnan(d[0]), std::isnan(odd)) << text;
      EXPECT_EQ(d[259], 4.0f) << text;
    }
  }
}

TEST(NonFiniteInABlock, KeepsResidualsAsTheyWere_NUM3) {
  Values g(256, 1.0f), e(256, 0.125f);
  g[5] = kNan;
  encode("int8", g, &e);  // the block decodes to NaN
  EXPECT_EQ(e, Values(256, 0.125f));
  encode("bf16", g, &e);  // only one element does
  EXPECT_EQ(e[5], 0.125f);
  EXPECT_EQ(e[4], 0.0f);  // 1.125 is a bf16
  Values e2(256, 0.125f);
  encode("chunk-topk:2/256", g, &e2);
  EXPECT_EQ(e2[5], 0.125f);
  EXPECT_EQ(e2[0], 0.0f);    // sent: the first of the equal ones
  EXPECT_EQ(e2[1], 1.125f);  // carried
}

TEST(NonFiniteGradient, TakesNoPartInTheSum_NUM3) {
  for (const char* text : {"bf16", "chunk-topk:32/32"}) {
    Values g(300, 1.0f), e(300, 0.5f);
    g[3] = kInf, e[3] = -kInf;  // a residual that a caller spoiled
    g[270] = -kInf, e[270] = kInf;
    const Values d = decode(text, encode(text, g, &e), 300);
    EXPECT_EQ(d[3], kInf) << text;
    EXPECT_EQ(d[270], -kInf) << text;
    EXPECT_EQ(e[3], -kInf) << text;
    EXPECT_EQ(d[4], 1.5f) << text;
  }
}

TEST(Overflow, NothingFiniteBecomesNonFinite_NUM4) {
  constexpr float kMax = std::numeric_limits<float>::max();
  const Values g = {3e38f, -3e38f, 2e19f, 0.0f, kMax, -kMax};
  for (const char* text : {"bf16", "fp16", "int8", "fp8", "fp8:e5m2", "chunk-topk:32/32", "chunk-topk:32/32:bf16"}) {
    const Values d = round_trip(text, g);
    for (size_t i = 0; i < g.size(); ++i) {
      ASSERT_TRUE(std::isfinite(d[i])) << text << " " << i;
      const double size = std::fabs(static_cast<double>(g[i]));
      // fp8 and fp16 have a smallest step too, here beside the greatest floats.
      const double step = spec_of(text).id == CodecId::int8 ? kMax / 254.0 * 1.0001
                          : spec_of(text).id == CodecId::fp8
                              ? std::max(size / 7.99, kMax * 0x1p-18)
                              : std::max(size / 128, spec_of(text).id == CodecId::fp16 ? kMax * 0x1p-39 : 0.0);
      EXPECT_LE(std::fabs(static_cast<double>(d[i]) - g[i]), step) << text << " " << i;
    }
  }
  EXPECT_EQ(std::bit_cast<uint32_t>(round_trip("bf16", {kMax})[0]), 0x7f7f0000u);
}

TEST(Overflow, SumOfGradientAndResidualIsNotHidden_NUM4) {
  constexpr float kMax = std::numeric_limits<float>::max();
  Values g = {kMax, 1.0f}, e = {kMax, 0.5f};
  EncodeStats stats;
  const Payload payload = encode("chunk-topk:2/32", g, &e, &stats);
  EXPECT_EQ(stats.non_finite, 1u);
  EXPECT_EQ(decode("chunk-topk:2/32", payload, 2), (Values{kInf, 1.5f}));
  EXPECT_EQ(e, (Values{kMax, 0.0f}));
}

TEST(Scaling, ByPowersOfTwoChangesNothingElse_NUM5) {
  const Values x = {1, -0.5f, 0.25f, 0.75f};
  for (const char* text : {"int8", "chunk-topk:2/32", "bf16"}) {
    const Values base = round_trip(text, x);
    for (const int exponent : {-120, -101, -100, -99, -60, -20, 20, 60, 120}) {
      Values scaled = x;
      for (float& v : scaled) v = std::ldexp(v, exponent);
      const Values d = round_trip(text, scaled);
      for (size_t i = 0; i < 4; ++i)
        EXPECT_EQ(d[i], std::ldexp(base[i], exponent)) << text << " 2^" << exponent << " " << i;
    }
  }
  for (const int exponent : {-60, -20, 20, 60}) {
    Values scaled = x;
    for (float& v : scaled) v = std::ldexp(v, exponent);
    EXPECT_EQ(topk_indices(encode("chunk-topk:2/32", scaled), 2), (std::vector<uint16_t>{0, 3}));
  }
}

// The plain cast turns 65520 and more into Inf, and 1e-8 into 0.
TEST(Fp16, IsScaledIntoItsRange_NUM6) {
  const Values x = {65519, 65520, 100000, 1e-8f};
  const Values d = round_trip("fp16", x);
  for (size_t i = 0; i < 3; ++i) EXPECT_LE(std::fabs(static_cast<double>(d[i]) - x[i]), x[i] * 0x1.01p-11) << i;
  EXPECT_LE(std::fabs(d[3] - x[3]), 0x1p-23f);
  // Small gradients alone keep their bits; beside a large one, feedback sends them later.
  Values e(2, 0.0f);
  double sent = 0;
  for (int step = 0; step < 10; ++step) sent += decode("fp16:ef", encode("fp16:ef", Values{2e-8f, 2e-8f}, &e), 2)[0];
  EXPECT_NEAR(sent + e[0], 2e-7, 1e-14);
  Values beside(2, 0.0f);
  double late = 0;
  for (int step = 0; step < 1000; ++step)
    late += decode("fp16:ef", encode("fp16:ef", Values{2e-8f, 1024.0f}, &beside), 2)[0];
  EXPECT_GT(late, 0);
  EXPECT_NEAR(late + beside[0], 2e-5, 1e-11);
}

TEST(Subnormals, AreOrdinaryNumbers_NUM7) {
  const Values x = {1e-40f, 2e-40f, 3e-40f, 0.0f};
  const Payload payload = encode("chunk-topk:2/32", x);
  EXPECT_EQ(topk_indices(payload, 2), (std::vector<uint16_t>{1, 2}));
  EXPECT_EQ(decode("chunk-topk:2/32", payload, 4), (Values{0, 2e-40f, 3e-40f, 0}));
  const Values d = round_trip("int8", x);
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(d[i], x[i], 3e-40 / 254 + 2e-45);
}

TEST(OneElement, IsSent_SHP2) {
  for (const char* text : kSpecs) {
    EXPECT_EQ(round_trip(text, {2.5f})[0], 2.5f) << text;
    EXPECT_EQ(round_trip(text, {2.5f, 2.5f, 2.5f}).size(), 3u);
  }
  for (const char* text : {"none", "bf16", "int8"})
    EXPECT_EQ(round_trip(text, {2.5f, 2.5f, 2.5f}), (Values{2.5f, 2.5f, 2.5f})) << text;
}

TEST(Tail, HasItsOwnScaleAndIsNotReadPastItsEnd_SHP3) {
  for (const size_t n : {1u, 7u, 8u, 9u, 31u, 32u, 33u, 255u, 256u, 257u, 1023u, 1025u, 4097u}) {
    for (const char* text : kSpecs) {
      const CodecSpec spec = spec_of(text);
      Values first;
      for (const uint8_t fill : {uint8_t{0xff}, uint8_t{0x00}, uint8_t{0x7f}}) {
        // The memory around x holds NaN, zeros, large numbers; the payload is the same.
        std::vector<float> room(n + 512);
        std::memset(room.data(), fill, room.size() * 4);
        for (size_t i = 0; i < n; ++i) room[256 + i] = i < 256 ? 1000.0f : 1e-3f;
        const Payload payload = encode(text, {room.data() + 256, n, DType::f32});
        const Values d = decode(text, payload, n);
        ASSERT_EQ(d.size(), n);
        if (first.empty()) first = d;
        EXPECT_EQ(d, first) << text << " n " << n;
        if (n == 257 && spec.id == CodecId::int8) {
          EXPECT_NEAR(d[256], 1e-3f, 1.2e-10);
        }
      }
    }
  }
}

TEST(Indices, ReachEveryElement_SHP5) {
  Gradient a = Gradient::of(Values(70000, 0.0f), DType::bf16);
  a.bf16[33000] = a.bf16[69999] = 0x40a0;  // 5.0
  const Payload pa = encode("chunk-topk:1/1024", a.view());
  const Values da = decode("chunk-topk:1/1024", pa, 70000, 1.0f, DType::bf16);
  for (size_t i = 0; i < 70000; ++i) ASSERT_EQ(da[i], i == 33000 || i == 69999 ? 5.0f : 0.0f) << i;
  Values b(16777218, 0.0f);
  b[16777217] = 5.0f;
  const Values db = decode("chunk-topk:1/32768", encode("chunk-topk:1/32768", b), b.size());
  EXPECT_EQ(db, b);
  // Chosen from the whole vector: k = 2 of f16 and k = 1 of f32, past what 16 bits and a float count exactly.
  Gradient half = Gradient::of(Values(70000, 0.0f), DType::f16);
  half.f16[33000] = half.f16[69999] = 0x4500;  // 5.0
  const Values dh = decode("topk:0.00003", encode("topk:0.00003", half.view()), 70000, 1.0f, DType::f16);
  for (size_t i = 0; i < 70000; ++i) ASSERT_EQ(dh[i], i == 33000 || i == 69999 ? 5.0f : 0.0f) << i;
  EXPECT_EQ(decode("topk:1e-9", encode("topk:1e-9", b), b.size()), b);
}

TEST(TopK, TiesGoToTheLowestIndex_TOP1) {
  const Payload ten = encode("chunk-topk:3/32", Values(10, 1.0f));
  EXPECT_EQ(topk_indices(ten, 3), (std::vector<uint16_t>{0, 1, 2}));
  const Values same(1000000, -2.0f);
  const Payload first = encode("chunk-topk:8/1024", same);
  const size_t entries = 1000000 / 1024 * 8 + 8;
  const std::vector<uint16_t> indices = topk_indices(first, entries);
  for (size_t i = 0; i < entries; ++i) ASSERT_EQ(indices[i], i % 8);
  for (int run = 0; run < 20; ++run) ASSERT_TRUE(encode("chunk-topk:8/1024", same) == first);
  const Payload whole = encode("topk:0.001", same);  // the first 1000 of a million equal ones
  const Values d = decode("topk:0.001", whole, same.size());
  for (size_t i = 0; i < same.size(); ++i) ASSERT_EQ(d[i], i < 1000 ? -2.0f : 0.0f) << i;
  for (int run = 0; run < 20; ++run) ASSERT_TRUE(encode("topk:0.001", same) == whole);
}

TEST(TopK, AsManyAsThereAre_TOP3) {
  const Values x = {3, -1, 0.5f, -0.0f};
  EXPECT_EQ(round_trip("chunk-topk:4/32", x), x);
  EXPECT_EQ(round_trip("chunk-topk:5/32", x), x);  // more than the vector has: all of it
  EXPECT_EQ(topk_indices(encode("chunk-topk:5/32", x), 4), (std::vector<uint16_t>{0, 1, 2, 3}));
  CodecSpec spec;
  EXPECT_FALSE(parse_codec("chunk-topk:0/32", &spec, nullptr).ok());
  EXPECT_FALSE(parse_codec("chunk-topk:-1/32", &spec, nullptr).ok());
}

TEST(TopK, ValuesThatDifferOnlyInLowBits_TOP5) {
  for (const char* text : {"chunk-topk:2/1024", "chunk-topk:16/1024", "chunk-topk:64/1024", "chunk-topk:100/32768",
                           "chunk-topk:300/1024"}) {
    const CodecSpec spec = spec_of(text);
    Values x(1 << 17);
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = std::bit_cast<float>(0x3F900000u | static_cast<uint32_t>(i * 7919 % 1024));
    x[77] = 1e-3f;
    const ConstVec g{x.data(), x.size(), DType::f32};
    const std::vector<std::byte> expected = reference::encode(spec, g, nullptr, false, {}, nullptr);
    const Payload got = encode(text, x);
    EXPECT_EQ(std::memcmp(expected.data(), got.data(), expected.size()), 0) << text;
  }
}

TEST(TopK, InfinityAndZeros_TOP6) {
  Values x(100, 1.0f);
  x[0] = x[1] = x[2] = kInf;
  EXPECT_EQ(topk_indices(encode("chunk-topk:5/128", x), 5), (std::vector<uint16_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(topk_indices(encode("chunk-topk:2/128", x), 2), (std::vector<uint16_t>{0, 1}));
  Values zeros(100, 0.0f);
  zeros[50] = zeros[60] = zeros[99] = 1e-30f;
  const std::vector<uint16_t> indices = topk_indices(encode("chunk-topk:50/128", zeros), 50);
  for (uint16_t i = 0; i < 47; ++i) EXPECT_EQ(indices[i], i);
  EXPECT_EQ(indices[47], 50);
  EXPECT_EQ(indices[48], 60);
  EXPECT_EQ(indices[49], 99);
}

TEST(TopK, AllNanAreEqualAndFirst) {
  Values x(1024, 1.0f);
  x[10] = kInf;
  x[20] = std::bit_cast<float>(0x7f800001u);
  x[30] = std::bit_cast<float>(0xffffffffu);
  const Payload payload = encode("chunk-topk:2/1024", x);
  EXPECT_EQ(topk_indices(payload, 2), (std::vector<uint16_t>{20, 30}));
  EXPECT_EQ(payload.get<uint32_t>(32), 0x7fc00000u);
  EXPECT_EQ(payload.get<uint32_t>(36), 0x7fc00000u);
  EXPECT_EQ(topk_indices(encode("chunk-topk:3/1024", x), 3), (std::vector<uint16_t>{10, 20, 30}));
}

TEST(TopK, NegativeZeroEqualsZero_TOP7) {
  EXPECT_EQ(topk_indices(encode("chunk-topk:2/32", {-0.0f, 1e-30f, -0.0f, 2e-30f}), 2), (std::vector<uint16_t>{1, 3}));
  EXPECT_EQ(topk_indices(encode("chunk-topk:2/32", {0.0f, -0.0f, 0.0f, -0.0f}), 2), (std::vector<uint16_t>{0, 1}));
}

// Two entries a chunk, 256 a scale: bytes of scales, padding, codes, indices, as the format has them.
TEST(TopK, Int8ValuesShareAScaleByRunsOfEntries) {
  Values x(300 * 32, 0.0f);
  for (size_t c = 0; c < 300; ++c) x[32 * c + 3] = c < 128 ? 127.0f : -254.0f, x[32 * c + 7] = c < 128 ? 1.4f : 4.0f;
  const Payload payload = encode("chunk-topk:2/32:int8", x);
  constexpr size_t kEntries = 600, kCodes = 32 + 16, kIndices = kCodes + 608;
  ASSERT_EQ(payload.size(), kIndices + 1200);
  EXPECT_EQ(payload.get<float>(32), 1.0f);
  EXPECT_EQ(payload.get<float>(36), 2.0f);
  EXPECT_EQ(payload.get<float>(40), 2.0f) << "the third run has 88 entries";
  EXPECT_EQ(payload.get<uint32_t>(44), 0u) << "padding";
  EXPECT_EQ(payload.get<int8_t>(kCodes), 127);
  EXPECT_EQ(payload.get<int8_t>(kCodes + 1), 1);
  EXPECT_EQ(payload.get<int8_t>(kCodes + 256), -127);
  EXPECT_EQ(payload.get<int8_t>(kCodes + kEntries - 1), 2);
  EXPECT_EQ(payload.get<uint16_t>(kIndices), 3);
  EXPECT_EQ(payload.get<uint16_t>(kIndices + 2), 7);
  const Values d = decode("chunk-topk:2/32:int8", payload, x.size());
  EXPECT_EQ(d[3], 127.0f);
  EXPECT_EQ(d[7], 1.0f);
  EXPECT_EQ(d[32 * 299 + 7], 4.0f);
}

// What is not finite costs its neighbours nothing, and keeps its residual.
TEST(TopK, Int8ValuesMarkWhatIsNotFinite) {
  for (const char* text : {"chunk-topk:4/32:int8", "topk:0.125:int8"}) {
    Values x(32, 0.0f), e(32, 0.5f);
    x[1] = kInf, x[2] = -kInf, x[3] = NAN, x[4] = 126.5f, x[5] = 1.0f;
    const Payload payload = encode(text, x, &e);
    const Values d = decode(text, payload, 32);
    EXPECT_TRUE(std::isnan(d[1]) && std::isnan(d[2]) && std::isnan(d[3])) << text;
    EXPECT_EQ(d[4], 127.0f) << text;
    for (const size_t i : {1, 2, 3}) EXPECT_EQ(e[i], 0.5f) << text;
    EXPECT_EQ(e[4], 0.0f) << text;
    EXPECT_EQ(e[5], 1.5f) << text;
    const Values only(32, NAN);
    for (const float v : decode(text, encode(text, only), 32)) EXPECT_TRUE(v == 0.0f || std::isnan(v)) << text;
  }
}

TEST(TopK, SameIndexOnTwoRanksIsAdded_TOP8) {
  const Payload a = encode("chunk-topk:2/32", {1, 1, 0, 0}), b = encode("chunk-topk:2/32", {1, 0, 1, 0});
  Values out(4, 0.0f);
  for (const Payload* payload : {&a, &b}) {
    DecodeArgs args;
    args.payload = payload->view();
    args.out = {out.data(), 4, DType::f32};
    args.scale = 0.5f;
    args.into = Into::add;
    ASSERT_TRUE(decode(spec_of("chunk-topk:2/32"), args).ok());
  }
  EXPECT_EQ(out, (Values{1.0f, 0.5f, 0.5f, 0.0f}));
}

TEST(TopK, AddingLeavesOthersAlone) {
  const Payload payload = encode("chunk-topk:1/32", {0, 3, 0});
  Values out = {-0.0f, 1.0f, -0.0f};
  DecodeArgs args;
  args.payload = payload.view();
  args.out = {out.data(), 3, DType::f32};
  args.into = Into::add;
  ASSERT_TRUE(decode(spec_of("chunk-topk:1/32"), args).ok());
  EXPECT_TRUE(std::signbit(out[0]) && std::signbit(out[2]));
  EXPECT_EQ(out[1], 4.0f);
}

TEST(Int8, RoundsHalfToEvenEverywhere_QNT2) {
  const Values block = {127, 0.5f, 1.5f, 2.5f, 3.5f, -0.5f, -1.5f, -2.5f};
  const int8_t codes[] = {127, 0, 2, 2, 4, 0, -2, -2};
  Values x;
  for (int copy = 0; copy < 10; ++copy) x = concat(x, block);
  for (size_t n = 8; n <= x.size(); n += 8) {
    const Payload payload = encode("int8", Values(x.begin(), x.begin() + static_cast<long>(n)));
    EXPECT_EQ(payload.get<float>(32), 1.0f);
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(payload.get<int8_t>(48 + i), codes[i % 8]) << n << " " << i;
  }
  Values whole;
  for (int copy = 0; copy < 64; ++copy) whole = concat(whole, block);
  const Payload payload = encode("int8", whole);
  for (size_t i = 0; i < 512; ++i) ASSERT_EQ(payload.get<int8_t>(48 + i), codes[i % 8]) << i;
}

TEST(Int8, NeverEmitsMinus128_QNT2) {
  Random random(3);
  for (int round = 0; round < 2000; ++round) {
    Values x(256);
    const float top = std::bit_cast<float>(1 + random.below(0x7f7fffffu));
    for (float& v : x)
      v = random.below(2) == 0 ? -top
                               : std::bit_cast<float>(0x80000000u | random.below(std::bit_cast<uint32_t>(top) + 1));
    const Payload payload = encode("int8", x);
    for (size_t i = 0; i < 256; ++i) {
      const int8_t code = payload.get<int8_t>(48 + i);
      ASSERT_GE(code, -127);
      if (x[i] == -top) {
        ASSERT_EQ(code, -127) << top;
      }
    }
  }
}

TEST(Int8, DecodersTakeMinus128) {
  Payload payload = encode("int8", Values(4, 127.0f));
  payload.put<int8_t>(48, -128);
  EXPECT_EQ(decode("int8", payload, 4)[0], -128.0f);
  payload.put<float>(32, std::numeric_limits<float>::max());
  EXPECT_EQ(decode("int8", payload, 4)[0], -kInf);
  EXPECT_EQ(std::bit_cast<uint32_t>(decode("int8", payload, 4, 0.0f)[0]), 0x7fc00000u);  // Inf * 0
}

TEST(Int8, SmallBlocksKeepTheirStep_QNT4) {
  for (const float a : {1e-6f, 3.7e-6f, 4e-6f, 1e-5f, 1e-30f, 1e-38f, 1e-42f}) {
    const Values x = {a, -a / 2, a / 4, 0};
    const Values d = round_trip("int8", x);
    for (size_t i = 0; i < 4; ++i)
      EXPECT_LE(std::fabs(static_cast<double>(d[i]) - x[i]), a / 254.0 * 1.00001 + 0x1p-149) << a << " " << i;
    EXPECT_NEAR(d[0] / a, 1.0, a < 1e-40f ? 1e-2 : 1e-6) << a;
  }
}

TEST(Int8, ErrorIsHalfAStepOfItsOwnBlock_QNT9) {
  const Values x = generate(Gen::heavy_tail, 100000, 4);
  const Values d = round_trip("int8", x);
  for (size_t begin = 0; begin < x.size(); begin += 256) {
    const size_t end = std::min(x.size(), begin + 256);
    float a = 0;
    for (size_t i = begin; i < end; ++i) a = std::max(a, std::fabs(x[i]));
    for (size_t i = begin; i < end; ++i)
      ASSERT_LE(std::fabs(static_cast<double>(d[i]) - x[i]), a / 254.0 * 1.00001) << i;
  }
}

// The reference sequence of error feedback: what one entry a step sends of a constant gradient.
TEST(ErrorFeedback, ReferenceSequence_EF1) {
  const Values g = {4, 3, 2, 1};
  Values e(4, 0.0f), sent(4, 0.0f);
  const Values out[] = {{4, 0, 0, 0}, {0, 6, 0, 0}, {8, 0, 0, 0}, {0, 0, 8, 0}, {0, 9, 0, 0}, {12, 0, 0, 0}};
  const Values left[] = {{0, 3, 2, 1}, {4, 0, 4, 2}, {0, 3, 6, 3}, {4, 6, 0, 4}, {8, 0, 2, 5}, {0, 3, 4, 6}};
  for (int step = 0; step < 6; ++step) {
    const Values d = decode("chunk-topk:1/32", encode("chunk-topk:1/32", g, &e), 4);
    EXPECT_EQ(d, out[step]) << step;
    EXPECT_EQ(e, left[step]) << step;
    for (size_t i = 0; i < 4; ++i) {
      sent[i] += d[i];
      EXPECT_EQ(sent[i] + e[i], static_cast<float>(step + 1) * g[i]);
    }
  }
  EXPECT_EQ(round_trip("chunk-topk:1/32", g), (Values{4, 0, 0, 0}));
}

TEST(ErrorFeedback, ZeroGroupsNeitherSendNorLose) {
  for (const char* text : {"bf16", "int8", "chunk-topk:8/1024", "chunk-topk:8/1024:bf16"}) {
    Values g(1024, 0.0f), e(1024, 0.3f);
    for (size_t i = 256; i < 512; ++i) g[i] = -0.0f;
    for (size_t i = 512; i < 1024; ++i) g[i] = 1.0f;
    g[600] = 0.0f;  // a zero in a living group takes part
    Values flushed = e;
    const Values d = decode(text, encode(text, g, &e), 1024);
    for (size_t i = 0; i < 512; ++i) {
      ASSERT_EQ(d[i], 0.0f) << text;
      ASSERT_EQ(e[i], 0.3f) << text;
    }
    EXPECT_NEAR(static_cast<double>(d[600]) + e[600], 0.3, 1e-6) << text;
    const Values all = decode(text, encode(text, g, &flushed, nullptr, true), 1024);
    for (size_t i = 0; i < 512; ++i) ASSERT_NEAR(static_cast<double>(all[i]) + flushed[i], 0.3, 1e-6) << text;
    if (spec_of(text).id != CodecId::chunk_topk) {
      EXPECT_NE(all[0], 0.0f) << text;  // chunk-topk has greater elements to send first
    }
  }
}

TEST(FoldResidual, SendsEverythingAndKeepsWhatTheCastLoses) {
  Gradient g = Gradient::of(Values{1.0f, 0.0f, kInf, 100.0f}, DType::bf16);
  Values e = {0.001f, 0.25f, 1.0f, 0.2f};
  ASSERT_TRUE(fold_residual(g.vec(), e.data(), {}).ok());
  EXPECT_EQ(g.bf16, (std::vector<uint16_t>{0x3f80, 0x3e80, 0x7f80, 0x42c8}));
  EXPECT_EQ(e[0], 1.0f + 0.001f - 1.0f);
  EXPECT_EQ(e[1], 0.0f);
  EXPECT_EQ(e[2], 1.0f);  // not finite: kept
  EXPECT_EQ(e[3], 100.0f + 0.2f - 100.0f);
}

// DTY-3: sums are formed in f32, in rank order; bf16 would stop at 256.
TEST(ReduceEncode, SumsInF32_DTY3) {
  const CodecSpec spec = spec_of("none");
  std::vector<Payload> storage;
  std::vector<ConstBytes> payloads;
  for (int rank = 0; rank < 8; ++rank) {
    const Gradient g = Gradient::of(Values{rank == 0 ? 256.0f : 1.0f}, DType::bf16);
    storage.push_back(encode("none", g.view()));
  }
  for (const Payload& p : storage) payloads.push_back(p.view());
  const Gradient own = Gradient::of(Values{1.0f}, DType::bf16);
  Payload sum(payload_bytes(spec, DType::bf16, 1));
  std::vector<std::byte> workspace(workspace_bytes(spec, DType::bf16, 1));
  ReduceArgs args;
  args.payloads = payloads;
  args.self = 7;
  args.gradient = own.view();
  args.payload = {sum.data(), sum.size()};
  args.workspace = workspace;
  ASSERT_TRUE(reduce_encode(spec, args).ok());
  EXPECT_EQ(sum.get<uint16_t>(32), 0x4384);  // 264: the bf16 next to 263 (263 lies half-way; even), not 256
}

}  // namespace
}  // namespace gradgate::test
