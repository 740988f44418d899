// What the host calls of CPU and GPU ask of the memory that they are given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gradgate/types.h"

namespace gradgate::kernels {

inline bool aligned(const void* p, size_t to) noexcept { return reinterpret_cast<uintptr_t>(p) % to == 0; }

inline bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) noexcept {
  const uintptr_t x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return a_bytes > 0 && b_bytes > 0 && x < y + b_bytes && y < x + a_bytes;
}

/// Whether `count` elements can be there: null only where there are none.
inline bool readable(const void* data, size_t count, DType dtype) noexcept {
  return (data != nullptr || count == 0) && aligned(data, dtype_bytes(dtype));
}

}  // namespace gradgate::kernels
