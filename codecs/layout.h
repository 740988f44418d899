// Where the sections of a payload lie. Each codec has one layout function; run over a Carver without memory it counts
// bytes, run over one with memory it yields pointers, so that sizes and addresses cannot disagree.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "gradgate/types.h"

namespace gradgate::codecs {

static_assert(std::endian::native == std::endian::little, "payloads are little-endian and read in place");

inline constexpr size_t kSectionAlign = 16;

/// Hands out consecutive sections, each a multiple of 16 bytes long. Byte is std::byte or const std::byte.
template <class Byte>
class Carver {
 public:
  explicit Carver(Byte* base = nullptr) noexcept : base_(base) {}

  Byte* take(size_t count, size_t element_bytes) noexcept {
    size_t bytes = 0, end = 0;
    if (__builtin_mul_overflow(count, element_bytes, &bytes) ||
        __builtin_add_overflow(bytes, kSectionAlign - 1, &bytes) ||
        __builtin_add_overflow(offset_, bytes & ~(kSectionAlign - 1), &end) || end > PTRDIFF_MAX) {
      overflow_ = true;
      return nullptr;
    }
    Byte* section = base_ == nullptr ? nullptr : base_ + offset_;
    offset_ = end;
    return section;
  }
  /// Bytes taken so far; 0 where they do not fit the address space.
  size_t bytes() const noexcept { return overflow_ ? 0 : offset_; }

 private:
  Byte* base_;
  size_t offset_ = 0;
  bool overflow_ = false;
};

/// A payload taken apart; a section that a codec does not have is null and empty.
template <class Byte>
struct Sections {
  Byte* header = nullptr;
  Byte* first = nullptr;
  Byte* second = nullptr;
  Byte* third = nullptr;
  size_t first_bytes = 0, second_bytes = 0, third_bytes = 0;  ///< without padding
};

/// The values of a payload that the all_reduce exchange sums: the last section.
struct Addends {
  size_t offset = 0;  ///< bytes from the start of the payload
  size_t count = 0;
  DType dtype = DType::f32;
};

}  // namespace gradgate::codecs
