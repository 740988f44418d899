#include "codecs/reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "codecs/reference_detail.h"
#include "codecs/reference_sparse.h"

namespace gradgate::reference {

using namespace detail;

namespace {

size_t blocks(size_t n) { return (n + 255) / 256; }

size_t entries(const CodecSpec& spec, size_t n) {
  return n / spec.param1 * spec.param0 + std::min<size_t>(spec.param0, n % spec.param1);
}

// Bytes of sections 0 and 1, without padding.
void section_bytes(const CodecSpec& spec, DType gradient, size_t n, size_t* first, size_t* second) {
  switch (spec.id) {
    case CodecId::none:
      *first = n * dtype_bytes(gradient), *second = 0;
      break;
    case CodecId::bf16:
      *first = n * 2, *second = 0;
      break;
    case CodecId::int8:
    case CodecId::fp8:
      *first = blocks(n) * 4, *second = n;
      break;
    case CodecId::int4:
      *first = (n + 127) / 128 * 4, *second = (n + 127) / 128 * 64;
      break;
    case CodecId::onebit:
      *first = (n + 1023) / 1024 * 4, *second = (n + 7) / 8;
      break;
    case CodecId::fp16:
      *first = n == 0 ? 0 : 4, *second = n * 2;
      break;
    case CodecId::topk:  // three sections: TopkLayout
      break;
    case CodecId::randk:
      randk_section_bytes(spec, n, first, second);
      break;
    case CodecId::chunk_topk:
      *first = values_bytes(spec.value, entries(spec, n)), *second = entries(spec, n) * 2;
      break;
  }
}

std::vector<std::byte> with_header(const CodecSpec& spec, DType gradient, size_t n, Seed seed, bool non_finite) {
  std::vector<std::byte> payload(reference::payload_bytes(spec, gradient, n));
  put<uint32_t>(&payload, 0, 0x31504747u);
  put<uint8_t>(&payload, 4, 1);
  put<uint8_t>(&payload, 5, static_cast<uint8_t>(spec.id));
  uint8_t value = 0;
  uint32_t p0 = 0, p1 = 0;
  switch (spec.id) {
    case CodecId::none:
      value = static_cast<uint8_t>(gradient);
      break;
    case CodecId::bf16:
      value = 1;
      break;
    case CodecId::int8:
    case CodecId::fp8:
      p0 = 256, p1 = spec.param1;
      break;
    case CodecId::int4:
      p0 = 128, p1 = spec.param1;
      break;
    case CodecId::onebit:
      p0 = 1024;
      break;
    case CodecId::fp16:
      value = 2;
      break;
    case CodecId::topk:
    case CodecId::randk:
    case CodecId::chunk_topk:
      value = static_cast<uint8_t>(spec.value), p0 = spec.param0, p1 = spec.param1;
      break;
  }
  put<uint8_t>(&payload, 6, value);
  put<uint8_t>(&payload, 7, non_finite ? 2 : 0);
  put<uint64_t>(&payload, 8, n);
  put<uint32_t>(&payload, 16, p0);
  put<uint32_t>(&payload, 20, p1);
  put<uint32_t>(&payload, 24, seed.step);
  uint32_t check = 0x811c9dc5u;
  for (const size_t i : {4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23}) {
    check = (check ^ static_cast<uint32_t>(payload[i])) * 0x01000193u;
  }
  put<uint32_t>(&payload, 28, check);
  return payload;
}

// Rules 1-3. kept[i]: the element is in a zero group and keeps its e.
std::vector<float> form_x(const std::vector<float>& g, const float* e, bool flush, std::vector<bool>* kept) {
  std::vector<float> x = g;
  kept->assign(g.size(), false);
  if (e == nullptr) return x;
  for (size_t begin = 0; begin < g.size(); begin += 256) {
    const size_t end = std::min(g.size(), begin + 256);
    const bool zero = std::all_of(g.begin() + begin, g.begin() + end, [](float v) { return v == 0.0f; });
    for (size_t i = begin; i < end; ++i) {
      if (zero && !flush) {
        x[i] = 0.0f;
        (*kept)[i] = true;
      } else if (std::isfinite(g[i])) {
        x[i] = g[i] + e[i];
      }
    }
  }
  return x;
}

void encode_topk(const CodecSpec& spec, const std::vector<float>& x, size_t values_at, size_t indices_at,
                 std::vector<std::byte>* payload) {
  std::vector<float> values;
  size_t entry = 0;
  for (size_t begin = 0; begin < x.size(); begin += spec.param1) {
    const size_t length = std::min<size_t>(spec.param1, x.size() - begin), k = std::min<size_t>(spec.param0, length);
    std::vector<uint16_t> order(length);
    for (size_t i = 0; i < length; ++i) order[i] = static_cast<uint16_t>(i);
    const auto key = [&](uint16_t i) { return std::isnan(x[begin + i]) ? 0xffffffffu : mag(x[begin + i]); };
    std::stable_sort(order.begin(), order.end(), [&](uint16_t a, uint16_t b) { return key(a) > key(b); });
    std::sort(order.begin(), order.begin() + k);
    for (size_t j = 0; j < k; ++j, ++entry) {
      values.push_back(x[begin + order[j]]);
      put<uint16_t>(payload, indices_at + entry * 2, order[j]);
    }
  }
  put_values(spec.value, values, values_at, payload);
}

std::vector<std::byte> encode_x(const CodecSpec& spec, DType gradient, const std::vector<float>& x, Seed seed,
                                EncodeStats* stats) {
  const size_t n = x.size();
  const auto non_finite =
      static_cast<uint64_t>(std::count_if(x.begin(), x.end(), [](float v) { return !std::isfinite(v); }));
  if (stats != nullptr) stats->non_finite = non_finite;
  std::vector<std::byte> payload = with_header(spec, gradient, n, seed, non_finite != 0);
  size_t first = 0, second = 0;
  section_bytes(spec, gradient, n, &first, &second);
  const size_t second_at = 32 + up(first, 16);
  switch (spec.id) {
    case CodecId::none:  // only sums come here: values of the gradient's dtype
      for (size_t i = 0; i < n; ++i) {
        if (gradient == DType::f32) {
          put<float>(&payload, 32 + i * 4, canonical(x[i]));
        } else {
          put<uint16_t>(&payload, 32 + i * 2, half_of(gradient, x[i]));
        }
      }
      break;
    case CodecId::bf16:
      for (size_t i = 0; i < n; ++i) put<uint16_t>(&payload, 32 + i * 2, bf16_of(x[i]));
      break;
    case CodecId::int8:
    case CodecId::fp8:
    case CodecId::int4:
      encode_scaled(spec, seed, x, 32, second_at, &payload);
      break;
    case CodecId::onebit:
      encode_onebit(x, 32, second_at, &payload);
      break;
    case CodecId::fp16:
      encode_fp16(x, second_at, &payload);
      break;
    case CodecId::topk:
      if (n > 0) encode_vector_topk(spec, x, &payload);
      break;
    case CodecId::randk:
      if (n > 0) encode_randk(spec, x, seed, &payload);
      break;
    case CodecId::chunk_topk:
      encode_topk(spec, x, 32, second_at, &payload);
      break;
  }
  return payload;
}

std::vector<std::byte> encode_vector(const CodecSpec& spec, DType gradient, const std::vector<float>& g, float* e,
                                     bool flush, Seed seed, EncodeStats* stats) {
  std::vector<bool> kept;
  const std::vector<float> x = form_x(g, e, flush, &kept);
  std::vector<std::byte> payload = encode_x(spec, gradient, x, seed, stats);
  if (e != nullptr) {
    const std::vector<float> d = values(spec, gradient, x.size(), payload.data(), nullptr);
    for (size_t i = 0; i < x.size(); ++i) {
      if (!kept[i] && std::isfinite(x[i]) && std::isfinite(d[i])) e[i] = x[i] - d[i];
    }
  }
  return payload;
}

float read(Vec v, size_t i) {
  return v.dtype == DType::f32 ? static_cast<const float*>(v.data)[i]
                               : of_half(v.dtype, static_cast<const uint16_t*>(v.data)[i]);
}
void write(Vec v, size_t i, float value) {
  if (v.dtype == DType::f32) {
    static_cast<float*>(v.data)[i] = canonical(value);
  } else {
    static_cast<uint16_t*>(v.data)[i] = half_of(v.dtype, value);
  }
}

}  // namespace

uint16_t bf16_of(float x) {
  if (std::isnan(x)) return 0x7fc0;
  const uint16_t toward_zero = static_cast<uint16_t>(bits(x) >> 16);
  if (std::isinf(x) || (toward_zero & 0x7fff) == 0x7f7f)
    return toward_zero;  // the greatest finite stays the greatest finite
  // The two neighbours, and the distances to them, are exact in double.
  const uint16_t away = static_cast<uint16_t>(toward_zero + 1);
  const double below = std::fabs(static_cast<double>(x) - of_bf16(toward_zero));
  const double above = std::fabs(static_cast<double>(of_bf16(away)) - x);
  if (below != above) return below < above ? toward_zero : away;
  return (toward_zero & 1) == 0 ? toward_zero : away;
}

uint16_t f16_of(float x) {
  if (std::isnan(x)) return 0x7e00;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isinf(x)) return sign | 0x7c00;
  const double a = std::fabs(static_cast<double>(x));
  if (a >= 65504.0) return sign | 0x7bff;  // the greatest finite stays the greatest finite
  // A binary search for the greatest f16 that is not above a; then the nearer neighbour.
  uint16_t below = 0, above = 0x7bff;
  while (above - below > 1) {
    const uint16_t middle = static_cast<uint16_t>((below + above) / 2);
    (static_cast<double>(of_f16(middle)) <= a ? below : above) = middle;
  }
  const double under = a - static_cast<double>(of_f16(below)), over = static_cast<double>(of_f16(above)) - a;
  return sign | (under < over || (under == over && below % 2 == 0) ? below : above);
}

size_t payload_bytes(const CodecSpec& spec, DType gradient, size_t count) {
  if (spec.id == CodecId::topk) return count == 0 ? 32 : TopkLayout(spec, count).bytes;
  size_t first = 0, second = 0;
  section_bytes(spec, gradient, count, &first, &second);
  return 32 + up(first, 16) + up(second, 16);
}

std::vector<float> widen(ConstVec gradient) {
  std::vector<float> g(gradient.count);
  for (size_t i = 0; i < g.size(); ++i) {
    g[i] = gradient.dtype == DType::f32 ? static_cast<const float*>(gradient.data)[i]
                                        : of_half(gradient.dtype, static_cast<const uint16_t*>(gradient.data)[i]);
  }
  return g;
}

std::vector<std::byte> encode(const CodecSpec& spec, ConstVec gradient, float* residual, bool flush, Seed seed,
                              EncodeStats* stats) {
  if (spec.id != CodecId::none)
    return encode_vector(spec, gradient.dtype, widen(gradient), residual, flush, seed, stats);
  uint64_t non_finite = 0;
  for (size_t i = 0; i < gradient.count; ++i) {
    switch (gradient.dtype) {
      case DType::f32:
        non_finite += !std::isfinite(static_cast<const float*>(gradient.data)[i]);
        break;
      case DType::f64:
        non_finite += !std::isfinite(static_cast<const double*>(gradient.data)[i]);
        break;
      case DType::bf16:
        non_finite += (static_cast<const uint16_t*>(gradient.data)[i] & 0x7f80) == 0x7f80;
        break;
      case DType::f16:
        non_finite += (static_cast<const uint16_t*>(gradient.data)[i] & 0x7c00) == 0x7c00;
        break;
      case DType::u8:
        break;
    }
  }
  if (stats != nullptr) stats->non_finite = non_finite;
  std::vector<std::byte> payload = with_header(spec, gradient.dtype, gradient.count, seed, non_finite != 0);
  if (gradient.count > 0) std::memcpy(payload.data() + 32, gradient.data, gradient.count * dtype_bytes(gradient.dtype));
  return payload;
}

std::vector<float> values(const CodecSpec& spec, DType gradient, size_t n, const std::byte* payload,
                          std::vector<bool>* sent) {
  std::vector<float> d(n, 0.0f);
  if (sent != nullptr)
    sent->assign(n, spec.id != CodecId::chunk_topk && spec.id != CodecId::topk && spec.id != CodecId::randk);
  size_t first = 0, second = 0;
  section_bytes(spec, gradient, n, &first, &second);
  const size_t second_at = 32 + up(first, 16);
  switch (spec.id) {
    case CodecId::none:
      for (size_t i = 0; i < n; ++i)
        d[i] = gradient == DType::f32 ? get<float>(payload, 32 + i * 4)
                                      : of_half(gradient, get<uint16_t>(payload, 32 + i * 2));
      break;
    case CodecId::bf16:
      for (size_t i = 0; i < n; ++i) d[i] = of_bf16(get<uint16_t>(payload, 32 + i * 2));
      break;
    case CodecId::int8:
    case CodecId::fp8:
    case CodecId::int4:
      decode_scaled(spec, n, payload, second_at, &d);
      break;
    case CodecId::onebit:
      decode_onebit(n, payload, second_at, &d);
      break;
    case CodecId::fp16:
      decode_fp16(n, payload, second_at, &d);
      break;
    case CodecId::topk:
      vector_topk_values(spec, n, payload, &d, sent);
      break;
    case CodecId::randk:
      randk_values(spec, n, payload, &d, sent);
      break;
    case CodecId::chunk_topk: {
      const std::vector<float> values = get_values(spec.value, entries(spec, n), payload, 32);
      size_t entry = 0;
      for (size_t begin = 0; begin < n; begin += spec.param1) {
        const size_t k = std::min<size_t>(spec.param0, std::min<size_t>(spec.param1, n - begin));
        for (size_t j = 0; j < k; ++j, ++entry) {
          const size_t i = begin + get<uint16_t>(payload, second_at + entry * 2);
          d[i] = values[entry];
          if (sent != nullptr) (*sent)[i] = true;
        }
      }
      break;
    }
  }
  return d;
}

void decode(const CodecSpec& spec, DType gradient, const std::byte* payload, Vec out, float scale, Into into) {
  if (spec.id == CodecId::none && scale == 1.0f && into == Into::store) {
    if (out.count > 0) std::memcpy(out.data, payload + 32, out.count * dtype_bytes(gradient));
    return;
  }
  std::vector<bool> sent;
  const std::vector<float> d = values(spec, gradient, out.count, payload, &sent);
  for (size_t i = 0; i < out.count; ++i) {
    const float v = d[i] * scale;
    if (into == Into::store) {
      write(out, i, sent[i] ? v : 0.0f);
    } else if (sent[i]) {
      write(out, i, read(out, i) + v);
    }
  }
}

void decode_sum(const CodecSpec& spec, DType gradient, std::span<const ConstBytes> payloads, Vec out, float scale) {
  std::vector<float> sum(out.count);
  for (size_t rank = 0; rank < payloads.size(); ++rank) {
    std::vector<bool> sent;
    const std::vector<float> term = values(spec, gradient, out.count, payloads[rank].data(), &sent);
    for (size_t i = 0; i < out.count; ++i) {
      if (rank == 0) {
        sum[i] = term[i];
      } else if (sent[i]) {
        sum[i] = sum[i] + term[i];
      }
    }
  }
  for (size_t i = 0; i < out.count; ++i) write(out, i, sum[i] * scale);
}

std::vector<std::byte> reduce_encode(const CodecSpec& spec, std::span<const ConstBytes> payloads, size_t self,
                                     ConstVec gradient, float* residual, Seed seed, EncodeStats* stats) {
  const size_t n = gradient.count;
  const std::vector<float> g = widen(gradient);
  std::vector<float> sum(n);
  for (size_t rank = 0; rank < payloads.size(); ++rank) {
    std::vector<bool> sent(n, true);
    const std::vector<float> term = rank == self ? g : values(spec, gradient.dtype, n, payloads[rank].data(), &sent);
    for (size_t i = 0; i < n; ++i) {
      if (rank == 0) {
        sum[i] = term[i];
      } else if (sent[i]) {
        sum[i] = sum[i] + term[i];
      }
    }
  }
  return encode_vector(spec, gradient.dtype, sum, residual, false, seed, stats);
}

void fold_residual(Vec gradient, float* residual) {
  const std::vector<float> g = widen(gradient);
  std::vector<bool> kept;
  const std::vector<float> x = form_x(g, residual, true, &kept);
  for (size_t i = 0; i < x.size(); ++i) {
    write(gradient, i, x[i]);
    const float d = read(gradient, i);
    if (std::isfinite(x[i]) && std::isfinite(d)) residual[i] = x[i] - d;
  }
}

}  // namespace gradgate::reference
