#include "integration/comm/rank_sum.h"

#include <algorithm>

#include "integration/comm/half.h"

namespace gradgate::comm {
namespace {

/// Elements summed at a time: the accumulators and the tile of one source stay in the first-level cache.
constexpr size_t kTile = 1024;

struct AsF32 {
  using Stored = float;
  using Sum = float;
  static float widen(float x) noexcept { return x; }
  static float narrow(float x) noexcept { return x; }
};
struct AsF64 {
  using Stored = double;
  using Sum = double;
  static double widen(double x) noexcept { return x; }
  static double narrow(double x) noexcept { return x; }
};
struct AsBf16 {
  using Stored = uint16_t;
  using Sum = float;
  static float widen(uint16_t x) noexcept { return bf16_to_float(x); }
  static uint16_t narrow(float x) noexcept { return float_to_bf16(x); }
};
struct AsF16 {
  using Stored = uint16_t;
  using Sum = float;
  static float widen(uint16_t x) noexcept { return f16_to_float(x); }
  static uint16_t narrow(float x) noexcept { return float_to_f16(x); }
};

template <class Type>
void sum_as(std::span<const void* const> sources, size_t source_offset, std::span<void* const> dests,
            size_t dest_offset, size_t count) noexcept {
  using Stored = typename Type::Stored;
  typename Type::Sum sum[kTile];
  Stored narrow[kTile];
  for (size_t first = 0; first < count; first += kTile) {
    const size_t n = std::min(kTile, count - first);
    const auto source = [&](size_t r) { return static_cast<const Stored*>(sources[r]) + source_offset + first; };
    // The first rank is loaded, not added to zero: -0 stays -0 where all ranks have it.
    const Stored* from = source(0);
    for (size_t i = 0; i < n; ++i) sum[i] = Type::widen(from[i]);
    for (size_t r = 1; r < sources.size(); ++r) {
      from = source(r);
      for (size_t i = 0; i < n; ++i) sum[i] += Type::widen(from[i]);
    }
    for (size_t i = 0; i < n; ++i) narrow[i] = Type::narrow(sum[i]);
    for (void* dest : dests) std::copy_n(narrow, n, static_cast<Stored*>(dest) + dest_offset + first);
  }
}

}  // namespace

void sum_over_ranks(std::span<const void* const> sources, size_t source_offset, std::span<void* const> dests,
                    size_t dest_offset, size_t count, DType dtype) noexcept {
  if (count == 0) return;
  switch (dtype) {
    case DType::f32:
      return sum_as<AsF32>(sources, source_offset, dests, dest_offset, count);
    case DType::f64:
      return sum_as<AsF64>(sources, source_offset, dests, dest_offset, count);
    case DType::bf16:
      return sum_as<AsBf16>(sources, source_offset, dests, dest_offset, count);
    case DType::f16:
      return sum_as<AsF16>(sources, source_offset, dests, dest_offset, count);
    case DType::u8:
      return;
  }
}

}  // namespace gradgate::comm
