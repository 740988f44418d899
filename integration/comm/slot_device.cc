// What an exchange does with its slots when they are in device memory: the calls of slot.h, enqueued. Faults go into
// the exchange's record; every call after the first fault does nothing, and what is sent then is an error payload.
#include <cstring>

#include "gradgate/device.h"
#include "integration/comm/all_reduce_layout.h"
#include "integration/comm/hierarchical_layout.h"
#include "integration/comm/slot.h"
#include "integration/comm/two_shot_layout.h"
#include "kernels/cuda/library.h"

namespace gradgate::comm {
namespace {

using kernels::cuda::FaultRecord;
using kernels::cuda::Runtime;
using kernels::cuda::runtime;

/// The record's bytes.
struct Record {
  FaultRecord fault;
  uint64_t non_finite;
};
static_assert(sizeof(Record) == sizeof(ExchangeRecord));

Record* record_of(const ExchangeArgs& args) noexcept { return reinterpret_cast<Record*>(args.device->record); }
uint64_t* word_of(const ExchangeArgs& args) noexcept { return &record_of(args)->fault.word; }
device::Stream stream_of(const ExchangeArgs& args) noexcept { return args.device->stream.handle; }

Status enqueued(int error) noexcept { return error == 0 ? Status{} : Status{StatusCode::internal, error}; }

codecs::WireHeader header_of(const ExchangeArgs& args, size_t count) noexcept {
  return codecs::make_header(args.shape.candidate.codec, args.shape.dtype, count, args.seed.step);
}

kernels::cuda::SumsCall sums_call(const ExchangeArgs& args, const AllReduceBuffers& buffers, StatusCode code) noexcept {
  kernels::cuda::SumsCall call{};
  call.values = buffers.sums;
  call.head = buffers.head;
  call.head_bytes = buffers.head_bytes;
  call.width = dtype_bytes(buffers.dtype);
  call.code = static_cast<unsigned>(code);
  call.fault = &record_of(args)->fault;
  return call;
}

kernels::cuda::BlocksCall blocks_call(const ExchangeArgs& args, const HierarchicalBuffers& buffers,
                                      StatusCode code) noexcept {
  const NodeShard shard(args.shape);
  kernels::cuda::BlocksCall call{};
  call.blocks = buffers.blocks;
  call.stride = buffers.block_bytes;
  call.ranks = static_cast<unsigned>(shard.per_node);
  call.local = static_cast<unsigned>(shard.local);
  call.first_rank = static_cast<unsigned>(shard.node * shard.per_node);
  call.elements = shard.elements;
  call.count = shard.count;
  call.shard = buffers.shard;
  call.dtype = args.shape.dtype;
  call.step = args.seed.step;
  call.step_word = args.device->step;
  call.code = static_cast<unsigned>(code);
  call.fault = &record_of(args)->fault;
  return call;
}

// What next() would have said of a fault that the record keeps.
Status judge_record(const ExchangeArgs& args, const FaultRecord& fault, Message* text) noexcept {
  const ExchangeShape& shape = args.shape;
  unsigned rank = 0;
  const Status status = device::fault_status(fault.word, &rank);
  const auto peer = static_cast<int>(rank);
  const auto stage = static_cast<int>(fault.word >> kernels::cuda::kFaultStageShift & 0x7fff);
  const auto code =
      status.code() == StatusCode::peer_failed ? static_cast<StatusCode>(status.detail()) : StatusCode::ok;
  if (shape.candidate.exchange == Exchange::hierarchical) {
    if (stage == static_cast<int>(kernels::cuda::kBlockStage))
      return judge_block(args, peer, {code, false, fault.got.step}, text);
    ExchangeArgs between = args;
    between.shape = NodeShard(shape).between();
    return judge_record(between, fault, text);
  }
  if (status.code() == StatusCode::bad_payload && status.detail() == static_cast<int64_t>(PayloadFault::index)) {
    text->format("%s over %s: damaged payload from rank %u: %s", format_codec(shape.candidate.codec).text,
                 exchange_name(shape.candidate.exchange), rank, payload_fault_name(PayloadFault::index));
    return status;
  }
  if (shape.candidate.exchange == Exchange::all_reduce && status.code() != StatusCode::bad_payload)
    return judge_witness(args, {static_cast<uint32_t>(code), code == StatusCode::ok}, text);
  const Shards shards(shape);
  const size_t count = stage == 0 ? shape.count : stage == 1 ? shards[shape.rank].count : shards[peer].count;
  return judge_payload(args, stage, peer, count, status.code() == StatusCode::peer_mismatch ? Status{} : status,
                       fault.got, text);
}

}  // namespace

namespace on_device {

bool takes(const ExchangeShape& shape) noexcept {
  return shape.candidate.codec == CodecSpec{} ? runtime() != nullptr
                                              : device::takes(shape.candidate.codec, shape.dtype);
}

size_t codec_work_bytes(const ExchangeShape& shape, size_t count) noexcept {
  return device::workspace_bytes(shape.candidate.codec, shape.dtype, count);
}

Status zero(const ExchangeArgs& args, Bytes memory) noexcept {
  const Runtime* cuda = runtime();
  if (cuda == nullptr) return StatusCode::unsupported;
  return enqueued(cuda->fill(memory.data(), 0, memory.size(), stream_of(args)));
}

void put_error(const ExchangeArgs& args, size_t count, StatusCode code, Bytes payload) noexcept {
  const Runtime* cuda = runtime();
  if (cuda == nullptr) return;
  (void)cuda->mark_failed(payload.data(), header_of(args, count), args.device->step, &record_of(args)->fault,
                          static_cast<unsigned>(code), stream_of(args));
}

Status encode_part(const ExchangeArgs& args, ConstVec part, float* residual, const Seed& seed, Bytes payload,
                   Bytes work) noexcept {
  return device::encode(args.shape.candidate.codec,
                        {.gradient = part,
                         .residual = residual,
                         .payload = payload,
                         .workspace = work,
                         .seed = seed,
                         .step = args.device->step,
                         .non_finite = &record_of(args)->non_finite,
                         .threshold = args.threshold},
                        stream_of(args));
}

Status encode_sum(const ExchangeArgs& args, const Slots& incoming, ConstVec own, float* residual, const Seed& seed,
                  Bytes payload, Bytes work) noexcept {
  GRADGATE_TRY(device::reduce_encode(args.shape.candidate.codec,
                                     {.payloads = incoming.base,
                                      .stride = incoming.stride,
                                      .ranks = static_cast<unsigned>(incoming.ranks),
                                      .self = static_cast<unsigned>(args.shape.rank),
                                      .gradient = own,
                                      .residual = residual,
                                      .payload = payload,
                                      .workspace = work,
                                      .seed = seed,
                                      .step = args.device->step,
                                      .fault = word_of(args),
                                      .non_finite = &record_of(args)->non_finite},
                                     stream_of(args)));
  return enqueued(runtime()->mark_failed(payload.data(), header_of(args, own.count), args.device->step,
                                         &record_of(args)->fault, 0, stream_of(args)));
}

Status decode_part(const ExchangeArgs& args, Bytes payload, Vec out, float scale, Bytes work) noexcept {
  return device::decode(args.shape.candidate.codec,
                        {.payload = payload,
                         .gradient = args.shape.dtype,
                         .out = out,
                         .scale = scale,
                         .workspace = work,
                         .fault = word_of(args)},
                        stream_of(args));
}

Status decode_slots(const ExchangeArgs& args, const Slots& slots, float scale, Bytes work) noexcept {
  return device::decode_sum(args.shape.candidate.codec,
                            {.payloads = slots.base,
                             .stride = slots.stride,
                             .ranks = static_cast<unsigned>(slots.ranks),
                             .gradient = args.shape.dtype,
                             .out = args.gradient,
                             .scale = scale,
                             .workspace = work,
                             .fault = word_of(args)},
                            stream_of(args));
}

Status fold_part(const ExchangeArgs& args) noexcept {
  return device::fold_residual(args.gradient, args.residual, stream_of(args));
}

Status scale_vector(const ExchangeArgs& args, int divisor) noexcept {
  const Runtime* cuda = runtime();
  if (cuda == nullptr) return StatusCode::unsupported;
  return enqueued(cuda->scale_dense(args.gradient.data, args.gradient.count, args.gradient.dtype, divisor, args.divide,
                                    stream_of(args)));
}

Status inspect(const ExchangeArgs& args, int stage, const Slots& slots, int first, int ranks, int skip, size_t count,
               Bytes work) noexcept {
  const Runtime* cuda = runtime();
  if (cuda == nullptr) return StatusCode::unsupported;
  const auto from = static_cast<unsigned>(first), many = static_cast<unsigned>(ranks);
  const unsigned left_out = skip < first ? many : static_cast<unsigned>(skip - first);
  kernels::cuda::CheckCall call{};
  call.header = header_of(args, count);
  call.step = args.device->step;
  call.payloads = slots[first].data();
  call.stride = slots.stride;
  call.ranks = many;
  call.skip = left_out;
  call.first_rank = from;
  call.stage = static_cast<unsigned>(stage);
  call.fault = &record_of(args)->fault;
  GRADGATE_TRY(enqueued(cuda->check(call, stream_of(args))));
  return device::check_indices(args.shape.candidate.codec, args.shape.dtype, count, slots[first].data(), slots.stride,
                               many, left_out, from, work, word_of(args), stream_of(args));
}

Status seal_sums(const ExchangeArgs& args, const AllReduceBuffers& buffers, StatusCode code) noexcept {
  return enqueued(runtime()->seal_sums(sums_call(args, buffers, code), stream_of(args)));
}
Status open_sums(const ExchangeArgs& args, const AllReduceBuffers& buffers) noexcept {
  return enqueued(runtime()->open_sums(sums_call(args, buffers, StatusCode::ok), stream_of(args)));
}

Status widen_vector(const ExchangeArgs& args, ConstVec from, float* to) noexcept {
  return enqueued(runtime()->widen(from.data, from.count, from.dtype, to, stream_of(args)));
}
Status close_block(const ExchangeArgs& args, const HierarchicalBuffers& buffers, StatusCode code) noexcept {
  const NodeShard shard(args.shape);
  const Bytes own = buffers.block(shard.local);
  GRADGATE_TRY(zero(args, own.subspan(HierarchicalBuffers::kWord + shard.count * dtype_bytes(args.shape.dtype))));
  return enqueued(runtime()->close_block(blocks_call(args, buffers, code), stream_of(args)));
}
Status open_blocks(const ExchangeArgs& args, const HierarchicalBuffers& buffers) noexcept {
  return enqueued(runtime()->open_blocks(blocks_call(args, buffers, StatusCode::ok), args.gradient.data,
                                         args.shape.count, stream_of(args)));
}

Status record_status(const ExchangeArgs& args, const ExchangeRecord& record, uint64_t* non_finite,
                     Message* why) noexcept {
  Record r;
  std::memcpy(&r, record.bytes, sizeof r);
  if (non_finite != nullptr) *non_finite += r.non_finite;
  if (r.fault.word == 0) return {};
  Message text;
  const Status judged = judge_record(args, r.fault, &text);
  if (why != nullptr) *why = text;
  return judged.ok() ? device::fault_status(r.fault.word) : judged;
}

}  // namespace on_device
}  // namespace gradgate::comm
