// The loops of kernels/cpu/floors.h.
#pragma once

#include "kernels/cpu/loops/lanes.h"

namespace gradgate::kernels::cpu {
namespace {

uint64_t read_sum_bytes(const std::byte* data, size_t bytes) noexcept {
  uint32_t sum[64] = {};
  size_t at = 0;
  for (; bytes - at >= 1024; at += 1024) {
    prefetch_ahead(data + at, 1024);
    for (size_t k = 0; k < 1024; k += 256) {
      uint32_t block[64];
      __builtin_memcpy(block, data + at + k, 256);
      for (int i = 0; i < 64; ++i) sum[i] += block[i];
    }
  }
  for (; bytes - at >= 4; at += 4) {
    uint32_t word;
    __builtin_memcpy(&word, data + at, 4);
    sum[0] += word;
  }
  uint64_t total = 0;
  for (int i = 0; i < 64; ++i) total += sum[i];
  return total;
}

void copy_bytes(std::byte* dst, const std::byte* src, size_t bytes, bool stream) noexcept {
  if (stream) {
    stream_bytes(dst, src, bytes);
  } else {
    __builtin_memcpy(dst, src, bytes);
  }
}

void axpy_floats(float a, const float* x, float* y, size_t count) noexcept {
  size_t i = 0;
  for (; count - i >= 256; i += 256) {
    prefetch_ahead(x + i, 1024);
    prefetch_ahead(y + i, 1024);
    for (size_t k = i; k < i + 256; ++k) y[k] = exact::add(y[k], exact::mul(a, x[k]));
  }
  for (; i < count; ++i) y[i] = exact::add(y[i], exact::mul(a, x[i]));
}

}  // namespace
}  // namespace gradgate::kernels::cpu
