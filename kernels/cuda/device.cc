// The public calls of gradgate/device.h: check the arguments as the CPU's are checked, pass on.
#include "gradgate/device.h"

#include "codecs/codecs.h"
#include "codecs/header.h"
#include "kernels/arguments.h"
#include "kernels/cuda/library.h"

namespace gradgate::device {
namespace {

using kernels::aligned;
using kernels::overlap;
using kernels::readable;
using kernels::cuda::Plugin;

constexpr size_t kWorkAlign = 256;

std::byte* aligned_workspace(Bytes workspace) noexcept {
  const uintptr_t at = reinterpret_cast<uintptr_t>(workspace.data());
  return reinterpret_cast<std::byte*>((at + kWorkAlign - 1) / kWorkAlign * kWorkAlign);
}

bool takes_with(const Plugin& plugin, const CodecSpec& spec, DType gradient) noexcept {
  return codec_takes(spec, gradient) && plugin.has_kernels(spec);
}

size_t workspace_with(const Plugin& plugin, const CodecSpec& spec, DType gradient, size_t count) noexcept {
  const size_t bytes = plugin.workspace_bytes(spec, gradient, count);
  return bytes == 0 ? 0 : bytes + kWorkAlign - 1;
}

Status check_workspace(const Plugin& plugin, const CodecSpec& spec, DType gradient, size_t count,
                       Bytes workspace) noexcept {
  const size_t need = workspace_with(plugin, spec, gradient, count);
  if (workspace.size() < need) return {StatusCode::workspace_too_small, static_cast<int64_t>(need)};
  if (need > 0 && workspace.data() == nullptr) return StatusCode::invalid_argument;
  return {};
}

Status check_encode(const Plugin& plugin, const CodecSpec& spec, ConstVec gradient, const float* residual,
                    Bytes payload, Bytes workspace) noexcept {
  if (!codecs::valid_spec(spec)) return StatusCode::invalid_argument;
  if (!takes_with(plugin, spec, gradient.dtype)) return StatusCode::unsupported;
  if (!readable(gradient.data, gradient.count, gradient.dtype) || !aligned(residual, sizeof(float)) ||
      (spec.id == CodecId::none && residual != nullptr))
    return StatusCode::invalid_argument;
  const size_t bytes = payload_bytes(spec, gradient.dtype, gradient.count);
  if (bytes == 0) return StatusCode::invalid_argument;
  if (payload.size() < bytes) return {StatusCode::payload_too_small, static_cast<int64_t>(bytes)};
  if (payload.data() == nullptr || !aligned(payload.data(), codecs::kSectionAlign)) return StatusCode::invalid_argument;
  GRADGATE_TRY(check_workspace(plugin, spec, gradient.dtype, gradient.count, workspace));
  const size_t gradient_bytes = gradient.count * dtype_bytes(gradient.dtype);
  const size_t residual_bytes = residual == nullptr ? 0 : gradient.count * sizeof(float);
  if (overlap(payload.data(), bytes, gradient.data, gradient_bytes) ||
      overlap(payload.data(), bytes, residual, residual_bytes) ||
      overlap(residual, residual_bytes, gradient.data, gradient_bytes))
    return StatusCode::invalid_argument;
  return {};
}

// Where the payloads of several ranks stand.
Status check_slots(const std::byte* payloads, size_t stride, unsigned ranks, size_t bytes) noexcept {
  if (payloads == nullptr || !aligned(payloads, codecs::kSectionAlign)) return StatusCode::invalid_argument;
  if (ranks > 1 && (stride % codecs::kSectionAlign != 0 || stride < bytes)) return StatusCode::invalid_argument;
  return {};
}

// A launch that CUDA refused: the device's number of the error as detail.
Status launched(int error) noexcept { return error == 0 ? Status{} : Status{StatusCode::internal, error}; }

kernels::cuda::EncodeCall encode_call(const CodecSpec& spec, ConstVec gradient, float* residual, Bytes payload,
                                      Bytes workspace, Seed seed, const uint32_t* step) noexcept {
  kernels::cuda::EncodeCall call{};
  call.spec = spec;
  call.header = codecs::make_header(spec, gradient.dtype, gradient.count, seed.step);
  call.gradient = gradient.data;
  call.residual = residual;
  call.dtype = gradient.dtype;
  call.count = gradient.count;
  call.payload = payload.data();
  call.workspace = aligned_workspace(workspace);
  call.seed = seed;
  call.step = step;
  return call;
}

kernels::cuda::DecodeCall decode_call(const CodecSpec& spec, const std::byte* payload, DType gradient, Vec out,
                                      float scale, Bytes workspace, uint64_t* fault) noexcept {
  kernels::cuda::DecodeCall call{};
  call.spec = spec;
  call.header = codecs::make_header(spec, gradient, out.count, 0);
  call.payload = payload;
  call.gradient = gradient;
  call.dtype = out.dtype;
  call.out = out.data;
  call.count = out.count;
  call.scale = scale;
  call.workspace = aligned_workspace(workspace);
  call.fault = fault;
  return call;
}

}  // namespace

Status available(Message* why) noexcept {
  return kernels::cuda::plugin(why) == nullptr ? Status{StatusCode::unsupported} : Status{};
}

bool takes(const CodecSpec& spec, DType gradient) noexcept {
  const Plugin* plugin = kernels::cuda::plugin();
  return plugin != nullptr && takes_with(*plugin, spec, gradient);
}

size_t workspace_bytes(const CodecSpec& spec, DType gradient, size_t count) noexcept {
  const Plugin* plugin = kernels::cuda::plugin();
  if (plugin == nullptr || !takes_with(*plugin, spec, gradient)) return 0;
  return workspace_with(*plugin, spec, gradient, count);
}

Status encode(const CodecSpec& spec, const EncodeArgs& args, Stream stream) noexcept {
  const Plugin* plugin = kernels::cuda::plugin();
  if (plugin == nullptr) return StatusCode::unsupported;
  GRADGATE_TRY(check_encode(*plugin, spec, args.gradient, args.residual, args.payload, args.workspace));
  if (!aligned(args.step, 4) || !aligned(args.non_finite, 8) || !aligned(args.threshold, 4))
    return StatusCode::invalid_argument;
  kernels::cuda::EncodeCall call =
      encode_call(spec, args.gradient, args.residual, args.payload, args.workspace, args.seed, args.step);
  call.flush = args.flush;
  call.non_finite = args.non_finite;
  call.threshold = args.threshold;
  return launched(plugin->encode(call, stream));
}

Status decode(const CodecSpec& spec, const DecodeArgs& args, Stream stream) noexcept {
  const Plugin* plugin = kernels::cuda::plugin();
  if (plugin == nullptr) return StatusCode::unsupported;
  if (!codecs::valid_spec(spec) || args.fault == nullptr || !aligned(args.fault, 8))
    return StatusCode::invalid_argument;
  if (!takes_with(*plugin, spec, args.gradient)) return StatusCode::unsupported;
  const Vec out = args.out;
  if (spec.id == CodecId::none) {
    if (out.dtype != args.gradient) return StatusCode::invalid_argument;
    const bool copies = args.scale == 1.0f && args.into == Into::store;
    if (!copies && !widens_to_f32(out.dtype)) return StatusCode::unsupported;
  } else if (!widens_to_f32(out.dtype)) {
    return StatusCode::unsupported;
  }
  if (!readable(out.data, out.count, out.dtype)) return StatusCode::invalid_argument;
  const size_t bytes = payload_bytes(spec, args.gradient, out.count);
  if (bytes == 0) return StatusCode::invalid_argument;
  if (args.payload.data() == nullptr || args.payload.size() != bytes)
    return {StatusCode::bad_payload, static_cast<int64_t>(PayloadFault::size)};
  if (!aligned(args.payload.data(), codecs::kSectionAlign))
    return {StatusCode::bad_payload, static_cast<int64_t>(PayloadFault::alignment)};
  if (overlap(args.payload.data(), bytes, out.data, out.count * dtype_bytes(out.dtype)))
    return StatusCode::invalid_argument;
  GRADGATE_TRY(check_workspace(*plugin, spec, args.gradient, out.count, args.workspace));
  kernels::cuda::DecodeCall call =
      decode_call(spec, args.payload.data(), args.gradient, out, args.scale, args.workspace, args.fault);
  call.add = args.into == Into::add;
  return launched(plugin->decode(call, stream));
}

Status decode_sum(const CodecSpec& spec, const DecodeSumArgs& args, Stream stream) noexcept {
  const Plugin* plugin = kernels::cuda::plugin();
  if (plugin == nullptr) return StatusCode::unsupported;
  const Vec out = args.out;
  if (!codecs::valid_spec(spec) || args.fault == nullptr || !aligned(args.fault, 8) || args.ranks == 0)
    return StatusCode::invalid_argument;
  if (!takes_with(*plugin, spec, args.gradient)) return StatusCode::unsupported;
  if (!widens_to_f32(args.gradient) || !widens_to_f32(out.dtype)) return StatusCode::unsupported;
  if (!readable(out.data, out.count, out.dtype)) return StatusCode::invalid_argument;
  const size_t bytes = payload_bytes(spec, args.gradient, out.count);
  if (bytes == 0) return StatusCode::invalid_argument;
  GRADGATE_TRY(check_slots(args.payloads, args.stride, args.ranks, bytes));
  if (overlap(args.payloads, args.stride * (args.ranks - 1) + bytes, out.data, out.count * dtype_bytes(out.dtype)))
    return StatusCode::invalid_argument;
  GRADGATE_TRY(check_workspace(*plugin, spec, args.gradient, out.count, args.workspace));
  kernels::cuda::DecodeCall call =
      decode_call(spec, args.payloads, args.gradient, out, args.scale, args.workspace, args.fault);
  call.stride = args.stride;
  call.ranks = args.ranks;
  return launched(plugin->decode(call, stream));
}

Status reduce_encode(const CodecSpec& spec, const ReduceArgs& args, Stream stream) noexcept {
  const Plugin* plugin = kernels::cuda::plugin();
  if (plugin == nullptr) return StatusCode::unsupported;
  GRADGATE_TRY(check_encode(*plugin, spec, args.gradient, args.residual, args.payload, args.workspace));
  // Sums are formed in f32, and of shards.
  if (!widens_to_f32(args.gradient.dtype) || !codec_travels_by(spec, Exchange::two_shot))
    return StatusCode::unsupported;
  const size_t bytes = payload_bytes(spec, args.gradient.dtype, args.gradient.count);
  if (args.fault == nullptr || !aligned(args.fault, 8) || !aligned(args.step, 4) || !aligned(args.non_finite, 8) ||
      args.ranks == 0 || args.self >= args.ranks)
    return StatusCode::invalid_argument;
  if (args.ranks > 1) {
    GRADGATE_TRY(check_slots(args.payloads, args.stride, args.ranks, bytes));
    if (overlap(args.payload.data(), bytes, args.payloads, args.stride * (args.ranks - 1) + bytes))
      return StatusCode::invalid_argument;
  }
  kernels::cuda::EncodeCall call =
      encode_call(spec, args.gradient, args.residual, args.payload, args.workspace, args.seed, args.step);
  call.non_finite = args.non_finite;
  call.terms = args.payloads;
  call.stride = args.stride;
  call.ranks = args.ranks;
  call.self = args.self;
  call.fault = args.fault;
  return launched(plugin->encode(call, stream));
}

Status check_indices(const CodecSpec& spec, DType gradient, size_t count, const std::byte* payloads, size_t stride,
                     unsigned ranks, unsigned self, unsigned first_rank, Bytes workspace, uint64_t* fault,
                     Stream stream) noexcept {
  const Plugin* plugin = kernels::cuda::plugin();
  if (plugin == nullptr || !takes_with(*plugin, spec, gradient)) return StatusCode::unsupported;
  GRADGATE_TRY(check_workspace(*plugin, spec, gradient, count, workspace));
  kernels::cuda::DecodeCall call{};
  call.spec = spec;
  call.header = codecs::make_header(spec, gradient, count, 0);
  call.payload = payloads;
  call.gradient = gradient;
  call.count = count;
  call.workspace = aligned_workspace(workspace);
  call.fault = fault;
  return launched(plugin->check_indices(call, stride, ranks, self, first_rank, stream));
}

Status fold_residual(Vec gradient, float* residual, Stream stream) noexcept {
  const Plugin* plugin = kernels::cuda::plugin();
  if (plugin == nullptr || !widens_to_f32(gradient.dtype)) return StatusCode::unsupported;
  if (!readable(gradient.data, gradient.count, gradient.dtype) || !readable(residual, gradient.count, DType::f32) ||
      overlap(gradient.data, gradient.count * dtype_bytes(gradient.dtype), residual, gradient.count * sizeof(float)))
    return StatusCode::invalid_argument;
  return launched(plugin->fold(gradient.data, residual, gradient.count, gradient.dtype, stream));
}

Status fault_status(uint64_t fault, unsigned* rank) noexcept {
  if ((fault & kernels::cuda::kFaultSet) == 0) return {};
  if (rank != nullptr) *rank = static_cast<unsigned>(fault >> 16 & 0xffffffffu);
  const uint64_t what = fault >> 8 & 0xff;
  if (what == kernels::cuda::kFaultStep) return StatusCode::peer_mismatch;
  if (what == kernels::cuda::kFaultPeer) return {StatusCode::peer_failed, static_cast<int64_t>(fault & 0xff)};
  return {StatusCode::bad_payload, static_cast<int64_t>(what)};
}

}  // namespace gradgate::device
