// Sizes and places of a two_shot exchange (docs/format.md §4): shards of the vector, slots of the collectives, and the
// workspace that holds them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gradgate/exchange.h"
#include "integration/comm/slot.h"

namespace gradgate::comm {

/// One rank's part of the vector, in elements.
struct Shard {
  size_t first = 0, count = 0;
};

/// Cuts a vector into shards. slot_bytes is the size of every rank's slot, 0 where the codec does not take the dtype or
/// a size overflows.
struct Shards {
  size_t count = 0, elements = 0, slot_bytes = 0;

  explicit Shards(const ExchangeShape& shape) noexcept : count(shape.count) {
    const auto ranks = static_cast<size_t>(shape.ranks);
    const size_t unit = shard_alignment(shape.candidate.codec);
    const size_t per_rank = count / ranks + (count % ranks != 0);
    const size_t units = per_rank / unit + (per_rank % unit != 0);
    size_t all = 0;
    if (__builtin_mul_overflow(units, unit, &elements) || __builtin_mul_overflow(elements, ranks, &all)) return;
    slot_bytes = payload_bytes(shape.candidate.codec, shape.dtype, elements);
    if (__builtin_mul_overflow(slot_bytes, ranks, &all)) slot_bytes = 0;
  }
  Shard operator[](int rank) const noexcept {
    const size_t first = std::min(count, static_cast<size_t>(rank) * elements);
    return {first, std::min(count - first, elements)};
  }
};

/// Hands out consecutive aligned pieces of a workspace; without one it only counts.
class WorkspaceCarver {
 public:
  static constexpr size_t kAlign = 64;

  /// `base` of any alignment, or null.
  explicit WorkspaceCarver(std::byte* base) noexcept {
    if (base != nullptr) base_ = base + (kAlign - reinterpret_cast<uintptr_t>(base) % kAlign) % kAlign;
  }
  std::byte* take(size_t count, size_t element_bytes) noexcept {
    size_t bytes = 0, end = 0;
    if (__builtin_mul_overflow(count, element_bytes, &bytes) || __builtin_add_overflow(bytes, kAlign - 1, &bytes) ||
        __builtin_add_overflow(offset_, bytes / kAlign * kAlign, &end)) {
      overflow_ = true;
      return nullptr;
    }
    std::byte* piece = base_ == nullptr ? nullptr : base_ + offset_;
    offset_ = end;
    return piece;
  }
  /// Bytes for what was taken at any alignment of the base; 0 where they do not fit.
  size_t bytes() const noexcept {
    size_t all = 0;
    return overflow_ || __builtin_add_overflow(offset_, kAlign - 1, &all) ? 0 : all;
  }

 private:
  std::byte* base_ = nullptr;
  size_t offset_ = 0;
  bool overflow_ = false;
};

/// The workspace of an exchange. `outgoing` holds the slots of the all-to-all, then receives those of the all-gather,
/// whose own slot is the sum.
struct TwoShotBuffers {
  std::byte* outgoing = nullptr;  ///< ranks × slot_bytes
  std::byte* incoming = nullptr;  ///< ranks × slot_bytes
  std::byte* views = nullptr;     ///< ranks × ConstBytes, for reduce_encode()
  Bytes codec;                    ///< workspace of the codec
  size_t bytes = 0;

  TwoShotBuffers(const ExchangeShape& shape, const Shards& shards, std::byte* base) noexcept {
    const auto ranks = static_cast<size_t>(shape.ranks);
    const size_t codec_bytes = codec_work_bytes(shape, shards.elements);
    WorkspaceCarver carver(base);
    outgoing = carver.take(ranks, shards.slot_bytes);
    incoming = carver.take(ranks, shards.slot_bytes);
    views = carver.take(ranks, sizeof(ConstBytes));
    codec = {carver.take(codec_bytes, 1), codec_bytes};
    bytes = carver.bytes();
  }
};

}  // namespace gradgate::comm
