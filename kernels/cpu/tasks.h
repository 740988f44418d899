// Work on a vector cut into tasks for an executor.
#pragma once

#include "gradgate/codec.h"
#include "kernels/cpu/float_env.h"

namespace gradgate::kernels::cpu {

inline constexpr size_t kTaskElements = size_t{64} << 10;  // fewer are not worth a thread

constexpr size_t round_up(size_t n, size_t to) noexcept { return (n + to - 1) / to * to; }

/// How a vector is cut into tasks: by count and width alone, on multiples of the codec's unit.
struct Split {
  size_t tasks, elements;

  Split(size_t count, size_t unit, unsigned width) noexcept {
    const size_t most = count / kTaskElements, threads = width == 0 ? 1 : width;
    tasks = most < 1 ? 1 : most < threads ? most : threads;
    elements = round_up(count / tasks + (count % tasks != 0), unit);
    if (elements > 0) tasks = count / elements + (count % elements != 0);
  }
};

/// Calls f(begin, end, index) for each task, in the environment of the format.
template <class F>
void for_each_task(const Executor& executor, const Split& split, size_t count, const F& f) noexcept {
  struct Context {
    const F* f;
    size_t elements, count;
  } context{&f, split.elements, count};
  if (count == 0) return;
  executor(
      split.tasks,
      [](void* argument, size_t index) {
        const Context& c = *static_cast<const Context*>(argument);
        const size_t begin = index * c.elements;
        const IeeeScope ieee;
        (*c.f)(begin, c.count - begin < c.elements ? c.count : begin + c.elements, index);
      },
      &context);
}

}  // namespace gradgate::kernels::cpu
