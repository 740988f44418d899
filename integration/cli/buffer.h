// Page-aligned memory on huge pages where the system gives them: without, a benchmark of large vectors measures the TLB.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <span>
#include <utility>

namespace gradgate::cli {

class Buffer {
 public:
  Buffer() = default;
  /// Zeroed; throws std::bad_alloc.
  explicit Buffer(size_t bytes) : bytes_(bytes), mapped_((std::max<size_t>(bytes, 1) + kHugePage - 1) / kHugePage * kHugePage) {
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    madvise(memory, mapped_, MADV_HUGEPAGE);
    data_ = static_cast<std::byte*>(memory);
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) munmap(data_, mapped_);
  }

  std::byte* data() const { return data_; }
  size_t size() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  std::span<std::byte> bytes() const { return {data_, bytes_}; }
  /// Touches every page, so that the first timed call does not.
  void touch() const {
    for (size_t i = 0; i < bytes_; i += 4096) data_[i] = std::byte{0};
  }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
  }
  std::byte* data_ = nullptr;
  size_t bytes_ = 0, mapped_ = 0;
};

}  // namespace gradgate::cli
