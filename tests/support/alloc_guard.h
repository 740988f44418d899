// Counts operator new of the whole program; link alloc_guard.cc into the test.
#pragma once

#include <cstdint>

namespace gradgate::test {

/// Allocations so far, by any thread.
uint64_t allocations() noexcept;

}  // namespace gradgate::test
