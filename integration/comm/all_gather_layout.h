// The workspace of an all_gather exchange.
#pragma once

#include <algorithm>

#include "integration/comm/two_shot_layout.h"

namespace gradgate::comm {

/// A slot per rank, in rank order; the own one is encoded in place and sent from there.
struct AllGatherBuffers {
  std::byte* slots = nullptr;  ///< ranks × slot_bytes
  std::byte* views = nullptr;  ///< ranks × ConstBytes, for decode_sum()
  Bytes codec;                 ///< workspace of the codec, first for encoding, then for the sum
  size_t slot_bytes = 0, bytes = 0;

  AllGatherBuffers(const ExchangeShape& shape, std::byte* base) noexcept {
    const auto ranks = static_cast<size_t>(shape.ranks);
    const CodecSpec& spec = shape.candidate.codec;
    slot_bytes = payload_bytes(spec, shape.dtype, shape.count);
    const size_t codec_bytes =
        std::max(codec_work_bytes(shape, shape.count), decode_sum_work_bytes(shape, shape.count));
    WorkspaceCarver carver(base);
    slots = carver.take(ranks, slot_bytes);
    views = carver.take(ranks, sizeof(ConstBytes));
    codec = {carver.take(codec_bytes, 1), codec_bytes};
    bytes = carver.bytes();
  }
  Bytes slot(int rank) const noexcept { return {slots + static_cast<size_t>(rank) * slot_bytes, slot_bytes}; }
};

}  // namespace gradgate::comm
