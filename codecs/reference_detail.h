// What the files of the reference share: bits of floats, f16 and bf16, bytes of payloads.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "codecs/reference.h"

namespace gradgate::reference::detail {

inline const float kNan = std::bit_cast<float>(0x7fc00000u);

inline uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
inline uint32_t mag(float x) { return bits(x) & 0x7fffffffu; }
inline float canonical(float x) { return std::isnan(x) ? kNan : x; }
inline float of_bf16(uint16_t b) { return std::bit_cast<float>(static_cast<uint32_t>(b) << 16); }
inline float of_f16(uint16_t h) {
  const int exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  const float sign = (h & 0x8000) != 0 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa == 0 ? sign * std::numeric_limits<float>::infinity() : std::copysign(kNan, sign);
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                               : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25));
}
inline float of_half(DType dtype, uint16_t h) { return dtype == DType::bf16 ? of_bf16(h) : of_f16(h); }
inline uint16_t half_of(DType dtype, float x) { return dtype == DType::bf16 ? bf16_of(x) : f16_of(x); }
inline size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }
template <class T>
void put(std::vector<std::byte>* payload, size_t at, T value) {
  std::memcpy(payload->data() + at, &value, sizeof value);
}
template <class T>
T get(const std::byte* payload, size_t at) {
  T value;
  std::memcpy(&value, payload + at, sizeof value);
  return value;
}

// §5: the four words of a block of random numbers.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k);

// The codecs of blocks and of scaled vectors (reference_blocks.cc): x into the sections of a payload, and back.
void encode_scaled(const CodecSpec& spec, const Seed& seed, const std::vector<float>& x, size_t scales_at,
                   size_t codes_at, std::vector<std::byte>* payload);
void decode_scaled(const CodecSpec& spec, size_t n, const std::byte* payload, size_t codes_at, std::vector<float>* d);
void encode_onebit(const std::vector<float>& x, size_t scales_at, size_t signs_at, std::vector<std::byte>* payload);
void decode_onebit(size_t n, const std::byte* payload, size_t signs_at, std::vector<float>* d);
void encode_fp16(const std::vector<float>& x, size_t elements_at, std::vector<std::byte>* payload);
void decode_fp16(size_t n, const std::byte* payload, size_t elements_at, std::vector<float>* d);

}  // namespace gradgate::reference::detail
