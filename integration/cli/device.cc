#include "integration/cli/device.h"

#include <thread>

#include "gradgate/nccl.h"
#include "integration/cli/error.h"
#include "kernels/cuda/library.h"

namespace gradgate::cli {

void add_device_option(OptionSet& options, Device* device) {
  options.add("--device", "cpu", "DEVICE", "cpu, or cuda: codecs as kernels, ranks over NCCL",
              [device](const std::string& option, const std::string& text) {
                if (text != "cpu" && text != "cuda") throw UsageError(option + ": '" + text + "' is not a device, accepted: cpu, cuda");
                *device = text == "cuda" ? Device::cuda : Device::cpu;
              });
}

const kernels::cuda::Runtime& require_cuda() {
  Message why;
  const kernels::cuda::Runtime* cuda = kernels::cuda::runtime(&why);
  if (cuda == nullptr) throw RunError(std::string("--device cuda: ") + why.text);
  return *cuda;
}

int cuda_devices() {
  int count = 0;
  const kernels::cuda::Plugin* plugin = kernels::cuda::plugin();
  return plugin != nullptr && plugin->device_count(&count) == 0 && count > 0 ? count : 0;
}

void require_cuda_ok(int error, const char* what) {
  if (error != 0) throw RunError(std::string("CUDA: ") + what + ": " + require_cuda().error_text(error));
}

std::string cuda_text() {
  const kernels::cuda::Runtime& cuda = require_cuda();
  char name[256] = {};
  int driver = 0, runtime = 0;
  require_cuda_ok(cuda.device_name(name, sizeof name), "the device's name");
  require_cuda_ok(cuda.versions(&driver, &runtime), "its version");
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  return std::string(name) + ", CUDA driver " + version(driver) + ", runtime " + version(runtime);
}

std::string nccl_text(int version) { return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100); }

std::string libraries_text() {
  Message no_cuda, no_nccl;
  const bool cuda = kernels::cuda::runtime(&no_cuda) != nullptr;
  const int nccl = nccl_version(&no_nccl);
  return "device: " + (cuda ? cuda_text() : no_cuda.text) + "\nNCCL: " +
         (nccl != 0 ? nccl_text(nccl) + " (written to the interface of " + nccl_text(kOldestNccl) + ")" : no_nccl.text);
}

DeviceMemory::DeviceMemory(size_t bytes) : bytes_(bytes) {
  if (bytes > 0 && require_cuda().allocate(&data_, bytes) != 0)
    throw RunError("out of device memory: " + std::to_string(bytes) + " B; try smaller sizes (-b, -e) or fewer ranks");
}
DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) require_cuda().release(data_);
}

DeviceStream::DeviceStream() { require_cuda_ok(require_cuda().create_stream(&stream_), "a stream"); }
DeviceStream::~DeviceStream() {
  if (stream_ != nullptr) require_cuda().destroy_stream(stream_);
}

DeviceClock::DeviceClock() {
  if (!marks_.create().ok()) throw RunError("CUDA: no events");
}
double DeviceClock::stop() {
  marks_.mark(DeviceMarks::Part::transfer, stream());
  return parts().transfer_s;
}
ExchangeTimes DeviceClock::parts() {
  ExchangeTimes times;
  Status status;
  while ((status = marks_.read(&times)).code() == StatusCode::bad_state) std::this_thread::yield();
  if (!status.ok()) throw RunError("CUDA: the device has failed");
  return times;
}

}  // namespace gradgate::cli
