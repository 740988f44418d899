// The arithmetic that all codecs share.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "codecs/bf16.h"
#include "codecs/exact_math.h"
#include "codecs/f16.h"
#include "codecs/int8.h"
#include "codecs/reference.h"
#include "tests/support/gen.h"

namespace gradgate::test {
namespace {

TEST(Bf16, WidensAllAndComesBack) {
  for (uint32_t b = 0; b < 65536; ++b) {
    const uint16_t h = static_cast<uint16_t>(b);
    const float x = codecs::widen_bf16(h);
    EXPECT_EQ(std::bit_cast<uint32_t>(x), b << 16);
    const bool nan = (b & 0x7fff) > 0x7f80;
    EXPECT_EQ(codecs::round_bf16(x), nan ? 0x7fc0 : h);
  }
}

// Around every bf16: the value itself, its neighbours in f32, and the half-way points on both sides.
TEST(Bf16, RoundsToNearestEvenAndSaturates) {
  for (uint32_t b = 0; b < 65536; ++b) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float x = std::bit_cast<float>(b << 16 | low);
      ASSERT_EQ(codecs::round_bf16(x), reference::bf16_of(x)) << std::hex << (b << 16 | low);
    }
  }
  EXPECT_EQ(codecs::round_bf16(std::bit_cast<float>(0x7f7fffffu)), 0x7f7f);
  EXPECT_EQ(codecs::round_bf16(std::bit_cast<float>(0xff7fffffu)), 0xff7f);
  EXPECT_EQ(codecs::round_bf16(std::bit_cast<float>(0xff800000u)), 0xff80);
}

TEST(F16, WidensAllAndComesBack) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
    const float x = codecs::widen_f16(static_cast<uint16_t>(h));
    if (exponent < 31) {
      const double expected =
          exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, int(exponent) - 25);
      EXPECT_EQ(static_cast<double>(x), h >> 15 != 0 ? -expected : expected);
    } else {
      EXPECT_EQ(std::isinf(x), mantissa == 0);
      EXPECT_EQ(std::isnan(x), mantissa != 0);
    }
    EXPECT_EQ(std::signbit(x), h >> 15 != 0);
    EXPECT_EQ(codecs::round_f16(x), std::isnan(x) ? 0x7e00u : h);
  }
}

// Around every f16: its neighbours in f32 and the half-way points.
TEST(F16, RoundsToNearestEvenAndSaturates) {
  for (uint32_t h = 0; h < 0x7c00; ++h) {
    const float low = codecs::widen_f16(static_cast<uint16_t>(h));
    const float high = h == 0x7bff ? 65536.0f : codecs::widen_f16(static_cast<uint16_t>(h + 1));
    const float middle = low + (high - low) / 2;
    for (const float x : {low, std::nextafter(low, high), std::nextafter(middle, low), middle,
                          std::nextafter(middle, high), std::nextafter(high, low)}) {
      ASSERT_EQ(codecs::round_f16(x), reference::f16_of(x)) << std::hex << h;
      ASSERT_EQ(codecs::round_f16(-x), reference::f16_of(-x)) << std::hex << h;
    }
    ASSERT_EQ(reference::f16_of(middle), h == 0x7bff ? h : h + h % 2);
    ASSERT_EQ(reference::f16_of(std::nextafter(middle, high)), h == 0x7bff ? h : h + 1);
  }
  EXPECT_EQ(codecs::round_f16(std::bit_cast<float>(0x7f7fffffu)), 0x7bff);
  EXPECT_EQ(codecs::round_f16(std::bit_cast<float>(0xff800000u)), 0xfc00);
  EXPECT_EQ(codecs::round_f16(std::bit_cast<float>(0x00000001u)), 0);
  EXPECT_EQ(codecs::round_f16(std::bit_cast<float>(0xff800001u)), 0x7e00);
}

TEST(ExactMath, RoundsHalfToEven) {
  for (int i = -1000; i <= 1000; ++i) {
    const float half = static_cast<float>(i) * 0.5f;
    EXPECT_EQ(exact::round_even(half), static_cast<int>(std::nearbyint(half)));
    EXPECT_EQ(exact::round_even(std::nextafter(half, 1e9f)),
              static_cast<int>(std::nearbyint(std::nextafter(half, 1e9f))));
  }
}

TEST(ExactMath, OrdersMagnitudes) {
  EXPECT_EQ(exact::mag(-0.0f), exact::mag(0.0f));
  EXPECT_LT(exact::mag(1e-45f), exact::mag(-3e-45f));
  EXPECT_LT(exact::mag(-3e38f), exact::mag(INFINITY));
  EXPECT_LT(exact::mag(-INFINITY), exact::mag(NAN));
  EXPECT_TRUE(exact::is_nan(exact::canonical(std::bit_cast<float>(0xff800001u))));
  EXPECT_EQ(std::bit_cast<uint32_t>(exact::canonical(std::bit_cast<float>(0xff800001u))), 0x7fc00000u);
}

// For every exponent and the mantissas that matter: the greatest element gets code +-127, no element needs limiting,
// and 127 steps are finite.
TEST(Int8Scale, HoldsForAnyMaximum) {
  Random random(5);
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (int round = 0; round < 200; ++round) {
      const uint32_t mantissa = round == 0 ? 0 : round == 1 ? 0x7fffff : round == 2 ? 1 : random.below(1u << 23);
      const uint32_t a = exponent << 23 | mantissa;
      if (a == 0) continue;
      const float top = std::bit_cast<float>(a);
      const codecs::Int8Encoder block = codecs::Int8Encoder::of(a);
      ASSERT_TRUE(block.finite);
      ASSERT_EQ(block.code(top), 127) << std::hex << a;
      ASSERT_EQ(block.code(-top), -127);
      const codecs::Int8Decoder decoder = codecs::Int8Decoder::of(block.stored);
      ASSERT_TRUE(std::isfinite(decoder.value(127))) << std::hex << a;
      // Below 2^-126 the result is itself rounded to a multiple of 2^-149.
      ASSERT_NEAR(static_cast<double>(decoder.value(127)), top, top * 2e-7 + 0x1p-149) << std::hex << a;
      ASSERT_EQ(block.stored >> 31, a < 0x0d800000u ? 1u : 0u);
    }
  }
  EXPECT_EQ(codecs::Int8Encoder::of(0).stored, 0u);
  EXPECT_EQ(codecs::Int8Encoder::of(0x7f800000u).stored, 0x7fc00000u);
  EXPECT_EQ(codecs::Int8Encoder::of(0x7fffffffu).stored, 0x7fc00000u);
}

}  // namespace
}  // namespace gradgate::test
