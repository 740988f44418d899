// An executor for tests: fresh threads on every call, tasks dealt out in turn.
#pragma once

#include <thread>
#include <vector>

#include "gradgate/types.h"

namespace gradgate::test {

/// width 1 runs inline.
inline Executor threads(unsigned width) {
  Executor executor;
  executor.width = width;
  if (width <= 1) return executor;
  executor.context = reinterpret_cast<void*>(static_cast<uintptr_t>(width));
  executor.run = [](void* context, size_t tasks, Executor::Task fn, void* argument) {
    const size_t n = reinterpret_cast<uintptr_t>(context);
    std::vector<std::thread> workers;
    for (size_t w = 0; w < n; ++w) {
      workers.emplace_back([=] {
        for (size_t i = w; i < tasks; i += n) fn(argument, i);
      });
    }
    for (std::thread& worker : workers) worker.join();
  };
  return executor;
}

}  // namespace gradgate::test
