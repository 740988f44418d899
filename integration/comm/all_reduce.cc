// The all_reduce exchange with a codec whose payloads add: encode with the same seed on every rank, sum the values,
// decode the sums. One collective. No header travels: a witness in front of the values tells every rank whether all
// encoded, and the same thing.
#include <cstring>

#include "codecs/witness.h"
#include "gradgate/exchange.h"
#include "integration/comm/all_reduce_layout.h"
#include "integration/comm/slot.h"

namespace gradgate {

using comm::AllReduceBuffers;

namespace comm {

Status judge_witness(const ExchangeArgs& args, codecs::WitnessVerdict verdict, Message* text) noexcept {
  const ExchangeShape& shape = args.shape;
  const Message codec = format_codec(shape.candidate.codec);
  if (verdict.code != 0) {
    text->format("%s over all_reduce: a rank failed: %s", codec.text,
                 Status(static_cast<StatusCode>(verdict.code)).message());
    return StatusCode::peer_failed;
  }
  if (!verdict.differ) return {};
  text->format(
      "%s over all_reduce: ranks differ in spec, count, step or seed: rank %d is at step %u with %zu x %s, "
      "seed %llu, bucket %u",
      codec.text, shape.rank, args.seed.step, shape.count, dtype_name(shape.dtype),
      static_cast<unsigned long long>(args.seed.key), args.seed.tensor);
  return StatusCode::peer_mismatch;
}

Status seal_sums(const ExchangeArgs& args, const AllReduceBuffers& buffers, StatusCode code) noexcept {
  // A rank that could not encode has no payload; its hash says nothing then.
  if (code != StatusCode::ok) GRADGATE_TRY(zero(args, buffers.payload));
  if (args.device != nullptr) return on_device::seal_sums(args, buffers, code);
  std::memcpy(buffers.head, buffers.payload.data(), buffers.head_bytes);
  const uint32_t hash = codecs::agreement_hash(buffers.head, buffers.head_bytes);
  const uint64_t witness = codecs::witness_of(hash, static_cast<uint32_t>(code));
  for (uint32_t i = 0; i < codecs::kWitnessValues; ++i)
    codecs::put_witness_value(buffers.sums, i, (witness >> i & 1u) != 0, dtype_bytes(buffers.dtype));
  return {};
}

Status open_sums(const ExchangeArgs& args, const AllReduceBuffers& buffers, Message* text) noexcept {
  if (args.device != nullptr) return on_device::open_sums(args, buffers);
  uint64_t seen = 0;
  for (uint32_t i = 0; i < codecs::kWitnessValues; ++i)
    seen |= uint64_t{codecs::any_witness_value(buffers.sums, i, dtype_bytes(buffers.dtype))} << i;
  std::memcpy(buffers.payload.data(), buffers.head, buffers.head_bytes);
  return judge_witness(args, codecs::WitnessVerdict::of(seen), text);
}

}  // namespace comm

void ExchangeMachine::begin_all_reduce() noexcept {
  const AllReduceBuffers buffers(args_.shape, args_.workspace.data());
  encode_whole(0xffffffffu, buffers.payload, buffers.codec);  // one sample for all ranks
}

Status ExchangeMachine::next_all_reduce(CollectiveCall* call) noexcept {
  const ExchangeShape& shape = args_.shape;
  const AllReduceBuffers buffers(shape, args_.workspace.data());
  if (phase_ == Phase::ready) {
    phase_ = Phase::stage1;
    const Status sealed = comm::seal_sums(args_, buffers, failed_.code());
    if (!sealed.ok()) blame(sealed, "all_reduce: the witness could not be enqueued");
    *call = {Collective::all_reduce, buffers.sums, buffers.sums, buffers.sum_count(), buffers.dtype};
    return {};
  }
  phase_ = Phase::done;
  Message text;
  const Status opened = comm::open_sums(args_, buffers, &text);
  if (!opened.ok()) blame(opened, text.text);
  return failed_.ok() ? decode_sums() : failed_;
}

Status ExchangeMachine::decode_sums() noexcept {
  const ExchangeShape& shape = args_.shape;
  const AllReduceBuffers buffers(shape, args_.workspace.data());
  const Status status =
      comm::decode_part(args_, buffers.payload, args_.gradient, static_cast<float>(1.0 / divisor_), buffers.codec);
  if (!status.ok()) {
    Message text;
    text.format("all_reduce: rank %d could not decode the sums: %s", shape.rank, status.message());
    blame(status, text.text);
  }
  return failed_;
}

}  // namespace gradgate
