// What can be done with a payload without knowing its values: check it, and stand in for it when a rank fails.
#include <cstring>

#include "codecs/codecs.h"
#include "codecs/header.h"

namespace gradgate {
namespace codecs {
namespace {

Status bad(PayloadFault fault) noexcept { return {StatusCode::bad_payload, static_cast<int64_t>(fault)}; }

// Whether the indices of one chunk are below `length` and rise. No early exit: the loop is then a few vector
// instructions. (Copied into its callers, GCC 12 vectorises it in one of them only.)
__attribute__((noinline)) bool chunk_indices_ok(const uint16_t* index, size_t k, size_t length) noexcept {
  uint16_t wrong = 0;  // as wide as an index: compilers vectorise no other
  for (size_t i = 1; i < k; ++i) wrong = static_cast<uint16_t>(wrong | (index[i] <= index[i - 1] ? 1 : 0));
  return wrong == 0 && index[k - 1] < length;  // the last is the greatest where they rise
}

bool indices_ok(const CodecSpec& spec, size_t count, const std::byte* section) noexcept {
  const uint16_t* index = reinterpret_cast<const uint16_t*>(section);
  for (size_t begin = 0; begin < count; begin += spec.param1) {
    const size_t length = count - begin < spec.param1 ? count - begin : spec.param1;
    const size_t k = length < spec.param0 ? length : spec.param0;
    if (!chunk_indices_ok(index, k, length)) return false;
    index += k;
  }
  return true;
}

// topk: counts that fit their chunks and add up to all entries, then the indices of each chunk.
bool counted_indices_ok(const CodecSpec& spec, size_t count, const Sections<const std::byte>& sections) noexcept {
  using Topk = Codec<CodecId::topk>;
  const uint32_t* counts = reinterpret_cast<const uint32_t*>(sections.first);
  const uint16_t* index = reinterpret_cast<const uint16_t*>(sections.third);
  size_t left = Topk::entries(spec, count);
  for (size_t begin = 0, chunk = 0; begin < count; begin += Topk::kChunk, ++chunk) {
    const size_t length = count - begin < Topk::kChunk ? count - begin : Topk::kChunk, k = counts[chunk];
    if (k > length || k > left || (k > 0 && !chunk_indices_ok(index, k, length))) return false;
    index += k;
    left -= k;
  }
  return left == 0;
}

}  // namespace
}  // namespace codecs

using namespace codecs;

Status check_payload(const CodecSpec& spec, DType gradient, size_t count, ConstBytes payload,
                     PayloadInfo* info) noexcept {
  if (!valid_spec(spec)) return StatusCode::invalid_argument;
  if (!codec_takes(spec, gradient)) return StatusCode::unsupported;
  Sections<const std::byte> sections;
  const size_t bytes = bind_payload(spec, gradient, count, payload.data(), &sections);
  if (bytes == 0) return StatusCode::invalid_argument;
  if (payload.data() == nullptr || payload.size() != bytes) return bad(PayloadFault::size);
  if (reinterpret_cast<uintptr_t>(payload.data()) % kSectionAlign != 0) return bad(PayloadFault::alignment);
  WireHeader header;
  std::memcpy(&header, payload.data(), sizeof header);
  const PayloadFault fault = check_header(header, make_header(spec, gradient, count, header.step));
  if (fault != PayloadFault::none) return bad(fault);
  const bool error = (header.flags & kFlagError) != 0;
  if (info != nullptr) {
    *info = {spec.id,
             static_cast<DType>(header.value),
             error,
             (header.flags & kFlagNonFinite) != 0,
             static_cast<StatusCode>(header.flags >> 4),
             header.count,
             header.param0,
             header.param1,
             header.step};
  }
  if (error) return {StatusCode::peer_failed, header.flags >> 4};
  if (spec.id == CodecId::chunk_topk && !indices_ok(spec, count, sections.second)) return bad(PayloadFault::index);
  if (spec.id == CodecId::topk && !counted_indices_ok(spec, count, sections)) return bad(PayloadFault::index);
  return {};
}

Status encode_error(const CodecSpec& spec, DType gradient, size_t count, Seed seed, StatusCode code,
                    Bytes payload) noexcept {
  const uint32_t number = static_cast<uint32_t>(code);
  if (!valid_spec(spec) || number == 0 || number > 15) return StatusCode::invalid_argument;
  if (!codec_takes(spec, gradient)) return StatusCode::unsupported;
  const size_t bytes = payload_bytes(spec, gradient, count);
  if (bytes == 0) return StatusCode::invalid_argument;
  if (payload.size() < bytes) return {StatusCode::payload_too_small, static_cast<int64_t>(bytes)};
  if (payload.data() == nullptr || reinterpret_cast<uintptr_t>(payload.data()) % kSectionAlign != 0)
    return StatusCode::invalid_argument;
  WireHeader header = make_header(spec, gradient, count, seed.step);
  header.flags = static_cast<uint8_t>(kFlagError | number << 4);
  std::memset(payload.data(), 0, bytes);
  std::memcpy(payload.data(), &header, sizeof header);
  return {};
}

}  // namespace gradgate
