// The floating-point environment of docs/format.md: IEEE rounding to nearest, subnormals not flushed, no traps.
// Trainers set FTZ/DAZ on their threads; every task of a codec call sets what it needs and puts back what it found.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace gradgate::kernels::cpu {

class IeeeScope {
 public:
#if defined(__SSE2__)
  IeeeScope() noexcept : found_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~IeeeScope() { _mm_setcsr(found_); }

 private:
  uint32_t found_;
#elif defined(__aarch64__)
  IeeeScope() noexcept {
    asm volatile("mrs %0, fpcr" : "=r"(found_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~IeeeScope() { asm volatile("msr fpcr, %0" : : "r"(found_)); }

 private:
  uint64_t found_;
#else
  IeeeScope() noexcept {}
  ~IeeeScope() {}

 private:
#endif
  IeeeScope(const IeeeScope&) = delete;
  IeeeScope& operator=(const IeeeScope&) = delete;
};

}  // namespace gradgate::kernels::cpu
