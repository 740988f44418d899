// Sizes and places of a hierarchical exchange: which shard of the vector a rank keeps of its node's sum, and the
// workspace.
#pragma once

#include "integration/comm/two_shot_layout.h"

namespace gradgate::comm {

/// The part of a node's sum that a rank carries between nodes. Rank r is rank r mod per_node of node r / per_node.
struct NodeShard {
  int node = 0, nodes = 1, local = 0, per_node = 1;
  size_t total = 0;             ///< elements of the vector
  size_t elements = 0;          ///< of every shard, the last ones padded; 0 where they overflow
  size_t first = 0, count = 0;  ///< of this rank's
  ExchangeShape shape;

  explicit NodeShard(const ExchangeShape& whole) noexcept : total(whole.count), shape(whole) {
    per_node = whole.ranks_per_node;
    node = whole.rank / per_node, nodes = whole.ranks / per_node, local = whole.rank % per_node;
    const auto parts = static_cast<size_t>(per_node);
    const size_t unit = shard_alignment(whole.candidate.codec), each = total / parts + (total % parts != 0);
    size_t all = 0;
    if (__builtin_mul_overflow(each / unit + (each % unit != 0), unit, &elements) ||
        __builtin_mul_overflow(elements, parts * sizeof(float), &all))
      elements = 0;
    first = first_of(local);
    count = count_of(local);
  }
  size_t first_of(int l) const noexcept { return std::min(total, static_cast<size_t>(l) * elements); }
  size_t count_of(int l) const noexcept { return std::min(total - first_of(l), elements); }
  size_t padded() const noexcept { return elements * static_cast<size_t>(per_node); }

  /// The exchange of this shard between nodes.
  ExchangeShape between() const noexcept {
    ExchangeShape inner = shape;
    inner.candidate = {shape.candidate.codec, shape.candidate.between};
    inner.count = count;
    inner.dtype = DType::f32;
    inner.rank = node;
    inner.ranks = nodes;
    inner.ranks_per_node = 0;
    return inner;
  }
};

struct HierarchicalBuffers {
  static constexpr size_t kWord = 16;  ///< in front of a block: status code and step

  float* whole = nullptr;        ///< the gradient in f32, padded to per_node shards
  float* shard = nullptr;        ///< this rank's shard of the node's sum; then of the average
  std::byte* machine = nullptr;  ///< the ExchangeMachine between nodes; on a device it stands in DevicePlace
  std::byte* between = nullptr;  ///< its workspace
  std::byte* blocks = nullptr;   ///< per_node × block_bytes: the gathered averages in the gradient's dtype
  size_t block_bytes = 0, bytes = 0;

  HierarchicalBuffers(const ExchangeShape& shape, std::byte* base) noexcept {
    const NodeShard part(shape);
    // The first shard is the longest: its exchange needs the most.
    ExchangeShape first = part.between();
    first.count = part.count_of(0);
    block_bytes = (kWord + part.elements * dtype_bytes(shape.dtype) + 15) / 16 * 16;
    WorkspaceCarver carver(base);
    whole = reinterpret_cast<float*>(carver.take(part.padded(), sizeof(float)));
    shard = reinterpret_cast<float*>(carver.take(part.elements, sizeof(float)));
    machine = carver.take(shape.device ? 0 : 1, sizeof(ExchangeMachine));
    between = carver.take(exchange_workspace_bytes(first), 1);
    blocks = carver.take(static_cast<size_t>(part.per_node), block_bytes);
    bytes = part.elements == 0 && shape.count != 0 ? 0 : carver.bytes();
  }
  Bytes block(int local) const noexcept { return {blocks + static_cast<size_t>(local) * block_bytes, block_bytes}; }
};

/// f32, bf16 or f16 to f32, in the exchange's memory.
Status widen_vector(const ExchangeArgs& args, ConstVec from, float* to) noexcept;

/// What a node's rank says in front of its block: ok, or why it has no average.
struct BlockWord {
  StatusCode code = StatusCode::ok;
  bool untold = false;  ///< other nodes do not know of the failure
  uint32_t step = 0;
};
/// What the word of `peer`, a rank of this node, means for the exchange; `text` says it where that is not ok.
Status judge_block(const ExchangeArgs& args, int peer, const BlockWord& word, Message* text) noexcept;

namespace on_device {
Status widen_vector(const ExchangeArgs& args, ConstVec from, float* to) noexcept;
/// This rank's block: its word, by `code` and the record, and its shard of the average in the gradient's dtype.
Status close_block(const ExchangeArgs& args, const HierarchicalBuffers& buffers, StatusCode code) noexcept;
/// The look at all words of the node, and the average in the gradient.
Status open_blocks(const ExchangeArgs& args, const HierarchicalBuffers& buffers) noexcept;
}  // namespace on_device

}  // namespace gradgate::comm
