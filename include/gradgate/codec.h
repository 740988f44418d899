// Codecs: turn a gradient into a payload and back. What the bytes mean is defined in docs/format.md; this header is how
// to make and read them. Calls are stateless and reentrant, allocate nothing, and give the same bytes for any number of
// threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "gradgate/types.h"

namespace gradgate {

/// Wire ids, never reused. The list itself is include/gradgate/codec_list.def.
enum class CodecId : uint8_t {
#define GRADGATE_CODEC(id, value, name) id = value,
#include "gradgate/codec_list.def"
#undef GRADGATE_CODEC
};

/// A codec and its parameters: what the text "chunk-topk:8/1024:bf16:noef" says.
struct CodecSpec {
  CodecId id = CodecId::none;
  DType value =
      DType::f32;         ///< dtype of sent values (chunk-topk, topk, randk; u8: int8 codes with scales); f32 elsewhere
  bool feedback = false;  ///< keep what was not sent in a residual
  uint32_t param0 = 0;    ///< chunk-topk: c; topk: lower half of the ratio's bits (f64)
  uint32_t param1 = 0;    ///< chunk-topk: B; topk: upper half; int8, int4, fp8: the switches that are on, one bit each

  friend bool operator==(const CodecSpec&, const CodecSpec&) = default;
};

/// Parses `name[:parameters][:ef|:noef]`. On failure `why` (optional) names the part, its value and the accepted range.
GRADGATE_API Status parse_codec(std::string_view text, CodecSpec* spec, Message* why) noexcept;
/// Canonical text of a spec, e.g. "int8", "int8:ef", "chunk-topk:8/1024"; feedback is named only where it is not the
/// default. At most 47 characters.
GRADGATE_API Message format_codec(const CodecSpec& spec) noexcept;
/// One line per codec, for help texts: "int8  one byte per element, f32 scale per 256  …".
struct CodecInfo {
  CodecId id;
  const char* name;
  const char* grammar;  ///< e.g. "chunk-topk:c/B[:f32|:bf16|:int8]"
  const char* summary;
  bool default_feedback;
  int fidelity;       ///< codec_fidelity() of the plain variant
  Exchange exchange;  ///< what carries its payload unless told otherwise
};
GRADGATE_API std::span<const CodecInfo> codec_infos() noexcept;
GRADGATE_API const CodecInfo& codec_info(CodecId id) noexcept;

/// Place in the order of the gate's candidates: 0 = exact, greater is lossier. Variants that lose more or less than the
/// plain codec have places of their own.
GRADGATE_API int codec_fidelity(const CodecSpec& spec) noexcept;

/// Whether the codec takes gradients of this dtype (table in docs/format.md).
GRADGATE_API bool codec_takes(const CodecSpec& spec, DType gradient) noexcept;

/// Whether the codec's payload can travel by this exchange.
GRADGATE_API bool codec_travels_by(const CodecSpec& spec, Exchange exchange) noexcept;

/// Bytes of a payload for `count` elements; exact, a multiple of 16. 0 when the codec does not take the dtype or the
/// size overflows.
GRADGATE_API size_t payload_bytes(const CodecSpec& spec, DType gradient, size_t count) noexcept;
/// Scratch bytes encode() and reduce_encode() need for `count` elements with an executor of `width` threads. Any
/// alignment.
GRADGATE_API size_t workspace_bytes(const CodecSpec& spec, DType gradient, size_t count, unsigned width = 1) noexcept;
/// Elements that must not be cut between shards: max(256, the codec's block or chunk).
GRADGATE_API size_t shard_alignment(const CodecSpec& spec) noexcept;

/// What the fused pass saw.
struct EncodeStats {
  uint64_t non_finite = 0;  ///< elements of x that were Inf or NaN
};

struct EncodeArgs {
  ConstVec gradient;          ///< f32, bf16 or f16 (none: any dtype)
  float* residual = nullptr;  ///< gradient.count elements, updated in place; null: no feedback, whatever the spec says
                              ///< (none: must be null)
  Bytes payload;              ///< at least payload_bytes, 16-byte aligned, not overlapping the gradient
  Bytes workspace;            ///< at least workspace_bytes, any alignment
  Seed seed;
  bool flush = false;  ///< all of e takes part, also where g is exactly zero (format §2, rule 2)
  Executor executor;
  /// topk: the threshold of the vector's last step, 0 for none; replaced by this step's. Saves looking for one, and
  /// never changes a byte of the payload. Null: none is kept.
  uint32_t* threshold = nullptr;
};
/// Encodes gradient (+ residual) into payload. invalid_argument, unsupported, payload_too_small, workspace_too_small
/// leave everything untouched.
GRADGATE_API Status encode(const CodecSpec& spec, const EncodeArgs& args, EncodeStats* stats = nullptr) noexcept;

/// Writes an error payload (format §1) of the size a payload for `count` elements has.
GRADGATE_API Status encode_error(const CodecSpec& spec, DType gradient, size_t count, Seed seed, StatusCode code,
                                 Bytes payload) noexcept;

/// First fault a decoder found; the detail() of bad_payload.
enum class PayloadFault : int64_t {
  none = 0,
  size = 1,
  alignment = 2,
  magic = 3,
  version = 4,
  codec = 5,
  value_dtype = 6,
  count = 7,
  parameter = 8,
  flags = 9,
  check = 10,
  index = 11
};
GRADGATE_API const char* payload_fault_name(PayloadFault fault) noexcept;

/// What a header says, for messages and for the exchange's comparison of steps.
struct PayloadInfo {
  CodecId id;
  DType value;
  bool error;
  bool non_finite;
  StatusCode code;
  uint64_t count;
  uint32_t param0, param1, step;
};
/// Reads and checks a payload without decoding: every header field, and every index. peer_failed for an error payload
/// (info is filled).
GRADGATE_API Status check_payload(const CodecSpec& spec, DType gradient, size_t count, ConstBytes payload,
                                  PayloadInfo* info = nullptr) noexcept;

enum class Into : uint8_t { store, add };

struct DecodeArgs {
  ConstBytes payload;           ///< exactly payload_bytes, 16-byte aligned
  DType gradient = DType::f32;  ///< dtype of the gradient that was encoded
  Vec out;  ///< f32, bf16 or f16 (none: the gradient's dtype; f64 only stored and unscaled), count as encoded
  float scale = 1.0f;  ///< multiplies every decoded value
  Into into = Into::store;
  Executor executor;
};
/// Checks the payload, then writes (or adds) it. Any error leaves `out` untouched.
GRADGATE_API Status decode(const CodecSpec& spec, const DecodeArgs& args) noexcept;

struct DecodeSumArgs {
  std::span<const ConstBytes> payloads;  ///< one per rank, in rank order, each as in DecodeArgs
  DType gradient = DType::f32;           ///< dtype of the gradients that were encoded
  Vec out;                               ///< f32, bf16 or f16, count as encoded
  float scale = 1.0f;                    ///< multiplies every sum
  Bytes workspace;                       ///< at least decode_sum_bytes
  Executor executor;
};
/// Scratch bytes decode_sum() needs. Any alignment.
GRADGATE_API size_t decode_sum_bytes(const CodecSpec& spec, DType gradient, size_t count, size_t ranks,
                                     unsigned width = 1) noexcept;
/// The last part of an all_gather exchange, fused: s = Σ over ranks in rank order of the decoded payloads in f32
/// (format §4), then out becomes s · scale. Every piece of `out` is made once, from all payloads. All payloads are
/// checked before anything is written; the first fault in rank order is returned. Gradients f32, bf16 or f16.
GRADGATE_API Status decode_sum(const CodecSpec& spec, const DecodeSumArgs& args) noexcept;

struct ReduceArgs {
  std::span<const ConstBytes> payloads;  ///< one per rank, in rank order; the entry `self` is ignored
  size_t self = 0;                       ///< this rank
  ConstVec gradient;                     ///< this rank's own shard: added exactly, unencoded
  float* residual = nullptr;             ///< this rank's slot for the shard; null: no feedback
  Bytes payload;                         ///< receives the encoded sum
  Bytes workspace;                       ///< at least workspace_bytes
  Seed seed;
  Executor executor;
};
/// The owner's part of two_shot, fused: s = Σ over ranks in rank order of (self ? g : decoded payload) in f32, then
/// encodes s (+ residual) by the rules of format §2 with s in the place of g. All payloads are checked before anything
/// is written; the first fault in rank order is returned. Gradients f32, bf16 or f16.
GRADGATE_API Status reduce_encode(const CodecSpec& spec, const ReduceArgs& args, EncodeStats* stats = nullptr) noexcept;

/// The dense cast of a flush: x = g + e (rule 3, zero groups included), gradient becomes x rounded to its dtype and
/// residual x − that, where finite. Gradients f32, bf16 or f16: no other has a residual.
GRADGATE_API Status fold_residual(Vec gradient, float* residual, Executor executor) noexcept;

}  // namespace gradgate
