// The workspace of an all_reduce exchange with a codec, and what happens to the sums in it (docs/format.md §4).
#pragma once

#include <algorithm>

#include "codecs/codecs.h"
#include "codecs/witness.h"
#include "integration/comm/two_shot_layout.h"

namespace gradgate::comm {

/// The values of the payload are summed where they lie, together with the witness in front of them; that overwrites
/// the payload's head (header and sample), of which `head` keeps a copy.
struct AllReduceBuffers {
  std::byte* head = nullptr;  ///< head_bytes of the payload
  std::byte* sums = nullptr;  ///< witness and values
  Bytes payload;              ///< ends inside of `sums`, with the values
  Bytes codec;                ///< workspace of the codec
  size_t head_bytes = 0, values = 0, bytes = 0;
  DType dtype = DType::f32;

  AllReduceBuffers(const ExchangeShape& shape, std::byte* base) noexcept {
    const CodecSpec& spec = shape.candidate.codec;
    const size_t payload_size = payload_bytes(spec, shape.dtype, shape.count);
    if (payload_size == 0) return;
    const codecs::Addends adds = codecs::addends_of(spec, shape.count);
    head_bytes = adds.offset;
    values = adds.count;
    dtype = adds.dtype;
    const size_t witness = codecs::kWitnessValues * dtype_bytes(dtype);
    const size_t codec_bytes = codec_work_bytes(shape, shape.count);
    WorkspaceCarver carver(base);
    head = carver.take(head_bytes, 1);
    sums = carver.take(1, witness + payload_size - head_bytes);
    codec = {carver.take(codec_bytes, 1), codec_bytes};
    payload = {sums == nullptr ? nullptr : sums + (witness - head_bytes), payload_size};
    bytes = carver.bytes();
  }
  size_t sum_count() const noexcept { return codecs::kWitnessValues + values; }
  size_t sum_bytes() const noexcept { return sum_count() * dtype_bytes(dtype); }
};

/// What the witnesses of all ranks mean for the exchange; `text` says it where that is not ok.
Status judge_witness(const ExchangeArgs& args, codecs::WitnessVerdict verdict, Message* text) noexcept;

/// Before the sum: the payload's head put aside, the witness in front of the values. `code`: why this rank could not
/// encode, or ok.
Status seal_sums(const ExchangeArgs& args, const AllReduceBuffers& buffers, StatusCode code) noexcept;
/// After it: the look at the witness, which on a device goes into the record, and the head in its place again.
Status open_sums(const ExchangeArgs& args, const AllReduceBuffers& buffers, Message* text) noexcept;

namespace on_device {
Status seal_sums(const ExchangeArgs& args, const AllReduceBuffers& buffers, StatusCode code) noexcept;
Status open_sums(const ExchangeArgs& args, const AllReduceBuffers& buffers) noexcept;
}  // namespace on_device

}  // namespace gradgate::comm
