#include "kernels/cpu/floors.h"

#include <atomic>

#include "kernels/cpu/loops.h"

namespace gradgate::kernels::cpu {
namespace {

// Calls f(begin, end) for every part of 0 … count-1; parts start at multiples of 4096.
template <class F>
void for_each_part(const Executor& executor, size_t count, const F& f) noexcept {
  const size_t width = executor.width == 0 ? 1 : executor.width;
  struct Context {
    const F* f;
    size_t part, count;
  } context{&f, (count / width + 4095) / 4096 * 4096, count};
  if (count == 0) return;
  if (context.part == 0) context.part = count;
  executor((count + context.part - 1) / context.part,
           [](void* argument, size_t index) {
             const Context& c = *static_cast<const Context*>(argument);
             const size_t begin = index * c.part;
             (*c.f)(begin, c.count - begin < c.part ? c.count : begin + c.part);
           },
           &context);
}

}  // namespace

uint64_t read_sum(ConstBytes data, Executor executor) noexcept {
  std::atomic<uint64_t> sum{0};
  const Loops& loops = best_loops();
  for_each_part(executor, data.size(), [&](size_t begin, size_t end) {
    sum.fetch_add(loops.read_sum(data.data() + begin, end - begin), std::memory_order_relaxed);
  });
  return sum.load();
}

void copy(Bytes dst, ConstBytes src, Executor executor) noexcept {
  const Loops& loops = best_loops();
  const size_t bytes = dst.size() < src.size() ? dst.size() : src.size();
  for_each_part(executor, bytes, [&](size_t begin, size_t end) {
    loops.copy(dst.data() + begin, src.data() + begin, end - begin, bytes >= kStreamBytes);
  });
}

void axpy_inplace(float a, const float* x, float* y, size_t count, Executor executor) noexcept {
  const Loops& loops = best_loops();
  for_each_part(executor, count, [&](size_t begin, size_t end) { loops.axpy(a, x + begin, y + begin, end - begin); });
}

}  // namespace gradgate::kernels::cpu
