// What an exchange does with its slots when they are in device memory: the calls of slot.h, enqueued. Faults go into
// the exchange's record; every call after the first fault does nothing, and what is sent then is an error payload.
#include <cstring>

#include "gradgate/device.h"
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

Status record_status(const ExchangeArgs& args, const ExchangeRecord& record, uint64_t* non_finite,
                     Message* why) noexcept {
  Record r;
  std::memcpy(&r, record.bytes, sizeof r);
  if (non_finite != nullptr) *non_finite += r.non_finite;
  if (r.fault.word == 0) return {};
  unsigned rank = 0;
  const Status status = device::fault_status(r.fault.word, &rank);
  const int stage = static_cast<int>(r.fault.word >> kernels::cuda::kFaultStageShift & 0x7fff);
  Message text;
  Status judged = status;
  if (status.code() == StatusCode::bad_payload && status.detail() == static_cast<int64_t>(PayloadFault::index)) {
    text.format("%s over %s: damaged payload from rank %u: %s", format_codec(args.shape.candidate.codec).text,
                exchange_name(args.shape.candidate.exchange), rank, payload_fault_name(PayloadFault::index));
  } else {
    const Shards shards(args.shape);
    const size_t count = stage == 0   ? args.shape.count
                         : stage == 1 ? shards[args.shape.rank].count
                                      : shards[static_cast<int>(rank)].count;
    judged = judge_payload(args, stage, static_cast<int>(rank), count,
                           status.code() == StatusCode::peer_mismatch ? Status{} : status, r.fault.got, &text);
    if (judged.ok()) judged = status;
  }
  if (why != nullptr) *why = text;
  return judged;
}

}  // namespace on_device
}  // namespace gradgate::comm
