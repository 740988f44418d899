// topk: choosing over a whole vector. One pass collects candidates, elements that reach a threshold which is a little
// too low; the exact choice is then made among them. A task has a contiguous part of the vector, made of whole chunks,
// and a buffer that can hold more than all entries: where it fills up, it keeps the best it has, and its threshold
// rises. So every vector is chosen from exactly, however bad the threshold was.
#pragma once

#include "codecs/exact_math.h"
#include "kernels/cpu/loops.h"

namespace gradgate::kernels::cpu {

inline constexpr size_t kTopkChunk = 65536;         // of the format
inline constexpr size_t kTopkBlock = 1024;          // elements looked at together
inline constexpr int32_t kTopkKeyEnd = 0x7f800002;  // above the key of NaN
inline constexpr size_t kTopkBeyond = 64;           // candidates written before it is known that they are none

/// Candidates in order, as bits of x and place in their chunk. There is room for kTopkBeyond more than the capacity.
struct TopkBuffer {
  uint32_t* value = nullptr;
  uint16_t* index = nullptr;
};

struct TopkTask {
  size_t begin = 0, end = 0;  ///< elements; begin is a multiple of the chunk
  int32_t threshold = 0;      ///< key that a candidate reaches
  TopkBuffer found, before;   ///< before: what the first collection found, where there is a second
  size_t count = 0, count_before = 0;
  uint64_t non_finite = 0;
  unsigned fills = 0;  ///< how often the buffer filled up
  float* x = nullptr;  ///< of one block
  // Of the final choice.
  size_t first_entry = 0, ties = 0;  ///< entries of the tasks before; how many of those equal to the last key are taken
};

struct TopkJob {
  EncodeJob encode;
  size_t count = 0, entries = 0;   ///< of the vector
  size_t capacity = 0;             ///< of a task's buffer
  uint32_t* candidates = nullptr;  ///< per chunk
  bool again = false;              ///< a second collection: e already holds x where x is finite
  int32_t last_key = 0;            ///< key of the last entry in the order of choice
};

/// The steps of the choice, in every instruction set. Values are bits of x; their keys are those of the format.
struct TopkLoops {
  /// `line` elements from every multiple of `step`. Returns how many were written.
  size_t (*sample)(const TopkJob& job, size_t step, size_t line, uint32_t* values) noexcept;
  /// How many of n values have keys >= t.
  size_t (*count)(const uint32_t* values, size_t n, int32_t t) noexcept;
  /// Those with keys >= low and < high. Returns how many.
  size_t (*gather)(const uint32_t* values, size_t n, int32_t low, int32_t high, uint32_t* out) noexcept;
  /// Candidates of the task's part into its buffer; with feedback e becomes x, and what is left of it where a candidate
  /// is sent.
  void (*collect)(const TopkJob& job, TopkTask* task) noexcept;
  /// Writes the counts of entries per chunk; `ties` of those equal to job.last_key are taken, in order. Returns the
  /// entries of the task; *ties is what it left.
  size_t (*choose)(const TopkJob& job, const TopkTask& task, size_t* ties) noexcept;
  /// Writes the task's entries, and gives those that are not sent their residual back.
  void (*pack)(const TopkJob& job, const TopkTask& task) noexcept;
};

/// The topk codec's part of encode(): sections are bound and arguments checked. Returns how many x were not finite.
uint64_t encode_topk(const Loops& loops, const EncodeJob& job, size_t count, const Executor& executor,
                     std::byte* workspace, uint32_t* threshold) noexcept;
/// Where the entries of elements from `begin` (a multiple of the chunk) on start in a payload with these counts.
GRADGATE_HD TopkCursor topk_cursor(const std::byte* counts, size_t begin) noexcept {
  TopkCursor cursor;
  for (size_t c = 0; c < begin / kTopkChunk; ++c) cursor.entry += reinterpret_cast<const uint32_t*>(counts)[c];
  return cursor;
}
/// Bytes of its workspace, from an address that is a multiple of 64.
size_t topk_workspace_bytes(const CodecSpec& spec, size_t count, unsigned width) noexcept;

}  // namespace gradgate::kernels::cpu
