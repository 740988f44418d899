// Byte comparison that tells where and what: the first different byte, its element, and both elements.
#pragma once

#include <gtest/gtest.h>

#include <cinttypes>
#include <cstdio>
#include <cstring>

namespace gradgate::test {

inline ::testing::AssertionResult bytes_equal(const void* expected, const void* got, size_t bytes,
                                              size_t element_bytes = 1) {
  const auto* a = static_cast<const unsigned char*>(expected);
  const auto* b = static_cast<const unsigned char*>(got);
  if (bytes == 0 || std::memcmp(a, b, bytes) == 0) return ::testing::AssertionSuccess();
  size_t at = 0;
  while (a[at] == b[at]) ++at;
  const size_t element = at / element_bytes, from = element * element_bytes;
  uint64_t x = 0, y = 0;
  const size_t width = element_bytes < 8 ? element_bytes : 8;
  std::memcpy(&x, a + from, from + width <= bytes ? width : bytes - from);
  std::memcpy(&y, b + from, from + width <= bytes ? width : bytes - from);
  char text[160];
  std::snprintf(text, sizeof text, "byte %zu of %zu (element %zu): expected 0x%" PRIx64 ", got 0x%" PRIx64, at, bytes,
                element, x, y);
  return ::testing::AssertionFailure() << text;
}

}  // namespace gradgate::test
