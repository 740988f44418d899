// Device memory for tests, and the skip where there is no device.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "gradgate/device.h"

namespace gradgate::test {

inline std::string cuda_error(cudaError_t error) { return cudaGetErrorString(error); }
#define ASSERT_CUDA(expression)                                                  \
  do {                                                                           \
    const cudaError_t error_ = (expression);                                     \
    ASSERT_EQ(error_, cudaSuccess) << #expression << ": " << cuda_error(error_); \
  } while (0)

// Where this build put the library; an installed one lies beside libgradgate.
inline const int kLibrary = setenv("GRADGATE_CUDA_LIBRARY", GRADGATE_CUDA_LIBRARY, 0);

/// Skips without a device, or fails where GRADGATE_REQUIRE_GPU=1 forbids to skip.
class Gpu : public ::testing::Test {
 protected:
  void SetUp() override {
    Message why;
    if (device::available(&why).ok()) {
      ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
      return;
    }
    const char* require = std::getenv("GRADGATE_REQUIRE_GPU");
    if (require != nullptr && std::strcmp(require, "1") == 0) FAIL() << "GRADGATE_REQUIRE_GPU=1: " << why.text;
    GTEST_SKIP() << why.text;
  }
  void TearDown() override {
    if (stream_ != nullptr) {
      EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
    }
  }
  cudaStream_t stream_ = nullptr;
};

/// Memory on the device with canaries around it. `shift`: bytes from a 256-byte boundary.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes, size_t shift = 0) : bytes_(bytes), shift_(kGuard + shift) {
    host_.assign(shift_ + bytes + kGuard, kCanary);
    if (cudaMalloc(&data_, host_.size()) != cudaSuccess) throw std::string("cudaMalloc failed");
    upload();
  }
  DeviceBuffer(const void* from, size_t bytes, size_t shift = 0) : DeviceBuffer(bytes, shift) {
    if (bytes > 0) std::memcpy(host_.data() + shift_, from, bytes);
    upload();
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  std::byte* data() { return static_cast<std::byte*>(data_) + shift_; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  size_t size() const { return bytes_; }

  /// What the device holds now. The stream that wrote it must have been waited for.
  const std::byte* fetch() {
    if (cudaMemcpy(host_.data(), data_, host_.size(), cudaMemcpyDeviceToHost) != cudaSuccess)
      throw std::string("cudaMemcpy failed");
    return host_.data() + shift_;
  }
  /// What the last fetch brought.
  const std::byte* data_on_host() const { return host_.data() + shift_; }
  /// Whether the canaries still stand, as of the last fetch.
  bool intact() const {
    for (size_t i = 0; i < host_.size(); ++i) {
      if ((i < shift_ || i >= shift_ + bytes_) && host_[i] != kCanary) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 256;
  static constexpr std::byte kCanary{0xa5};

  void upload() {
    if (cudaMemcpy(data_, host_.data(), host_.size(), cudaMemcpyHostToDevice) != cudaSuccess)
      throw std::string("cudaMemcpy failed");
  }

  void* data_ = nullptr;
  size_t bytes_, shift_;
  std::vector<std::byte> host_;
};

}  // namespace gradgate::test
