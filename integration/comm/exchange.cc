// What all exchanges share: sizes, checks of the arguments, and the dense all_reduce, which is what a trainer does
// without gradgate.
#include "gradgate/exchange.h"

#include "integration/comm/all_gather_layout.h"
#include "integration/comm/all_reduce_layout.h"
#include "integration/comm/hierarchical_layout.h"
#include "integration/comm/slot.h"
#include "integration/comm/two_shot_layout.h"

namespace gradgate {
namespace {

bool all_reduce_takes(DType dtype) noexcept {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::f64;
}

// Empty `why` and ok, or what is wrong with a shape.
Status check_shape(const ExchangeShape& shape, Message* why) noexcept {
  const CodecSpec& codec = shape.candidate.codec;
  if (shape.ranks < 1 || shape.rank < 0 || shape.rank >= shape.ranks) {
    why->format("rank %d of %d ranks", shape.rank, shape.ranks);
    return StatusCode::invalid_argument;
  }
  // A hierarchical exchange encodes what its exchange between nodes does: that shape is looked at below.
  if (shape.device && shape.candidate.exchange != Exchange::hierarchical && !comm::on_device::takes(shape)) {
    why->format("no kernels on this device for %s with %s gradients", format_codec(codec).text,
                dtype_name(shape.dtype));
    return StatusCode::unsupported;
  }
  if (shape.candidate.exchange == Exchange::all_reduce) {
    if (codec == CodecSpec{} && all_reduce_takes(shape.dtype)) return {};
    const bool adds = codec.id != CodecId::none && codec_travels_by(codec, Exchange::all_reduce);
    if (adds && codec_takes(codec, shape.dtype)) {
      if (comm::AllReduceBuffers(shape, nullptr).bytes != 0) return {};
      why->format("%s cannot encode %zu elements", format_codec(codec).text, shape.count);
      return StatusCode::invalid_argument;
    }
    why->format("%s does not travel by all_reduce with %s gradients", format_codec(codec).text,
                dtype_name(shape.dtype));
    return StatusCode::unsupported;
  }
  const Exchange exchange = shape.candidate.exchange;
  if (exchange != Exchange::two_shot && exchange != Exchange::all_gather && exchange != Exchange::hierarchical) {
    why->format("the exchange %s is not offered", exchange_name(exchange));
    return StatusCode::unsupported;
  }
  if (exchange == Exchange::hierarchical) {
    if (shape.ranks_per_node < 1 || shape.ranks % shape.ranks_per_node != 0) {
      why->format("%d ranks are not equal nodes of %d ranks", shape.ranks, shape.ranks_per_node);
      return StatusCode::invalid_argument;
    }
    if (!widens_to_f32(shape.dtype)) {
      why->format("hierarchical takes no %s gradients", dtype_name(shape.dtype));
      return StatusCode::unsupported;
    }
    if (shape.candidate.between == Exchange::hierarchical) {
      why->format("hierarchical has two tiers, not more");
      return StatusCode::unsupported;
    }
    if (comm::HierarchicalBuffers(shape, nullptr).bytes == 0) {
      why->format("%s cannot encode %zu elements", format_codec(codec).text, shape.count);
      return StatusCode::invalid_argument;
    }
    return check_shape(comm::NodeShard(shape).between(), why);
  }
  if (!codec_travels_by(codec, shape.candidate.exchange)) {
    why->format("%s does not travel by %s", format_codec(codec).text, exchange_name(shape.candidate.exchange));
    return StatusCode::unsupported;
  }
  if (!codec_takes(codec, shape.dtype) || !widens_to_f32(shape.dtype)) {
    why->format("%s does not travel by %s with %s gradients", format_codec(codec).text,
                exchange_name(shape.candidate.exchange), dtype_name(shape.dtype));
    return StatusCode::unsupported;
  }
  const bool sized = shape.candidate.exchange == Exchange::two_shot ? comm::Shards(shape).slot_bytes != 0
                                                                    : comm::AllGatherBuffers(shape, nullptr).bytes != 0;
  if (!sized) {
    why->format("%s cannot encode %zu elements", format_codec(codec).text, shape.count);
    return StatusCode::invalid_argument;
  }
  return {};
}

Status check_feedback(const ExchangeArgs& args, Message* why) noexcept {
  const ExchangeShape& shape = args.shape;
  if (args.feedback == Feedback::none) return {};
  const Exchange carrier =
      shape.candidate.exchange == Exchange::hierarchical ? shape.candidate.between : shape.candidate.exchange;
  const bool dense = carrier == Exchange::all_reduce && shape.candidate.codec.id == CodecId::none;
  const bool allowed = args.feedback == Feedback::flush ? dense : !dense && shape.candidate.codec.id != CodecId::none;
  if (!allowed && shape.ranks > 1) {  // one rank encodes nothing: both mean g + e
    why->format("%s over %s takes no Feedback::%s", format_codec(shape.candidate.codec).text,
                exchange_name(shape.candidate.exchange), args.feedback == Feedback::flush ? "flush" : "apply");
    return StatusCode::invalid_argument;
  }
  if (!widens_to_f32(shape.dtype)) {
    why->format("%s gradients have no residual", dtype_name(shape.dtype));
    return StatusCode::invalid_argument;
  }
  if (args.residual == nullptr && shape.count != 0) {
    why->format("feedback without a residual");
    return StatusCode::invalid_argument;
  }
  return {};
}

Status check_args(const ExchangeArgs& args, Message* why) noexcept {
  GRADGATE_TRY(check_shape(args.shape, why));
  if (args.gradient.count != args.shape.count || args.gradient.dtype != args.shape.dtype) {
    why->format("the gradient has %zu x %s, the shape %zu x %s", args.gradient.count, dtype_name(args.gradient.dtype),
                args.shape.count, dtype_name(args.shape.dtype));
    return StatusCode::invalid_argument;
  }
  if (args.gradient.data == nullptr && args.shape.count != 0) {
    why->format("null gradient with count %zu", args.shape.count);
    return StatusCode::invalid_argument;
  }
  if (args.shape.device != (args.device != nullptr) || (args.device != nullptr && args.device->record == nullptr)) {
    why->format("a shape in device memory needs ExchangeArgs::device with a record, one in host memory has none");
    return StatusCode::invalid_argument;
  }
  if (args.device != nullptr && args.shape.candidate.exchange == Exchange::hierarchical &&
      args.device->between == nullptr) {
    why->format("hierarchical in device memory needs DevicePlace::between");
    return StatusCode::invalid_argument;
  }
  GRADGATE_TRY(check_feedback(args, why));
  const size_t needed = exchange_workspace_bytes(args.shape);
  if (args.workspace.size() < needed) {
    why->format("workspace of %zu bytes, %zu are needed", args.workspace.size(), needed);
    return {StatusCode::workspace_too_small, static_cast<int64_t>(needed)};
  }
  return {};
}

}  // namespace

Candidate default_candidate(const CodecSpec& codec) noexcept {
  return {codec, codec_info(codec.id).exchange, Exchange::all_reduce};
}

size_t exchange_workspace_bytes(const ExchangeShape& shape) noexcept {
  Message ignored;
  if (!check_shape(shape, &ignored).ok() || shape.ranks == 1 || shape.count == 0) return 0;
  if (shape.candidate.exchange == Exchange::all_reduce)
    return shape.candidate.codec.id == CodecId::none ? 0 : comm::AllReduceBuffers(shape, nullptr).bytes;
  if (shape.candidate.exchange == Exchange::hierarchical) return comm::HierarchicalBuffers(shape, nullptr).bytes;
  if (shape.candidate.exchange == Exchange::all_gather) return comm::AllGatherBuffers(shape, nullptr).bytes;
  return comm::TwoShotBuffers(shape, comm::Shards(shape), nullptr).bytes;
}

size_t exchange_wire_bytes(const ExchangeShape& shape) noexcept {
  Message ignored;
  if (!check_shape(shape, &ignored).ok()) return 0;
  if (shape.candidate.exchange == Exchange::hierarchical) {  // of the first shard, the longest, for all of them
    const comm::NodeShard part(shape);
    ExchangeShape first = part.between();
    first.count = part.count_of(0);
    return static_cast<size_t>(part.per_node) * exchange_wire_bytes(first);
  }
  if (shape.candidate.exchange == Exchange::all_reduce) {
    if (shape.candidate.codec.id != CodecId::none) return comm::AllReduceBuffers(shape, nullptr).sum_bytes();
    size_t bytes = 0;
    return __builtin_mul_overflow(shape.count, dtype_bytes(shape.dtype), &bytes) ? 0 : bytes;
  }
  if (shape.candidate.exchange == Exchange::all_gather)
    return payload_bytes(shape.candidate.codec, shape.dtype, shape.count);
  return static_cast<size_t>(shape.ranks) * comm::Shards(shape).slot_bytes;
}

Status ExchangeMachine::begin(const ExchangeArgs& args) noexcept {
  ExchangeArgs whole = args;
  whole.seed.first = 0;
  return start(whole, args.shape.ranks);
}

Status ExchangeMachine::start(const ExchangeArgs& args, int divisor) noexcept {
  *this = {};
  args_ = args;
  divisor_ = divisor;
  GRADGATE_TRY(check_args(args, &error_));
  if (dense()) {
    GRADGATE_TRY(begin_dense());
  } else if (args.shape.candidate.exchange == Exchange::all_reduce) {
    begin_all_reduce();
  } else if (args.shape.candidate.exchange == Exchange::hierarchical) {
    begin_hierarchical();
  } else if (args.shape.candidate.exchange == Exchange::all_gather) {
    begin_all_gather();
  } else {
    begin_two_shot();
  }
  phase_ = Phase::ready;
  return {};
}

Status ExchangeMachine::next(CollectiveCall* call) noexcept {
  if (call == nullptr) return StatusCode::invalid_argument;
  *call = {};
  if (phase_ == Phase::idle) {
    error_.format("next() without begin()");
    return StatusCode::bad_state;
  }
  if (phase_ == Phase::done) return failed_;
  if (dense()) return next_dense(call);
  if (args_.shape.candidate.exchange == Exchange::all_reduce) return next_all_reduce(call);
  if (args_.shape.candidate.exchange == Exchange::hierarchical) return next_hierarchical(call);
  if (args_.shape.candidate.exchange == Exchange::all_gather) return next_all_gather(call);
  return next_two_shot(call);
}

void ExchangeMachine::fail(StatusCode code) noexcept {
  if (phase_ == Phase::idle || phase_ == Phase::done) return;
  const Status status = code == StatusCode::ok ? StatusCode::internal : code;
  Message text;
  text.format("%s over %s: rank %d failed: %s", format_codec(args_.shape.candidate.codec).text,
              exchange_name(args_.shape.candidate.exchange), args_.shape.rank, status.message());
  blame(status, text.text);
}

void ExchangeMachine::blame(Status status, const char* text) noexcept {
  if (!failed_.ok()) return;
  failed_ = status;
  told_ = phase_ != Phase::done || status.code() == StatusCode::peer_failed;
  error_.format("%s", text);
}

bool ExchangeMachine::dense() const noexcept {
  const ExchangeShape& shape = args_.shape;
  return shape.ranks == 1 || shape.count == 0 ||
         (shape.candidate.exchange == Exchange::all_reduce && shape.candidate.codec.id == CodecId::none);
}

// Scale, then sum: what DDP does to a bucket when there is no hook. A flush adds the residual before. Also every
// exchange of one rank or of no elements, which ends here.
Status ExchangeMachine::begin_dense() noexcept {
  if (args_.feedback != Feedback::none && args_.shape.count != 0) {
    const Status status = comm::fold_part(args_);
    if (!status.ok()) {
      error_.format("all_reduce: folding the residual: %s", status.message());
      return status;
    }
  }
  return divisor_ > 1 ? comm::scale_vector(args_, divisor_) : Status{};
}

Status ExchangeMachine::next_dense(CollectiveCall* call) noexcept {
  const bool alone = args_.shape.ranks == 1 || args_.shape.count == 0;
  if (phase_ == Phase::ready && failed_.ok() && !alone) {
    phase_ = Phase::stage1;
    *call = {Collective::all_reduce, args_.gradient.data, args_.gradient.data, args_.shape.count, args_.shape.dtype};
    return {};
  }
  phase_ = Phase::done;
  return failed_;
}

}  // namespace gradgate
