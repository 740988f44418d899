// The reference of docs/format.md, continued: scaled blocks, onebit and fp16, and the random numbers.
#include <algorithm>

#include "codecs/reference_detail.h"

namespace gradgate::reference::detail {

// §5.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = 0xd2511f53ull * c[0], q = 0xcd9e8d57ull * c[2];
    c = {static_cast<uint32_t>(q >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(q),
         static_cast<uint32_t>(p >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p)};
    k = {k[0] + 0x9e3779b9u, k[1] + 0xbb67ae85u};
  }
  return c;
}

namespace {

// u(t) of element i of a vector.
float dither(const Seed& seed, size_t i) {
  const uint64_t t = seed.first + i, b = 32 * (t / 256) + t % 32, k = t % 256 / 32;
  const auto low = [](uint64_t v) { return static_cast<uint32_t>(v); };
  const auto w =
      philox({low(b), seed.tensor, seed.step, seed.stream}, {low(seed.key), low(seed.key >> 32) ^ low(b >> 32)});
  const uint32_t r = k < 4 ? w[k] & 0xffff : w[k - 4] >> 16;
  return static_cast<float>((r + 0.5) / 65536 - 0.5);
}

struct Fp8Kind {
  int mantissa_bits, bias, largest_code;
};
double fp8_value(const Fp8Kind& kind, int code) {
  const int w = kind.mantissa_bits, exponent = (code & 127) >> w, m = code & ((1 << w) - 1);
  const double fraction = std::ldexp(m, -w);
  const double size =
      exponent == 0 ? std::ldexp(fraction, 1 - kind.bias) : std::ldexp(1 + fraction, exponent - kind.bias);
  return (code & 128) != 0 ? -size : size;
}
// What the codes 0 … largest stand for, ascending.
std::vector<double> fp8_values(const Fp8Kind& kind) {
  std::vector<double> values;
  for (int code = 0; code <= kind.largest_code; ++code) values.push_back(fp8_value(kind, code));
  return values;
}
int fp8_code(const std::vector<double>& values, float v) {
  const double size = std::fabs(static_cast<double>(v));
  const auto above = std::upper_bound(values.begin(), values.end(), size);
  int code = static_cast<int>(above - values.begin()) - 1;
  if (above != values.end()) {
    const double under = size - values[static_cast<size_t>(code)], over = *above - size;
    if (over < under || (over == under && code % 2 != 0)) ++code;
  }
  return code | (std::signbit(v) ? 128 : 0);
}

// What §3 says about a scaled block of this spec.
struct Scaled {
  size_t block;
  float largest;
  bool stochastic = false, rotated = false;
  Fp8Kind fp8{0, 0, 0};

  explicit Scaled(const CodecSpec& spec) {
    block = spec.id == CodecId::int4 ? 128 : 256;
    largest = spec.id == CodecId::int8   ? 127.0f
              : spec.id == CodecId::int4 ? 7.0f
              : spec.param1 == 0         ? 448.0f
                                         : 57344.0f;
    stochastic = spec.id == CodecId::int8 ? spec.param1 == 1 : spec.id == CodecId::int4 && spec.param1 >= 2;
    rotated = spec.id == CodecId::int4 && spec.param1 % 2 == 1;
    if (spec.id == CodecId::fp8) fp8 = spec.param1 == 0 ? Fp8Kind{3, 7, 0x7e} : Fp8Kind{2, 15, 0x7b};
  }
};

const float kTiny = std::ldexp(1.0f, -100), kHuge = std::ldexp(1.0f, 100);

float scale_of(float a, float largest) {
  const float s = a / largest;
  return std::isinf(largest * s) ? std::nextafter(s, 0.0f) : s;
}

// The rotation of 128 elements without factor and signs.
void butterflies(std::vector<float>* y) {
  for (size_t length = 64; length >= 1; length /= 2) {
    for (size_t j = 0; j < 128; ++j) {
      if ((j & length) != 0) continue;
      const float a = (*y)[j], b = (*y)[j + length];
      (*y)[j] = a + b;
      (*y)[j + length] = a - b;
    }
  }
}
std::vector<bool> rotation_signs(uint32_t step) {
  const auto words = philox({step, 0, 0, 0}, {0x61646148u, 0x6472616du});
  std::vector<bool> flipped(128);
  for (size_t j = 0; j < 128; ++j) flipped[j] = (words[j / 32] >> (j % 32) & 1) != 0;
  return flipped;
}

void put_code(const CodecSpec& spec, size_t codes_at, size_t i, int code, std::vector<std::byte>* payload) {
  if (spec.id != CodecId::int4) {
    put<uint8_t>(payload, codes_at + i, static_cast<uint8_t>(code));
    return;
  }
  const size_t at = codes_at + i / 128 * 64 + i % 64;
  const bool upper = i % 128 >= 64;
  const auto byte = get<uint8_t>(payload->data(), at);
  put<uint8_t>(payload, at, static_cast<uint8_t>(byte | ((code & 15) << (upper ? 4 : 0))));
}
int get_code(const CodecSpec& spec, const std::byte* payload, size_t codes_at, size_t i) {
  if (spec.id == CodecId::fp8) return get<uint8_t>(payload, codes_at + i);
  if (spec.id == CodecId::int8) return get<int8_t>(payload, codes_at + i);
  const int byte = get<uint8_t>(payload, codes_at + i / 128 * 64 + i % 64);
  const int half = i % 128 >= 64 ? byte >> 4 : byte & 15;
  return half >= 8 ? half - 16 : half;
}

}  // namespace

void encode_scaled(const CodecSpec& spec, const Seed& seed, const std::vector<float>& x, size_t scales_at,
                   size_t codes_at, std::vector<std::byte>* payload) {
  const Scaled rule(spec);
  const std::vector<double> fp8 = fp8_values(rule.fp8);
  const std::vector<bool> flipped = rotation_signs(seed.step);
  const size_t n = x.size();
  for (size_t begin = 0; begin < n; begin += rule.block) {
    const size_t end = std::min(n, begin + rule.block), at = scales_at + begin / rule.block * 4;
    uint32_t a_bits = 0;
    for (size_t i = begin; i < end; ++i) a_bits = std::max(a_bits, mag(x[i]));
    float a = std::bit_cast<float>(a_bits);
    if (a == 0.0f) continue;  // scale +0, codes 0
    if (!std::isfinite(a)) {
      put<float>(payload, at, kNan);
      continue;
    }
    float f = a < kTiny ? std::ldexp(1.0f, 64) : 1.0f;
    if (rule.rotated && a >= kHuge) f = std::ldexp(1.0f, -64);
    std::vector<float> y(rule.block, 0.0f);
    for (size_t i = begin; i < end; ++i) y[i - begin] = x[i] * f;
    if (rule.rotated) {
      for (size_t j = 0; j < 128; ++j) {
        if (flipped[j]) y[j] = -y[j];
      }
      butterflies(&y);
    }
    a = 0.0f;
    for (const float v : y) a = std::max(a, std::fabs(v));
    const float s = scale_of(a, rule.largest), inverse = rule.largest / a;
    put<float>(payload, at, f != 1.0f ? -s : s);
    const size_t codes = rule.rotated ? rule.block : end - begin;  // a rotated block has no elements without a code
    for (size_t j = 0; j < codes; ++j) {
      const float v = y[j] * inverse;
      int code = 0;
      if (spec.id == CodecId::fp8) {
        code = fp8_code(fp8, v);
      } else {
        const float moved = rule.stochastic ? v + dither(seed, begin + j) : v;
        code = static_cast<int>(std::clamp(std::nearbyint(moved), -rule.largest, rule.largest));
      }
      put_code(spec, codes_at, begin + j, code, payload);
    }
  }
}

void decode_scaled(const CodecSpec& spec, size_t n, const std::byte* payload, size_t codes_at, std::vector<float>* d) {
  const Scaled rule(spec);
  const std::vector<bool> flipped = rotation_signs(get<uint32_t>(payload, 24));
  for (size_t begin = 0; begin < n; begin += rule.block) {
    const size_t end = std::min(n, begin + rule.block);
    const float scale = get<float>(payload, 32 + begin / rule.block * 4), s = std::fabs(scale);
    if (rule.rotated && bits(scale) == 0) continue;  // +0
    std::vector<float> z(rule.block);
    for (size_t j = 0; j < (rule.rotated ? rule.block : end - begin); ++j) {
      const int code = get_code(spec, payload, codes_at, begin + j);
      z[j] = (spec.id == CodecId::fp8 ? static_cast<float>(fp8_value(rule.fp8, code)) : static_cast<float>(code)) * s;
    }
    if (rule.rotated) {
      butterflies(&z);
      for (float& v : z) v = v * std::ldexp(1.0f, -7);
    }
    for (size_t j = 0; j < end - begin; ++j) {
      float v = z[j];
      if (std::signbit(scale)) v = v * std::ldexp(1.0f, rule.rotated && s >= 1.0f ? 64 : -64);
      if (rule.rotated && std::isinf(v)) v = std::copysign(std::numeric_limits<float>::max(), v);
      (*d)[begin + j] = rule.rotated && flipped[j] ? -v : v;
    }
  }
}

void encode_onebit(const std::vector<float>& x, size_t scales_at, size_t signs_at, std::vector<std::byte>* payload) {
  for (size_t begin = 0; begin < x.size(); begin += 1024) {
    const size_t end = std::min(x.size(), begin + 1024), at = scales_at + begin / 1024 * 4;
    uint32_t a = 0, parts = 0;
    size_t elements = 0;
    for (size_t k = 0; k < 4; ++k) {
      const size_t from = std::min(end, begin + 256 * k), to = std::min(end, from + 256);
      uint32_t greatest = 0;
      for (size_t i = from; i < to; ++i) greatest = std::max(greatest, mag(x[i]));
      a = std::max(a, greatest);
      if (greatest != 0) parts |= 1u << k, elements += to - from;
    }
    const float largest = std::bit_cast<float>(a);
    if (!std::isfinite(largest)) {
      put<uint32_t>(payload, at, 0x7fc00000u | parts);
      continue;
    }
    if (a == 0) continue;
    const int f = largest < kTiny ? 64 : largest >= kHuge ? -24 : 0;
    std::vector<float> s(1024, 0.0f);
    for (size_t i = begin; i < end; ++i) s[i - begin] = std::fabs(x[i] * std::ldexp(1.0f, f));
    for (size_t length = 512; length >= 1; length /= 2) {
      for (size_t j = 0; j < length; ++j) s[j] = s[j] + s[j + length];
    }
    float mean = s[0] / static_cast<float>(elements);
    if (f == -24) mean = std::min(mean * std::ldexp(1.0f, 24), largest);
    put<uint32_t>(payload, at, (bits(mean) & 0x7ffffff0u) | parts | (f == 64 ? 0x80000000u : 0));
    for (size_t i = begin; i < end; ++i) {
      const auto byte = get<uint8_t>(payload->data(), signs_at + i / 8);
      put<uint8_t>(payload, signs_at + i / 8, static_cast<uint8_t>(byte | (std::signbit(x[i]) ? 1 << (i % 8) : 0)));
    }
  }
}

void decode_onebit(size_t n, const std::byte* payload, size_t signs_at, std::vector<float>* d) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t scale = get<uint32_t>(payload, 32 + i / 1024 * 4);
    if ((scale >> (i % 1024 / 256) & 1) == 0) continue;  // +0
    float m = std::bit_cast<float>(scale & 0x7ffffff0u);
    if ((scale >> 31) != 0) m = m * std::ldexp(1.0f, -64);
    (*d)[i] = (get<uint8_t>(payload, signs_at + i / 8) >> (i % 8) & 1) != 0 ? -m : m;
  }
}

void encode_fp16(const std::vector<float>& x, size_t elements_at, std::vector<std::byte>* payload) {
  if (x.empty()) return;
  float a = 0.0f;
  for (const float v : x) {
    if (std::isfinite(v)) a = std::max(a, std::fabs(v));
  }
  int exponent = 0;
  std::frexp(a, &exponent);  // a < 2^exponent
  const int k = a == 0.0f ? 0 : std::min(15 - exponent, 126);
  put<float>(payload, 32, std::ldexp(1.0f, -k));
  for (size_t i = 0; i < x.size(); ++i) {
    const uint16_t h = f16_of(std::ldexp(x[i], k));
    const bool limited = std::isfinite(x[i]) && (h & 0x7fff) > 0x77ff;
    put<uint16_t>(payload, elements_at + i * 2, limited ? static_cast<uint16_t>((h & 0x8000) | 0x77ff) : h);
  }
}

void decode_fp16(size_t n, const std::byte* payload, size_t elements_at, std::vector<float>* d) {
  for (size_t i = 0; i < n; ++i)
    (*d)[i] = of_f16(get<uint16_t>(payload, elements_at + i * 2)) * get<float>(payload, 32);
}

}  // namespace gradgate::reference::detail
