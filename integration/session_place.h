// Where a session's vectors live, and the little that happens to them outside of exchanges: host memory at once, device
// memory enqueued on the session's stream.
#pragma once

#include <memory>

#include "gradgate/communicator.h"
#include "kernels/cuda/runtime.h"

namespace gradgate {

/// Bytes that a Place allocated.
class Memory {
 public:
  std::byte* data() const noexcept { return bytes_.get(); }
  size_t size() const noexcept { return size_; }
  float* floats() const noexcept { return reinterpret_cast<float*>(bytes_.get()); }

 private:
  friend class Place;
  struct Free {
    const kernels::cuda::Runtime* cuda;  ///< null: host memory
    Free() noexcept : cuda(nullptr) {}
    explicit Free(const kernels::cuda::Runtime* runtime) noexcept : cuda(runtime) {}
    void operator()(std::byte* memory) const noexcept;
  };
  std::unique_ptr<std::byte, Free> bytes_;
  size_t size_ = 0;
};

class Place {
 public:
  Place() = default;
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  /// Device memory of the current device, a stream of the session's own, waits through `comm`.
  Status use_device(Communicator& comm, double timeout_s, Message* why) noexcept;
  bool on_device() const noexcept { return cuda_ != nullptr; }
  const kernels::cuda::Runtime& cuda() const noexcept { return *cuda_; }
  Stream stream() const noexcept { return {stream_}; }
  /// Another one, for waiting: nothing is ever enqueued on it but that.
  Stream idle() const noexcept { return {idle_}; }

  /// Fresh memory of this many bytes, contents undefined; out_of_memory.
  Status allocate(size_t bytes, Memory* memory) const noexcept;
  Status zero(void* memory, size_t bytes) const noexcept;
  /// Within the place.
  Status copy(void* to, const void* from, size_t bytes) const noexcept;
  /// From the place to host memory and back; complete on return.
  Status read(void* to, const void* from, size_t bytes) const noexcept;
  Status write(void* to, const void* from, size_t bytes) const noexcept;
  /// v · ratio, rounded once.
  Status scale(float* vector, size_t count, double ratio) const noexcept;

 private:
  Status crossed(int error) const noexcept;

  const kernels::cuda::Runtime* cuda_ = nullptr;
  Communicator* comm_ = nullptr;
  double timeout_s_ = 0;
  void* stream_ = nullptr;
  void* idle_ = nullptr;
};

}  // namespace gradgate
