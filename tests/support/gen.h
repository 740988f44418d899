// Seeded gradients for tests: the kinds of values that break codecs. Integer arithmetic and exact float operations
// only, so that a golden file made from a generator is the same on every machine.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

#include "gradgate/types.h"

namespace gradgate::test {

/// splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15ull;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  /// 0 … below-1.
  uint32_t below(uint32_t n) { return static_cast<uint32_t>((next() >> 32) * n >> 32); }
  /// Nearly standard normal: the sum of four 16-bit numbers, scaled by a power of two.
  float normal() {
    const uint64_t r = next();
    const int32_t sum =
        static_cast<int32_t>((r & 0xffff) + ((r >> 16) & 0xffff) + ((r >> 32) & 0xffff) + (r >> 48)) - 131070;
    return static_cast<float>(sum) * 0x1p-15f;
  }

 private:
  uint64_t state_;
};

/// 2^exponent, -126 <= exponent <= 127.
inline float power_of_two(int exponent) { return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23); }

/// An f16 of the same kind: x cut to its precision where it is in range; else subnormal for what is small, near the
/// greatest for what is large, Inf and NaN for themselves.
inline uint16_t f16_like(float x) {
  const uint32_t b = std::bit_cast<uint32_t>(x), m = b & 0x7fffffffu, sign = b >> 16 & 0x8000u;
  const uint32_t in_range = (m - (112u << 23)) >> 13;
  const uint32_t finite = m == 0            ? 0
                          : m < 0x38800000u ? 1 + (m >> 3) % 1023
                          : m < 0x47800000u ? in_range
                                            : 0x7bffu - (m & 255);
  return static_cast<uint16_t>(sign | (m > 0x7f800000u ? 0x7c01u | (m & 0x3ffu) : m == 0x7f800000u ? 0x7c00u : finite));
}

enum class Gen {
  gaussian,
  heavy_tail,
  constant,
  zeros,
  zero_groups,
  subnormal,
  non_finite,
  integers,
  tiny,
  huge,
  ties
};
inline constexpr Gen kAllGens[] = {Gen::gaussian,    Gen::heavy_tail, Gen::constant,   Gen::zeros,
                                   Gen::zero_groups, Gen::subnormal,  Gen::non_finite, Gen::integers,
                                   Gen::tiny,        Gen::huge,       Gen::ties};

inline const char* gen_name(Gen gen) {
  constexpr const char* kNames[] = {"gaussian",   "heavy_tail", "constant", "zeros", "zero_groups", "subnormal",
                                    "non_finite", "integers",   "tiny",     "huge",  "ties"};
  return kNames[static_cast<int>(gen)];
}

inline std::vector<float> generate(Gen gen, size_t n, uint64_t seed) {
  Random random(seed * 1000003 + static_cast<uint64_t>(gen));
  std::vector<float> v(n);
  for (size_t i = 0; i < n; ++i) {
    switch (gen) {
      case Gen::gaussian:
        v[i] = random.normal() * 0.01f;
        break;
      case Gen::heavy_tail: {
        const float x = random.normal();
        const int exponent = static_cast<int>(random.below(32)) - 24;
        v[i] = x * power_of_two(exponent);
        break;
      }
      case Gen::constant:
        v[i] = -2.0f;
        break;
      case Gen::zeros:
        v[i] = random.below(2) == 0 ? 0.0f : -0.0f;
        break;
      case Gen::zero_groups: {  // every other group of 256 is zero, the others have a few zeros
        const float x = random.normal();
        const bool zero = i / 256 % 2 == 1 || random.below(8) == 0;
        v[i] = zero ? (random.below(2) == 0 ? 0.0f : -0.0f) : x;
        break;
      }
      case Gen::subnormal:
        v[i] = std::bit_cast<float>((random.below(2) << 31) | random.below(i % 7 == 0 ? 1u << 23 : 1u << 12));
        break;
      case Gen::non_finite: {  // about one group in three has one or several
        const float x = random.normal();
        const uint32_t kind = random.below(600);
        constexpr uint32_t kOdd[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00001u, 0x7f800001u, 0x7fffffffu};
        v[i] = kind < 6 && i / 512 % 2 == 0 ? std::bit_cast<float>(kOdd[kind]) : x;
        break;
      }
      case Gen::integers:
        v[i] = static_cast<float>(static_cast<int>(random.below(17)) - 8);
        break;
      case Gen::tiny: {  // below and around 2^-100
        const float x = random.normal();
        const int exponent = i / 256 % 3 == 0 ? -100 : -125 + static_cast<int>(random.below(20));
        v[i] = x * power_of_two(exponent);
        break;
      }
      case Gen::huge: {
        const uint32_t bits = 0x7f7fffffu - random.below(i % 5 == 0 ? 64 : 1u << 22);
        v[i] = std::bit_cast<float>(bits | (random.below(2) << 31));
        break;
      }
      case Gen::ties:
        v[i] = static_cast<float>(static_cast<int>(random.below(5)) - 2) * 0.25f;
        break;
    }
  }
  return v;
}

/// A gradient in the dtype under test; bf16 keeps the upper halves, f16 the kind of value (see f16_like).
struct Gradient {
  DType dtype = DType::f32;
  std::vector<float> f32;
  std::vector<uint16_t> bf16, f16;

  static Gradient of(const std::vector<float>& values, DType dtype) {
    Gradient g;
    g.dtype = dtype;
    if (dtype == DType::f32) {
      g.f32 = values;
    } else if (dtype == DType::f16) {
      for (const float v : values) g.f16.push_back(f16_like(v));
    } else {
      for (const float v : values) {
        uint32_t b = std::bit_cast<uint32_t>(v);
        if ((b & 0x7fffffffu) > 0x7f800000u) b |= 0x00400000u;  // still NaN without the lower half
        g.bf16.push_back(static_cast<uint16_t>(b >> 16));
      }
    }
    return g;
  }
  static Gradient of(Gen gen, size_t n, uint64_t seed, DType dtype) { return of(generate(gen, n, seed), dtype); }

  size_t count() const { return dtype == DType::f32 ? f32.size() : half().size(); }
  size_t bytes() const { return count() * dtype_bytes(dtype); }
  const std::vector<uint16_t>& half() const { return dtype == DType::f16 ? f16 : bf16; }
  void* data() { return const_cast<void*>(static_cast<const Gradient*>(this)->data()); }
  const void* data() const {
    return dtype == DType::f32 ? static_cast<const void*>(f32.data()) : static_cast<const void*>(half().data());
  }
  ConstVec view() const { return {data(), count(), dtype}; }
  Vec vec() { return {data(), count(), dtype}; }
  friend bool operator==(const Gradient& a, const Gradient& b) {
    return a.bytes() == b.bytes() && (a.bytes() == 0 || __builtin_memcmp(a.data(), b.data(), a.bytes()) == 0);
  }
};

}  // namespace gradgate::test
