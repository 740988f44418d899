#include "integration/cli/test_data.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>

#include "codecs/f16.h"

namespace gradgate::cli {
namespace {

uint64_t mix(uint64_t x) {  // the finaliser of SplitMix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;
double unit(uint64_t bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53; }

uint16_t to_bf16(float x) {  // finite values only, to nearest even
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <class F>
void for_each(size_t first, Vec out, F value) {
  auto* f32 = static_cast<float*>(out.data);
  auto* half = static_cast<uint16_t*>(out.data);
  for (size_t i = 0; i < out.count; ++i) {
    const float x = value(first + i);
    if (out.dtype == DType::bf16) {
      half[i] = to_bf16(x);
    } else if (out.dtype == DType::f16) {
      half[i] = codecs::round_f16(x);
    } else {
      f32[i] = x;
    }
  }
}

constexpr size_t kScaleBlock = 4096;

}  // namespace

GradientLike::GradientLike() {
  uint64_t state = 1;
  for (size_t i = 0; i < kEntries; i += 2) {  // Box-Muller
    const double u = unit(mix(state += kStep)), v = unit(mix(state += kStep));
    const double radius = std::sqrt(-2 * std::log(u));
    normal_[i] = static_cast<float>(radius * std::cos(2 * std::numbers::pi * v));
    normal_[i + 1] = static_cast<float>(radius * std::sin(2 * std::numbers::pi * v));
  }
}

void GradientLike::fill(uint64_t seed, size_t first, Vec out) const {
  const uint64_t key = mix(seed * kStep + 1);
  size_t block = ~size_t{0};
  float scale = 0;
  for_each(first, out, [&](size_t i) {
    if (i / kScaleBlock != block) {
      block = i / kScaleBlock;
      scale = static_cast<float>(std::pow(10.0, -6 + 4 * unit(mix(key ^ (block * kStep)))) * std::numbers::sqrt2 / 2);
    }
    // The sum of two table entries is Gaussian too, and repeats rarely.
    const uint64_t h = mix(key + i * kStep);
    return (normal_[h % kEntries] + normal_[(h >> 32) % kEntries]) * scale;
  });
}

void fill_exact(int rank, int ranks, size_t first, Vec out) {
  const uint64_t key = mix(static_cast<uint64_t>(rank) + 1);
  // ranks · limit must fit in the 8, 11 or 24 bits of the dtype's significand; for f16 nothing is subnormal.
  const bool f16 = out.dtype == DType::f16;
  const int most = out.dtype == DType::bf16 ? 255 / ranks : f16 ? 2047 / ranks : std::min(131070, (1 << 24) / ranks);
  const int64_t limit = std::max(1, most);
  size_t block = ~size_t{0};
  float scale = 0;
  for_each(first, out, [&](size_t i) {
    if (i / kScaleBlock != block) {
      block = i / kScaleBlock;
      scale = std::ldexp(1.0f, -static_cast<int>(mix(block * kStep + 7) % 16) - (f16 ? 0 : 20));
    }
    const uint64_t h = mix(i * kStep + key);
    // Four uniform 16-bit numbers: within ±131070, bell-shaped.
    const int64_t bell = static_cast<int64_t>((h & 0xffff) + ((h >> 16) & 0xffff) + ((h >> 32) & 0xffff) + (h >> 48)) - 131070;
    return static_cast<float>(bell * limit / 131070) * scale;
  });
}

}  // namespace gradgate::cli
