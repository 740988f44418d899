#include "integration/session_place.h"

#include <cstring>
#include <new>

namespace gradgate {
namespace {

constexpr std::align_val_t kAlign{64};

Status enqueued(int error) noexcept { return error == 0 ? Status{} : Status{StatusCode::internal, error}; }

}  // namespace

void Memory::Free::operator()(std::byte* memory) const noexcept {
  if (cuda != nullptr) {
    cuda->release(memory);
  } else {
    ::operator delete(memory, kAlign);
  }
}

Place::~Place() {
  for (void* stream : {stream_, idle_}) {
    if (stream != nullptr) cuda_->destroy_stream(stream);
  }
}

Status Place::use_device(Communicator& comm, double timeout_s, Message* why) noexcept {
  cuda_ = kernels::cuda::runtime(why);
  if (cuda_ == nullptr) return StatusCode::unsupported;
  comm_ = &comm;
  timeout_s_ = timeout_s;
  int error = cuda_->create_stream(&stream_);
  if (error == 0) error = cuda_->create_stream(&idle_);
  if (error != 0) why->format("streams for the session: %s", cuda_->error_text(error));
  return enqueued(error);
}

Status Place::allocate(size_t bytes, Memory* memory) const noexcept {
  memory->bytes_.reset();
  memory->size_ = 0;
  if (bytes == 0) return {};
  void* fresh = nullptr;
  if (cuda_ != nullptr) {
    if (cuda_->allocate(&fresh, bytes) != 0) return StatusCode::out_of_memory;
  } else {
    fresh = ::operator new(bytes, kAlign, std::nothrow);
    if (fresh == nullptr) return StatusCode::out_of_memory;
  }
  memory->bytes_ = std::unique_ptr<std::byte, Memory::Free>(static_cast<std::byte*>(fresh), Memory::Free(cuda_));
  memory->size_ = bytes;
  return {};
}

Status Place::zero(void* memory, size_t bytes) const noexcept {
  if (bytes == 0) return {};
  if (cuda_ != nullptr) return enqueued(cuda_->fill(memory, 0, bytes, stream_));
  std::memset(memory, 0, bytes);
  return {};
}

Status Place::copy(void* to, const void* from, size_t bytes) const noexcept {
  if (bytes == 0) return {};
  if (cuda_ != nullptr) return enqueued(cuda_->copy(to, from, bytes, stream_));
  std::memcpy(to, from, bytes);
  return {};
}

Status Place::crossed(int error) const noexcept {
  GRADGATE_TRY(enqueued(error));
  return comm_->wait({stream_}, Deadline::after(timeout_s_));
}

Status Place::read(void* to, const void* from, size_t bytes) const noexcept {
  if (bytes == 0) return {};
  if (cuda_ != nullptr) return crossed(cuda_->copy(to, from, bytes, stream_));
  std::memcpy(to, from, bytes);
  return {};
}

Status Place::write(void* to, const void* from, size_t bytes) const noexcept { return read(to, from, bytes); }

Status Place::scale(float* vector, size_t count, double ratio) const noexcept {
  if (cuda_ != nullptr) return enqueued(cuda_->scale_residual(vector, count, ratio, stream_));
  for (size_t i = 0; i < count; ++i) vector[i] = static_cast<float>(vector[i] * ratio);
  return {};
}

}  // namespace gradgate
