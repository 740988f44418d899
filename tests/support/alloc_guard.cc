#include "tests/support/alloc_guard.h"

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace gradgate::test {
namespace {
std::atomic<uint64_t> count{0};
}
uint64_t allocations() noexcept { return count.load(std::memory_order_relaxed); }

static void* try_allocate(std::size_t bytes, std::size_t alignment) noexcept {
  count.fetch_add(1, std::memory_order_relaxed);
  return alignment <= alignof(std::max_align_t)
             ? std::malloc(bytes == 0 ? 1 : bytes)
             : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
static void* allocate(std::size_t bytes, std::size_t alignment) {
  void* p = try_allocate(bytes, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
}  // namespace gradgate::test

// All forms, so that what one of them hands out never meets another library's delete.

void* operator new(std::size_t bytes) { return gradgate::test::allocate(bytes, 1); }
void* operator new[](std::size_t bytes) { return gradgate::test::allocate(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return gradgate::test::allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return gradgate::test::allocate(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return gradgate::test::try_allocate(bytes, 1); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return gradgate::test::try_allocate(bytes, 1);
}
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
