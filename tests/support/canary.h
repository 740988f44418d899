// A buffer between two guard zones of a known pattern: what a call writes outside the bytes it was given is seen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace gradgate::test {

class Guarded {
 public:
  static constexpr uint8_t kPattern = 0xA5;
  static constexpr size_t kZone = 128;

  /// `bytes` bytes at an address that is `offset` past a multiple of 64, filled with `fill`.
  explicit Guarded(size_t bytes, size_t offset = 0, uint8_t fill = kPattern)
      : memory_(bytes + 2 * kZone + 128, kPattern), bytes_(bytes) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(memory_.data()) + kZone;
    start_ = (base + 63) / 64 * 64 + offset - reinterpret_cast<uintptr_t>(memory_.data());
    if (fill != kPattern) std::memset(memory_.data() + start_, fill, bytes);
  }
  template <class T>
  static Guarded copy_of(const std::vector<T>& v, size_t offset = 0) {
    Guarded g(v.size() * sizeof(T), offset);
    if (!v.empty()) std::memcpy(g.data(), v.data(), g.bytes_);
    return g;
  }

  std::byte* data() { return reinterpret_cast<std::byte*>(memory_.data() + start_); }
  const std::byte* data() const { return reinterpret_cast<const std::byte*>(memory_.data() + start_); }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  size_t size() const { return bytes_; }

  /// Nothing was written around the buffer.
  bool intact() const {
    for (size_t i = 0; i < memory_.size(); ++i) {
      if ((i < start_ || i >= start_ + bytes_) && memory_[i] != kPattern) return false;
    }
    return true;
  }
  /// Nothing was written at all: every byte still has the pattern.
  bool untouched() const {
    for (const uint8_t b : memory_) {
      if (b != kPattern) return false;
    }
    return true;
  }

 private:
  std::vector<uint8_t> memory_;
  size_t start_ = 0, bytes_;
};

}  // namespace gradgate::test
