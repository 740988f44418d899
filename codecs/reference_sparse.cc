#include "codecs/reference_sparse.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "codecs/reference.h"

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

}  // namespace gradgate::reference
