// The session under loss scaling: residuals follow the scale of the gradients, and a step that the scaler skips leaves
// them as they were. Also steps whose buckets the layout does not know.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "integration/session_impl.h"

namespace gradgate {
namespace {

/// Whether an element is Inf or NaN: its exponent bits are all set.
template <class Word>
bool any_with_exponent(const void* data, size_t count, Word exponent) noexcept {
  const auto* bytes = static_cast<const std::byte*>(data);
  Word found = 0;
  for (size_t i = 0; i < count; ++i) {
    Word word;
    std::memcpy(&word, bytes + i * sizeof(Word), sizeof(Word));
    found |= static_cast<Word>((word & exponent) == exponent);
  }
  return found != 0;
}

bool any_non_finite(const Vec& v) noexcept {
  switch (v.dtype) {
    case DType::f32:
      return any_with_exponent<uint32_t>(v.data, v.count, 0x7f800000u);
    case DType::bf16:
      return any_with_exponent<uint16_t>(v.data, v.count, 0x7f80u);
    case DType::f16:
      return any_with_exponent<uint16_t>(v.data, v.count, 0x7c00u);
    case DType::f64:
      return any_with_exponent<uint64_t>(v.data, v.count, 0x7ff0000000000000ull);
    case DType::u8:
      return false;
  }
  return false;
}

}  // namespace

Status SessionImpl::set_gradient_scale(double scale) noexcept {
  if (failed_) return refuse(StatusCode::bad_state, "this session failed before: %s", error_.text);
  if (next_bucket_ != 0 || unplanned_)
    return refuse(StatusCode::bad_state, "set_gradient_scale within a step (bucket %u is next); call it between steps",
                  next_bucket_);
  if (!std::isfinite(scale) || !(scale > 0))
    return refuse(StatusCode::invalid_argument, "gradient scale %g, accepted: finite and positive", scale);
  GRADGATE_TRY(settle());
  if (!scaled_) {
    if (!place_.allocate(residuals_.size(), &before_).ok())
      return refuse(StatusCode::out_of_memory, "set_gradient_scale: memory for a second copy of the residuals");
    scaled_ = true;
  }
  const double ratio = scale / gradient_scale_;
  gradient_scale_ = scale;
  if (ratio == 1) return {};
  return place_.scale(residuals_.floats(), residuals_.size() / sizeof(float), ratio);
}

Status SessionImpl::skip_step() noexcept {
  if (!scaled_)
    return refuse(StatusCode::bad_state, "skip_step without set_gradient_scale: there is no second residual");
  skip_step_ = true;
  return {};
}

Status SessionImpl::save_residual(Bucket& bucket) noexcept {
  if (!scaled_) return {};
  GRADGATE_TRY(
      place_.copy(before_.floats() + bucket.residual_offset, residual_of(bucket), bucket.count * sizeof(float)));
  bucket.pending_before = bucket.pending;
  bucket.saved = true;
  return {};
}

void SessionImpl::watch_result(const Vec& gradient) noexcept {
  if (scaled_ && !skip_step_) skip_step_ = any_non_finite(gradient);
}

Status SessionImpl::take_back(Bucket& bucket) noexcept {
  bucket.pending = bucket.pending_before;
  return place_.copy(residual_of(bucket), before_.floats() + bucket.residual_offset, bucket.count * sizeof(float));
}

// Results are identical on all ranks, so all of them take back the same steps.
Status SessionImpl::settle_residuals() noexcept {
  for (Bucket& bucket : buckets_) {
    if (skip_step_ && bucket.saved) GRADGATE_TRY(take_back(bucket));
    bucket.saved = false;
  }
  if (skip_step_) ++stats_.skipped_steps;
  skip_step_ = false;
  return {};
}

void SessionImpl::bucket_ready(uint32_t index, double ready_s) noexcept {
  if (index < buckets_.size()) buckets_[index].ready_s = ready_s;
}

void SessionImpl::record_ready(uint32_t index) noexcept {
  Bucket& bucket = buckets_[index];
  if (index == 0) first_ready_s_ = bucket.ready_s;
  gate_.record_ready(index, std::max(bucket.ready_s - first_ready_s_, 0.0));
  bucket.ready_s = std::numeric_limits<double>::quiet_NaN();
}

Status SessionImpl::all_reduce_dense(Vec gradient, Stream stream) noexcept {
  if (failed_) return refuse(StatusCode::bad_state, "this session failed before: %s", error_.text);
  if (gradient.data == nullptr && gradient.count > 0)
    return refuse(StatusCode::invalid_argument, "all_reduce_dense: %zu elements at a null address", gradient.count);
  Message where;
  where.format("dense bucket outside the layout, step %llu", static_cast<unsigned long long>(step_));
  if (place_.on_device()) return enqueue_dense(gradient, stream, where);
  if (stream.handle != nullptr)
    return refuse(StatusCode::invalid_argument, "a stream, but the communicator is one of host memory");
  GRADGATE_TRY(finish_left());
  GRADGATE_TRY(reduce_dense(gradient, where));
  unplanned_ = true;
  return {};
}

Status SessionImpl::end_unplanned_step() noexcept {
  GRADGATE_TRY(settle_residuals());
  unplanned_ = false;
  timed_step_ = false;
  next_bucket_ = 0;
  ++step_;
  ++stats_.steps;
  return {};
}

}  // namespace gradgate
