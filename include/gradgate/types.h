// Vocabulary shared by codecs, gate and exchanges: element types, vectors, seeds, error texts, host executors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gradgate/export.h"
#include "gradgate/status.h"

namespace gradgate {

/// Element types of gradients and of collective buffers. Codecs take f32, bf16 and f16 gradients; f64 gradients are
/// reduced dense; u8 carries payloads. The values are written into payload headers.
enum class DType : uint8_t { f32 = 0, bf16 = 1, f16 = 2, f64 = 3, u8 = 4 };

/// Bytes of one element.
constexpr size_t dtype_bytes(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return 4;
    case DType::bf16:
      return 2;
    case DType::f16:
      return 2;
    case DType::f64:
      return 8;
    case DType::u8:
      return 1;
  }
  return 0;
}
/// Whether every value is an f32 too: what codecs encode, and what residuals exist for.
constexpr bool widens_to_f32(DType dtype) noexcept {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}
/// "f32", "bf16", …; "?" for a value outside the enumeration.
GRADGATE_API const char* dtype_name(DType dtype) noexcept;

/// A flat vector of `count` elements in the caller's memory. `data` may be null only when count is 0.
struct Vec {
  void* data = nullptr;
  size_t count = 0;
  DType dtype = DType::f32;
};
struct ConstVec {
  const void* data = nullptr;
  size_t count = 0;
  DType dtype = DType::f32;

  constexpr ConstVec() noexcept = default;
  constexpr ConstVec(const void* d, size_t n, DType t) noexcept : data(d), count(n), dtype(t) {}
  constexpr ConstVec(const Vec& v) noexcept : data(v.data), count(v.count), dtype(v.dtype) {}  // a Vec reads as one
};

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;

/// Names one stream of counter-based random numbers (docs/format.md). `stream` is the rank in stage 1 of an exchange,
/// ranks + owner in stage 2, and ~0 where all ranks must draw the same numbers.
struct Seed {
  uint64_t key = 0;
  uint32_t tensor = 0, step = 0, stream = 0;
  uint64_t first = 0;  ///< place of the vector's first element in its tensor, a multiple of 256: numbers are counted
                       ///< from it
};

/// How a codec's payload travels.
enum class Exchange : uint8_t {
  all_reduce = 0,   ///< the backend sums in the gradient's (or the payload's) dtype
  two_shot = 1,     ///< all-to-all of encoded shards, sum at the owner, all-gather of the re-encoded sums
  all_gather = 2,   ///< every rank receives every payload
  hierarchical = 3  ///< dense inside the node, one of the above between nodes
};
GRADGATE_API const char* exchange_name(Exchange exchange) noexcept;

/// A bounded error text that allocates nothing; always terminated, cut when too long.
struct Message {
  char text[320] = {};
  /// printf into the text, replacing what was there.
  GRADGATE_API void format(const char* format, ...) noexcept __attribute__((format(printf, 2, 3)));
};

/// Runs `tasks` independent calls fn(argument, 0 … tasks−1), possibly in parallel, and returns when all are done. The
/// default-constructed executor runs them inline. The number of threads never changes a result.
struct Executor {
  using Task = void (*)(void* argument, size_t index);
  void* context = nullptr;
  void (*run)(void* context, size_t tasks, Task fn, void* argument) = nullptr;
  /// How many tasks may run at once; a hint for splitting work.
  unsigned width = 1;

  void operator()(size_t tasks, Task fn, void* argument) const {
    if (run != nullptr && tasks > 1) {
      run(context, tasks, fn, argument);
    } else {
      for (size_t i = 0; i < tasks; ++i) fn(argument, i);
    }
  }
};

}  // namespace gradgate
