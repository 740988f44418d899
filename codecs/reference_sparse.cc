#include "codecs/reference_sparse.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "codecs/reference.h"
#include "codecs/reference_detail.h"

namespace gradgate::reference {
namespace {

constexpr size_t kChunk = 65536;

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
size_t up16(size_t n) { return (n + 15) / 16 * 16; }

}  // namespace

size_t values_bytes(DType value, size_t k) {
  return value == DType::f32 ? 4 * k : value == DType::bf16 ? 2 * k : up16((k + 255) / 256 * 4) + k;
}

void put_values(DType value, const std::vector<float>& values, size_t at, std::vector<std::byte>* payload) {
  const size_t k = values.size();
  for (size_t j = 0; j < k && value != DType::u8; ++j) {
    if (value == DType::f32) put<float>(payload, at + 4 * j, detail::canonical(values[j]));
    if (value == DType::bf16) put<uint16_t>(payload, at + 2 * j, bf16_of(values[j]));
  }
  for (size_t begin = 0; begin < k && value == DType::u8; begin += 256) {
    const size_t end = std::min(k, begin + 256);
    float a = 0.0f;
    for (size_t j = begin; j < end; ++j) {
      if (std::isfinite(values[j])) a = std::max(a, std::fabs(values[j]));
    }
    const float f = a < std::ldexp(1.0f, -100) ? std::ldexp(1.0f, 64) : 1.0f;
    float s = a * f / 127.0f;
    if (std::isinf(127.0f * s)) s = std::nextafter(s, 0.0f);
    if (a != 0.0f) put<float>(payload, at + begin / 256 * 4, f != 1.0f ? -s : s);
    for (size_t j = begin; j < end; ++j) {
      int code = -128;
      if (std::isfinite(values[j])) {
        code = a == 0.0f
                   ? 0
                   : static_cast<int>(std::clamp(std::nearbyint(values[j] * f * (127.0f / (a * f))), -127.0f, 127.0f));
      }
      put<int8_t>(payload, at + up16((k + 255) / 256 * 4) + j, static_cast<int8_t>(code));
    }
  }
}

std::vector<float> get_values(DType value, size_t k, const std::byte* payload, size_t at) {
  std::vector<float> values(k);
  for (size_t j = 0; j < k; ++j) {
    if (value == DType::f32) values[j] = get<float>(payload, at + 4 * j);
    if (value == DType::bf16) values[j] = detail::of_bf16(get<uint16_t>(payload, at + 2 * j));
    if (value == DType::u8) {
      const float scale = get<float>(payload, at + j / 256 * 4);
      const int code = get<int8_t>(payload, at + up16((k + 255) / 256 * 4) + j);
      float v = static_cast<float>(code) * std::fabs(scale);
      if (std::signbit(scale)) v = v * std::ldexp(1.0f, -64);
      values[j] = code == -128 ? detail::kNan : v;
    }
  }
  return values;
}

TopkLayout::TopkLayout(const CodecSpec& spec, size_t n) {
  const double ratio = std::bit_cast<double>(static_cast<uint64_t>(spec.param1) << 32 | spec.param0);
  const double rounded = std::round(ratio * static_cast<double>(n));
  entries = std::min<size_t>(n, std::max<size_t>(1, static_cast<size_t>(rounded)));
  chunks = (n + kChunk - 1) / kChunk;
  values_at = 32 + up16(chunks * 4);
  indices_at = values_at + up16(values_bytes(spec.value, entries));
  bytes = indices_at + up16(entries * 2);
}

void encode_vector_topk(const CodecSpec& spec, const std::vector<float>& x, std::vector<std::byte>* payload) {
  const TopkLayout layout(spec, x.size());
  std::vector<uint32_t> order(x.size());
  std::iota(order.begin(), order.end(), 0u);
  const auto key = [&](uint32_t i) {
    return std::isnan(x[i]) ? 0xffffffffu : std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
  };
  const auto before = [&](uint32_t a, uint32_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; };
  std::nth_element(order.begin(), order.begin() + static_cast<ptrdiff_t>(layout.entries), order.end(), before);
  order.resize(layout.entries);
  std::sort(order.begin(), order.end());
  std::vector<uint32_t> counts(layout.chunks);
  std::vector<float> chosen(layout.entries);
  for (size_t j = 0; j < layout.entries; ++j) {
    const uint32_t i = order[j];
    ++counts[i / kChunk];
    chosen[j] = x[i];
    put<uint16_t>(payload, layout.indices_at + j * 2, static_cast<uint16_t>(i % kChunk));
  }
  put_values(spec.value, chosen, layout.values_at, payload);
  for (size_t c = 0; c < layout.chunks; ++c) put<uint32_t>(payload, 32 + c * 4, counts[c]);
}

void vector_topk_values(const CodecSpec& spec, size_t n, const std::byte* payload, std::vector<float>* d,
                        std::vector<bool>* sent) {
  const TopkLayout layout(spec, n);
  const std::vector<float> values = get_values(spec.value, layout.entries, payload, layout.values_at);
  size_t entry = 0;
  for (size_t c = 0; c < layout.chunks; ++c) {
    for (uint32_t j = get<uint32_t>(payload, 32 + c * 4); j > 0; --j, ++entry) {
      const size_t i = c * kChunk + get<uint16_t>(payload, layout.indices_at + entry * 2);
      (*d)[i] = values[entry];
      if (sent != nullptr) (*sent)[i] = true;
    }
  }
}

namespace {

size_t ratio_entries(const CodecSpec& spec, size_t n) { return n == 0 ? 0 : TopkLayout(spec, n).entries; }

// First element of each stratum on the ring, and the end of the last.
std::vector<uint64_t> strata(size_t n, size_t k, uint32_t w2) {
  const uint64_t shift = uint64_t{w2} * n >> 32;
  std::vector<uint64_t> begin(k + 1);
  for (size_t j = 0; j <= k; ++j) begin[j] = (j * uint64_t{n} + shift) / k;
  return begin;
}

}  // namespace

void randk_section_bytes(const CodecSpec& spec, size_t n, size_t* first, size_t* second) {
  *first = n == 0 ? 0 : 16;
  *second = ratio_entries(spec, n) * (spec.value == DType::f32 ? 4 : 2);
}

std::vector<size_t> randk_elements(const CodecSpec& spec, size_t n, const uint32_t* w) {
  const size_t k = ratio_entries(spec, n);
  const std::vector<uint64_t> begin = strata(n, k, w[2]);
  std::vector<size_t> elements(k);
  for (size_t j = 0; j < k; ++j) {
    const auto block = static_cast<uint32_t>(32 * (j / 128) + j % 32);
    const uint32_t r = detail::philox({block, 0, 0, w[3]}, {w[0], w[1]})[j % 128 / 32];
    elements[j] = (begin[j] + (r * (begin[j + 1] - begin[j]) >> 32)) % n;
  }
  return elements;
}

void encode_randk(const CodecSpec& spec, const std::vector<float>& x, Seed seed, std::vector<std::byte>* payload) {
  const size_t n = x.size();
  const uint64_t b = (uint64_t{1} << 63) + seed.first;
  const auto low = [](uint64_t v) { return static_cast<uint32_t>(v); };
  const auto w = detail::philox({low(b), seed.tensor, seed.step, seed.stream},
                                {low(seed.key), low(seed.key >> 32) ^ low(b >> 32)});
  for (size_t i = 0; i < 4; ++i) put<uint32_t>(payload, 32 + 4 * i, w[i]);
  const std::vector<size_t> elements = randk_elements(spec, n, w.data());
  const std::vector<uint64_t> begin = strata(n, elements.size(), w[2]);
  for (size_t j = 0; j < elements.size(); ++j) {
    float value = x[elements[j]];
    bool finite = true;
    for (uint64_t at = begin[j]; at < begin[j + 1]; ++at) finite = finite && std::isfinite(x[at % n]);
    if (std::isnan(value) || (!finite && std::isfinite(value))) value = detail::kNan;
    if (spec.value == DType::f32) {
      put<float>(payload, 48 + 4 * j, value);
    } else {
      put<uint16_t>(payload, 48 + 2 * j, bf16_of(value));
    }
  }
}

void randk_values(const CodecSpec& spec, size_t n, const std::byte* payload, std::vector<float>* d,
                  std::vector<bool>* sent) {
  if (n == 0) return;
  uint32_t words[4];
  std::memcpy(words, payload + 32, sizeof words);
  const std::vector<size_t> elements = randk_elements(spec, n, words);
  for (size_t j = 0; j < elements.size(); ++j) {
    (*d)[elements[j]] = spec.value == DType::f32 ? get<float>(payload, 48 + 4 * j)
                                                 : detail::of_bf16(get<uint16_t>(payload, 48 + 2 * j));
    if (sent != nullptr) (*sent)[elements[j]] = true;
  }
}

}  // namespace gradgate::reference
