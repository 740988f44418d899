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

TopkLayout::TopkLayout(const CodecSpec& spec, size_t n) {
  const double ratio = std::bit_cast<double>(static_cast<uint64_t>(spec.param1) << 32 | spec.param0);
  const double rounded = std::round(ratio * static_cast<double>(n));
  entries = std::min<size_t>(n, std::max<size_t>(1, static_cast<size_t>(rounded)));
  chunks = (n + kChunk - 1) / kChunk;
  values_at = 32 + up16(chunks * 4);
  indices_at = values_at + up16(entries * (spec.value == DType::f32 ? 4 : 2));
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
  for (size_t j = 0; j < layout.entries; ++j) {
    const uint32_t i = order[j];
    ++counts[i / kChunk];
    if (spec.value == DType::f32) {
      put<float>(payload, layout.values_at + j * 4, std::isnan(x[i]) ? std::bit_cast<float>(0x7fc00000u) : x[i]);
    } else {
      put<uint16_t>(payload, layout.values_at + j * 2, bf16_of(x[i]));
    }
    put<uint16_t>(payload, layout.indices_at + j * 2, static_cast<uint16_t>(i % kChunk));
  }
  for (size_t c = 0; c < layout.chunks; ++c) put<uint32_t>(payload, 32 + c * 4, counts[c]);
}

void vector_topk_values(const CodecSpec& spec, size_t n, const std::byte* payload, std::vector<float>* d,
                        std::vector<bool>* sent) {
  const TopkLayout layout(spec, n);
  size_t entry = 0;
  for (size_t c = 0; c < layout.chunks; ++c) {
    for (uint32_t j = get<uint32_t>(payload, 32 + c * 4); j > 0; --j, ++entry) {
      const size_t i = c * kChunk + get<uint16_t>(payload, layout.indices_at + entry * 2);
      (*d)[i] =
          spec.value == DType::f32
              ? get<float>(payload, layout.values_at + entry * 4)
              : std::bit_cast<float>(static_cast<uint32_t>(get<uint16_t>(payload, layout.values_at + entry * 2)) << 16);
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
