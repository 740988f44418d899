// The hierarchical exchange: the ranks of a node add their gradients and each keeps a shard of the sum (reduce-scatter,
// dense, in f32), the shards travel between nodes by another exchange, and the averages are gathered in the node. Every
// rank takes part in every collective; what failed is said with the last one.
#include <cstring>
#include <new>
#include <type_traits>

#include "gradgate/exchange.h"
#include "integration/comm/half.h"
#include "integration/comm/hierarchical_layout.h"
#include "kernels/cpu/float_env.h"

namespace gradgate {
namespace {

using comm::HierarchicalBuffers;
using comm::NodeShard;

// In the word of a block: other nodes do not know of the failure.
constexpr uint32_t kUntold = 0x100;

static_assert(std::is_trivially_destructible_v<ExchangeMachine>, "the machine between nodes lives in the workspace");

void narrow(const float* from, size_t count, DType dtype, std::byte* to) noexcept {
  auto* half = reinterpret_cast<uint16_t*>(to);
  switch (dtype) {
    case DType::bf16:
      for (size_t i = 0; i < count; ++i) half[i] = comm::float_to_bf16(from[i]);
      return;
    case DType::f16:
      for (size_t i = 0; i < count; ++i) half[i] = comm::float_to_f16(from[i]);
      return;
    default:
      if (count > 0) std::memcpy(to, from, count * sizeof(float));
  }
}

}  // namespace

void comm::widen_vector(ConstVec from, float* to) noexcept {
  const auto* half = static_cast<const uint16_t*>(from.data);
  switch (from.dtype) {
    case DType::bf16:
      for (size_t i = 0; i < from.count; ++i) to[i] = comm::bf16_to_float(half[i]);
      return;
    case DType::f16:
      for (size_t i = 0; i < from.count; ++i) to[i] = comm::f16_to_float(half[i]);
      return;
    default:
      if (from.count > 0) std::memcpy(to, from.data, from.count * sizeof(float));
  }
}

void ExchangeMachine::begin_hierarchical() noexcept {
  const kernels::cpu::IeeeScope ieee;
  const HierarchicalBuffers buffers(args_.shape, args_.workspace.data());
  const NodeShard shard(args_.shape);
  comm::widen_vector(args_.gradient, buffers.whole);
  std::memset(buffers.whole + args_.shape.count, 0, (shard.padded() - args_.shape.count) * sizeof(float));
}

// The exchange of this rank's shard with the same shard of other nodes.
void ExchangeMachine::begin_between_nodes() noexcept {
  const HierarchicalBuffers buffers(args_.shape, args_.workspace.data());
  const NodeShard shard(args_.shape);
  auto* between = new (buffers.machine) ExchangeMachine;
  ExchangeArgs args = args_;
  args.shape = shard.between();
  args.seed.first = shard.count == 0 ? 0 : shard.first;  // shards do not share random numbers
  args.gradient = {buffers.shard, shard.count, DType::f32};
  if (args_.feedback != Feedback::none) args.residual = args_.residual + shard.first;
  args.workspace = {buffers.between, exchange_workspace_bytes(args.shape)};
  const Status status = between->start(args, args_.shape.ranks);
  if (!status.ok()) blame(status, between->last_error());
  if (!failed_.ok()) between->fail(failed_.code());
}

Status ExchangeMachine::next_hierarchical(CollectiveCall* call) noexcept {
  const ExchangeShape& shape = args_.shape;
  const HierarchicalBuffers buffers(shape, args_.workspace.data());
  const NodeShard shard(shape);
  const auto block = [&](int local) { return buffers.blocks + static_cast<size_t>(local) * buffers.block_bytes; };
  if (phase_ == Phase::ready) {
    phase_ = Phase::stage1;
    *call = {Collective::reduce_scatter, buffers.whole, buffers.shard, shard.elements, DType::f32, Tier::node};
    return {};
  }
  if (phase_ == Phase::stage1 || phase_ == Phase::stage2) {
    auto* between = reinterpret_cast<ExchangeMachine*>(buffers.machine);
    if (phase_ == Phase::stage1) begin_between_nodes();
    phase_ = Phase::stage2;
    const Status status = between->next(call);
    call->tier = Tier::between;
    if (status.ok() && call->kind != Collective::none) return {};
    non_finite_ += between->non_finite();
    if (!status.ok() && failed_.ok()) {
      blame(status, between->last_error());
      told_ = between->told();  // of this shard's ranks, one in every node
    }
    phase_ = Phase::stage3;
    std::byte* own = block(shard.local);
    const kernels::cpu::IeeeScope ieee;
    std::memset(own, 0, buffers.block_bytes);
    const uint32_t untold = !failed_.ok() && !told_ ? kUntold : 0;
    const uint32_t word[2] = {static_cast<uint32_t>(failed_.code()) | untold, args_.seed.step};
    std::memcpy(own, word, sizeof word);
    narrow(buffers.shard, shard.count, shape.dtype, own + HierarchicalBuffers::kWord);
    *call = {Collective::all_gather, own, buffers.blocks, buffers.block_bytes, DType::u8, Tier::node};
    return {};
  }
  phase_ = Phase::done;
  for (int local = 0; local < shard.per_node && failed_.ok(); ++local) {
    uint32_t word[2];
    std::memcpy(word, block(local), sizeof word);
    const int peer = shard.node * shard.per_node + local;
    Message text;
    if (word[0] != 0) {
      const Status theirs = static_cast<StatusCode>(word[0] & ~kUntold);
      text.format("%s over hierarchical: rank %d failed: %s", format_codec(shape.candidate.codec).text, peer,
                  theirs.message());
      // What differs between ranks differs for this one too.
      blame(theirs.code() == StatusCode::peer_mismatch ? StatusCode::peer_mismatch : StatusCode::peer_failed,
            text.text);
      told_ = (word[0] & kUntold) == 0;
    } else if (word[1] != args_.seed.step) {
      text.format("%s over hierarchical: step: rank %d is at step %u, rank %d at step %u",
                  format_codec(shape.candidate.codec).text, peer, word[1], shape.rank, args_.seed.step);
      blame(StatusCode::peer_mismatch, text.text);
    }
  }
  if (!failed_.ok()) return failed_;
  const size_t element = dtype_bytes(shape.dtype);
  for (int local = 0; local < shard.per_node; ++local) {
    const size_t first = shard.first_of(local), count = shard.count_of(local);
    if (count == 0) continue;
    std::memcpy(static_cast<std::byte*>(args_.gradient.data) + first * element,
                block(local) + HierarchicalBuffers::kWord, count * element);
  }
  return failed_;
}

}  // namespace gradgate
