// The examples' own random numbers: a counter through the SplitMix64 mixer. std:: distributions differ between standard libraries;
// these do not, so a seed means the same training everywhere. Not for anything but examples and tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

namespace gradgate::digits {

class Random {
 public:
  // Generators with different (seed, stream) are independent for the purposes of an example.
  Random(uint64_t seed, uint64_t stream) noexcept : state_(mix(seed) ^ mix(stream + 0x632be59bd9b4e019u)) {}

  uint64_t next() noexcept { return mix(state_ += 0x9e3779b97f4a7c15u); }

  // Uniform in [-1, 1), a multiple of 2^-23: exact in float.
  float symmetric() noexcept { return static_cast<float>(static_cast<int32_t>(next() >> 40) - (1 << 23)) * 0x1p-23f; }

  // Uniform in [0, bound), bound > 0; the bias of at most bound / 2^32 does not matter here.
  uint32_t below(uint32_t bound) noexcept { return static_cast<uint32_t>(((next() >> 32) * bound) >> 32); }

  // Fisher-Yates.
  template <class T>
  void shuffle(std::span<T> values) noexcept {
    for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[below(static_cast<uint32_t>(i))]);
  }

 private:
  static uint64_t mix(uint64_t z) noexcept {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  uint64_t state_;
};

}  // namespace gradgate::digits
