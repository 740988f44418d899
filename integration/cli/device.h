// --device cuda: whether there is one, and memory on it.
#pragma once

#include <cstddef>
#include <string>

#include "gradgate/device_exchange.h"
#include "integration/cli/options.h"
#include "kernels/cuda/runtime.h"

namespace gradgate::cli {

enum class Device { cpu, cuda };

/// --device cpu|cuda of a subcommand.
void add_device_option(OptionSet& options, Device* device);
/// Throws RunError, "no CUDA device: …", where nothing can run on one.
const kernels::cuda::Runtime& require_cuda();
/// CUDA devices of this process, at least one after require_cuda().
int cuda_devices();
/// Name of the current device, its driver's and the runtime's version, and NCCL's: for headers of tables.
std::string cuda_text();
/// "2.30.7".
std::string nccl_text(int version);
/// What CUDA and NCCL this program finds, one line each; for --version.
std::string libraries_text();
/// Throws RunError naming `what` where CUDA returned an error.
void require_cuda_ok(int error, const char* what);

/// Memory of the device that is current where it is made. Throws RunError.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t bytes);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept { swap(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  size_t size() const { return bytes_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void swap(DeviceMemory& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

/// A stream of the current device.
class DeviceStream {
 public:
  DeviceStream();
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
  Stream get() const { return {stream_}; }
  void* handle() const { return stream_; }

 private:
  void* stream_ = nullptr;
};

/// Takes the time of what is enqueued on a stream of its own, by events. Throws RunError where the device fails.
class DeviceClock {
 public:
  DeviceClock();
  Stream stream() const { return stream_.get(); }
  /// For what marks its own parts (enqueue_exchange, enqueue_shadow): followed by parts() instead of stop().
  DeviceMarks& marks() { return marks_; }
  void start() { marks_.begin(stream()); }
  /// Seconds since start(), once the stream is through.
  double stop();
  /// The times of the parts that were marked, once the stream is through.
  ExchangeTimes parts();

 private:
  DeviceStream stream_;
  DeviceMarks marks_;
};

}  // namespace gradgate::cli
