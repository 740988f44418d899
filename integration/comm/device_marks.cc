// Marks between the parts of an exchange on a stream.
#include <utility>

#include "gradgate/device_exchange.h"
#include "kernels/cuda/runtime.h"

namespace gradgate {

using kernels::cuda::runtime;

DeviceMarks::~DeviceMarks() {
  const auto* cuda = runtime();
  for (void* event : events_) {
    if (event != nullptr && cuda != nullptr) cuda->destroy_event(event);
  }
}

DeviceMarks::DeviceMarks(DeviceMarks&& other) noexcept { *this = std::move(other); }

DeviceMarks& DeviceMarks::operator=(DeviceMarks&& other) noexcept {
  std::swap(events_, other.events_);
  std::swap(parts_, other.parts_);
  std::swap(used_, other.used_);
  std::swap(failed_, other.failed_);
  return *this;
}

Status DeviceMarks::create() noexcept {
  const auto* cuda = runtime();
  if (cuda == nullptr) return StatusCode::unsupported;
  for (void*& event : events_) {
    if (event != nullptr) continue;
    if (const int error = cuda->create_event(&event); error != 0) return {StatusCode::internal, error};
  }
  return {};
}

void DeviceMarks::begin(Stream stream) noexcept {
  used_ = 0;
  failed_ = false;
  mark(Part::encode, stream);
}

void DeviceMarks::mark(Part part, Stream stream) noexcept {
  if (used_ == kMost || events_[used_] == nullptr || runtime()->record(events_[used_], stream.handle) != 0) {
    failed_ = true;
    return;
  }
  parts_[used_++] = part;
}

bool DeviceMarks::complete() const noexcept {
  bool done = false;
  return !failed_ && used_ > 0 && runtime()->query(events_[used_ - 1], &done) == 0 && done;
}

Status DeviceMarks::wait(Communicator& comm, Stream idle, Deadline deadline, Part* pending) const noexcept {
  for (int i = 0; i < used_; ++i) {
    bool done = false;
    *pending = parts_[i];
    int error = runtime()->query(events_[i], &done);
    if (error == 0 && !done) error = runtime()->wait_event(idle.handle, events_[i]);
    if (error != 0) return {StatusCode::internal, error};
    if (!done) GRADGATE_TRY(comm.wait(idle, deadline));
  }
  return {};
}

Status DeviceMarks::read(ExchangeTimes* times) const noexcept {
  bool done = false;
  if (failed_ || (used_ > 0 && runtime()->query(events_[used_ - 1], &done) != 0)) return StatusCode::internal;
  if (!done) return StatusCode::bad_state;
  for (int i = 1; i < used_; ++i) {
    double seconds = 0;
    if (const int error = runtime()->elapsed(events_[i - 1], events_[i], &seconds); error != 0)
      return {StatusCode::internal, error};
    (parts_[i] == Part::encode     ? times->encode_s
     : parts_[i] == Part::transfer ? times->transfer_s
                                   : times->decode_s) += seconds;
  }
  return {};
}

Status DeviceMarks::since(const DeviceMarks& earlier, double* seconds) const noexcept {
  if (failed_ || earlier.failed_) return StatusCode::internal;
  if (used_ == 0 || earlier.used_ == 0 || !complete() || !earlier.complete()) return StatusCode::bad_state;
  const int error = runtime()->elapsed(earlier.events_[earlier.used_ - 1], events_[used_ - 1], seconds);
  return error == 0 ? Status{} : Status{StatusCode::internal, error};
}

}  // namespace gradgate
