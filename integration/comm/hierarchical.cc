// The hierarchical exchange: the ranks of a node add their gradients and each keeps a shard of the sum (reduce-scatter,
// dense, in f32), the shards travel between nodes by another exchange, and the averages are gathered in the node. Every
// rank takes part in every collective; what failed is said with the last one.
#include <cstring>
#include <new>
#include <type_traits>

#include "gradgate/device_exchange.h"
#include "integration/comm/half.h"
#include "integration/comm/hierarchical_layout.h"
#include "kernels/cpu/float_env.h"

namespace gradgate {
namespace {

using comm::HierarchicalBuffers;
using comm::NodeShard;

// In the word of a block: other nodes do not know of the failure.
constexpr uint32_t kUntold = 0x100;

static_assert(std::is_trivially_destructible_v<ExchangeMachine>, "the machine between nodes is never destroyed");

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

namespace comm {

Status widen_vector(const ExchangeArgs& args, ConstVec from, float* to) noexcept {
  if (args.device != nullptr) return on_device::widen_vector(args, from, to);
  const auto* half = static_cast<const uint16_t*>(from.data);
  switch (from.dtype) {
    case DType::bf16:
      for (size_t i = 0; i < from.count; ++i) to[i] = bf16_to_float(half[i]);
      break;
    case DType::f16:
      for (size_t i = 0; i < from.count; ++i) to[i] = f16_to_float(half[i]);
      break;
    default:
      if (from.count > 0) std::memcpy(to, from.data, from.count * sizeof(float));
  }
  return {};
}

Status judge_block(const ExchangeArgs& args, int peer, const BlockWord& word, Message* text) noexcept {
  const Message codec = format_codec(args.shape.candidate.codec);
  if (word.code != StatusCode::ok) {
    text->format("%s over hierarchical: rank %d failed: %s", codec.text, peer, Status(word.code).message());
    // What differs between ranks differs for this one too.
    return word.code == StatusCode::peer_mismatch ? StatusCode::peer_mismatch : StatusCode::peer_failed;
  }
  if (word.step == args.seed.step) return {};
  text->format("%s over hierarchical: step: rank %d is at step %u, rank %d at step %u", codec.text, peer, word.step,
               args.shape.rank, args.seed.step);
  return StatusCode::peer_mismatch;
}

}  // namespace comm

void ExchangeMachine::begin_hierarchical() noexcept {
  const kernels::cpu::IeeeScope ieee;
  const HierarchicalBuffers buffers(args_.shape, args_.workspace.data());
  const NodeShard shard(args_.shape);
  Status status = comm::widen_vector(args_, args_.gradient, buffers.whole);
  const size_t count = args_.shape.count;
  auto* padding = reinterpret_cast<std::byte*>(buffers.whole + count);
  if (status.ok()) status = comm::zero(args_, {padding, (shard.padded() - count) * sizeof(float)});
  if (!status.ok()) blame(status, "hierarchical: the gradient could not be widened");
}

ExchangeMachine* ExchangeMachine::between_nodes() const noexcept {
  if (args_.device != nullptr) return args_.device->between;
  return reinterpret_cast<ExchangeMachine*>(HierarchicalBuffers(args_.shape, args_.workspace.data()).machine);
}

// The exchange of this rank's shard with the same shard of other nodes.
void ExchangeMachine::begin_between_nodes() noexcept {
  const HierarchicalBuffers buffers(args_.shape, args_.workspace.data());
  const NodeShard shard(args_.shape);
  auto* between = new (between_nodes()) ExchangeMachine;
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
  if (phase_ == Phase::ready) {
    phase_ = Phase::stage1;
    *call = {Collective::reduce_scatter, buffers.whole, buffers.shard, shard.elements, DType::f32, Tier::node};
    return {};
  }
  if (phase_ == Phase::stage1 || phase_ == Phase::stage2) {
    ExchangeMachine* between = between_nodes();
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
    close_block();
    *call = {Collective::all_gather,
             buffers.block(shard.local).data(),
             buffers.blocks,
             buffers.block_bytes,
             DType::u8,
             Tier::node};
    return {};
  }
  phase_ = Phase::done;
  open_blocks();
  return failed_;
}

void ExchangeMachine::close_block() noexcept {
  const HierarchicalBuffers buffers(args_.shape, args_.workspace.data());
  const NodeShard shard(args_.shape);
  if (args_.device != nullptr) {
    const Status status = comm::on_device::close_block(args_, buffers, failed_.code());
    if (!status.ok()) blame(status, "hierarchical: the node's average could not be enqueued");
    return;
  }
  const kernels::cpu::IeeeScope ieee;
  const Bytes own = buffers.block(shard.local);
  std::memset(own.data(), 0, own.size());
  const uint32_t untold = !failed_.ok() && !told_ ? kUntold : 0;
  const uint32_t word[2] = {static_cast<uint32_t>(failed_.code()) | untold, args_.seed.step};
  std::memcpy(own.data(), word, sizeof word);
  narrow(buffers.shard, shard.count, args_.shape.dtype, own.data() + HierarchicalBuffers::kWord);
}

void ExchangeMachine::open_blocks() noexcept {
  const ExchangeShape& shape = args_.shape;
  const HierarchicalBuffers buffers(shape, args_.workspace.data());
  if (args_.device != nullptr) {
    const Status status = failed_.ok() ? comm::on_device::open_blocks(args_, buffers) : failed_;
    if (!status.ok()) blame(status, "hierarchical: the look at the node's averages could not be enqueued");
    return;
  }
  const NodeShard shard(shape);
  for (int local = 0; local < shard.per_node && failed_.ok(); ++local) {
    uint32_t word[2];
    std::memcpy(word, buffers.block(local).data(), sizeof word);
    const comm::BlockWord said{static_cast<StatusCode>(word[0] & ~kUntold), (word[0] & kUntold) != 0, word[1]};
    Message text;
    const Status status = comm::judge_block(args_, shard.node * shard.per_node + local, said, &text);
    if (status.ok()) continue;
    blame(status, text.text);
    if (said.code != StatusCode::ok) told_ = !said.untold;
  }
  if (!failed_.ok()) return;
  const size_t element = dtype_bytes(shape.dtype);
  for (int local = 0; local < shard.per_node; ++local) {
    const size_t first = shard.first_of(local), count = shard.count_of(local);
    if (count == 0) continue;
    std::memcpy(static_cast<std::byte*>(args_.gradient.data) + first * element,
                buffers.block(local).data() + HierarchicalBuffers::kWord, count * element);
  }
}

}  // namespace gradgate
