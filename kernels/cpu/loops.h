// The element loops of the codecs on a CPU, as a table of functions per instruction set. The same source (loops/*.h) is
// compiled once for each; all give the same bytes. What calls them (calls.cc) has checked the arguments and set the
// floating-point environment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gradgate/codec.h"

namespace gradgate::codecs {
struct Sample;
}

namespace gradgate::kernels::cpu {

/// Encoding a vector, or one tile of it at a time. Element i of the vector is element i - origin of `source` and of
/// `residual`.
struct EncodeJob {
  CodecSpec spec;
  const void* source = nullptr;
  float* residual = nullptr;  ///< null: no feedback
  size_t origin = 0;
  DType dtype = DType::f32;   ///< of source: f32, bf16 or f16; `none` any
  DType stored = DType::f32;  ///< `none`: dtype in the payload; differs from dtype only where a sum in f32 is rounded
  Seed seed;
  uint32_t greatest = 0;                   ///< of the whole vector, where the codec needs it (Loops::greatest)
  float* deferred = nullptr;               ///< int8 values: x of every entry, made codes by Loops::quantize
  const codecs::Sample* sample = nullptr;  ///< randk: which elements
  float* before = nullptr;                 ///< randk with feedback: receives e of each entry's element as it was
  uint32_t* marked = nullptr;  ///< randk: a bit per stratum that holds an x which is not finite; set atomically
  bool flush = false;
  bool stream = false;         ///< the payload is larger than the caches: write around them
  bool sum = false;            ///< source is a sum, not a gradient: `none` then makes NaN canonical
  std::byte* first = nullptr;  ///< sections of the whole payload
  std::byte* second = nullptr;
  std::byte* third = nullptr;
};

/// Where decoding of a topk payload has come to.
struct TopkCursor {
  size_t entry = 0, chunk_end = 0;  ///< the next entry, and the first of the next chunk
};

/// Decoding a vector, or one tile of it. Element i of the vector is element i - origin of `out`.
struct DecodeJob {
  CodecSpec spec;
  DType gradient = DType::f32;
  const std::byte* first = nullptr;
  const std::byte* second = nullptr;
  const std::byte* third = nullptr;
  TopkCursor* cursor = nullptr;  ///< topk: for tiles that are not whole chunks, in ascending order
  size_t count = 0;              ///< of the whole vector
  size_t entries = 0;            ///< of the whole payload, for codecs that send some elements
  uint32_t step = 0;             ///< of the payload's header
  void* out = nullptr;
  size_t origin = 0;
  DType dtype = DType::f32;  ///< of out
  float scale = 1.0f;
  bool add = false;
  bool stream = false;  ///< out is larger than the caches, and stored
};

struct FoldJob {
  void* gradient = nullptr;
  float* residual = nullptr;
  DType dtype = DType::f32;
};

/// What becomes of a sum over ranks.
struct SumJob {
  DType dtype = DType::f32;  ///< of out
  float scale = 1.0f;
  bool stream = false;  ///< out is larger than the caches
  bool last = true;     ///< nothing of this task follows: waits until what it streamed is visible to other threads
};

struct TopkLoops;

struct Loops {
  const char* name;
  const TopkLoops* topk;
  /// Elements begin … end-1, begin a multiple of the codec's unit, end too or the end of the vector. `scratch` has
  /// scratch_bytes(), 64-byte aligned. Returns how many x were not finite.
  uint64_t (*encode)(const EncodeJob& job, size_t begin, size_t end, std::byte* scratch) noexcept;
  /// int8 values: scales and codes of entries begin … end-1 (begin a multiple of 256) of a vector of `count` elements
  /// from job.deferred; with feedback e, which is x until now, becomes what is left.
  void (*quantize)(const EncodeJob& job, size_t count, size_t begin, size_t end) noexcept;
  /// The greatest magnitude, as bits, of the finite x of begin … end-1, begin a multiple of 256.
  uint32_t (*greatest)(const EncodeJob& job, size_t begin, size_t end) noexcept;
  void (*decode)(const DecodeJob& job, size_t begin, size_t end) noexcept;
  void (*fold)(const FoldJob& job, size_t begin, size_t end) noexcept;
  /// out[i] becomes sum[i] · scale in its dtype, i < count.
  void (*store_sum)(const float* sum, const SumJob& job, void* out, size_t count) noexcept;
  // What codec times are compared with (floors.h).
  uint64_t (*read_sum)(const std::byte* data, size_t bytes) noexcept;
  void (*copy)(std::byte* dst, const std::byte* src, size_t bytes, bool stream) noexcept;
  void (*axpy)(float a, const float* x, float* y, size_t count) noexcept;
};

/// Outputs of this size and more are written around the caches: kept there, they would only push everything else out.
inline constexpr size_t kStreamBytes = size_t{4} << 20;

/// Scratch of one encode call of a table.
size_t scratch_bytes(const CodecSpec& spec) noexcept;

/// The tables this machine can run, the portable one first, the fastest last.
std::span<const Loops* const> all_loops() noexcept;
inline const Loops& best_loops() noexcept { return *all_loops().back(); }

extern const Loops kPortableLoops;
#if defined(__x86_64__)
extern const Loops kAvx2Loops, kAvx512Loops;
#endif

}  // namespace gradgate::kernels::cpu
