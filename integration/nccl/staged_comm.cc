// Host memory over a communicator of devices: in, through and out again, waiting for each.
#include <new>

#include "gradgate/nccl.h"
#include "kernels/cuda/runtime.h"

namespace gradgate {
namespace {

using kernels::cuda::Runtime;

class StagedRank final : public Communicator {
 public:
  StagedRank(Communicator& device, const Runtime& cuda, Stream stream) noexcept
      : device_(device), cuda_(cuda), stream_(stream) {
    description_.format("%.250s, from host memory", device.description());
  }
  ~StagedRank() override {
    if (memory_ != nullptr) cuda_.release(memory_);
  }

  int rank() const noexcept override { return device_.rank(); }
  int size() const noexcept override { return device_.size(); }
  bool supports(Collective op, DType dtype) const noexcept override { return device_.supports(op, dtype); }
  const char* description() const noexcept override { return description_.text; }

  Status all_reduce_sum(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                        Deadline deadline) noexcept override {
    const size_t bytes = count * dtype_bytes(dtype);
    return through(send, bytes, recv, bytes, stream, deadline, [&](std::byte* in, std::byte* out) {
      return device_.all_reduce_sum(in, out, count, dtype, stream_, deadline);
    });
  }
  Status all_gather(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                    Deadline deadline) noexcept override {
    const size_t bytes = count * dtype_bytes(dtype);
    return through(send, bytes, recv, bytes * ranks(), stream, deadline, [&](std::byte* in, std::byte* out) {
      return device_.all_gather(in, out, count, dtype, stream_, deadline);
    });
  }
  Status all_to_all(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                    Deadline deadline) noexcept override {
    const size_t bytes = count * dtype_bytes(dtype) * ranks();
    return through(send, bytes, recv, bytes, stream, deadline, [&](std::byte* in, std::byte* out) {
      return device_.all_to_all(in, out, count, dtype, stream_, deadline);
    });
  }
  Status reduce_scatter_sum(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                            Deadline deadline) noexcept override {
    const size_t bytes = count * dtype_bytes(dtype);
    return through(send, bytes * ranks(), recv, bytes, stream, deadline, [&](std::byte* in, std::byte* out) {
      return device_.reduce_scatter_sum(in, out, count, dtype, stream_, deadline);
    });
  }
  Status broadcast(void* data, size_t count, DType dtype, int root, Stream stream,
                   Deadline deadline) noexcept override {
    const size_t bytes = count * dtype_bytes(dtype);
    return through(data, bytes, data, bytes, stream, deadline, [&](std::byte* in, std::byte* out) {
      const int error = cuda_.copy(out, in, bytes, stream_.handle);
      return error != 0 ? cuda_failed(error) : device_.broadcast(out, count, dtype, root, stream_, deadline);
    });
  }
  Status barrier(Stream stream, Deadline deadline) noexcept override {
    return through(nullptr, 0, nullptr, 0, stream, deadline,
                   [&](std::byte*, std::byte*) { return device_.barrier(stream_, deadline); });
  }
  Status split(int, int, std::unique_ptr<Communicator>*, Deadline) noexcept override { return StatusCode::unsupported; }
  void abort() noexcept override { device_.abort(); }

  double now() const noexcept override { return device_.now(); }
  void advance(double) noexcept override {}
  bool virtual_clock() const noexcept override { return false; }
  const char* last_error() const noexcept override {
    return error_.text[0] != '\0' ? error_.text : device_.last_error();
  }

 private:
  static constexpr size_t kAlign = 256;
  size_t ranks() const noexcept { return static_cast<size_t>(device_.size()); }

  template <class Call>
  Status through(const void* send, size_t send_bytes, void* recv, size_t recv_bytes, Stream stream, Deadline deadline,
                 Call call) noexcept {
    if (stream.handle != nullptr) return StatusCode::unsupported;  // host memory has no stream
    const size_t out_at = (send_bytes + kAlign - 1) / kAlign * kAlign;
    GRADGATE_TRY(reserve(out_at + recv_bytes));
    auto *in = static_cast<std::byte*>(memory_), *out = in + out_at;
    if (const int error = cuda_.copy(in, send, send_bytes, stream_.handle); error != 0) return cuda_failed(error);
    GRADGATE_TRY(call(in, out));
    if (const int error = cuda_.copy(recv, out, recv_bytes, stream_.handle); error != 0) return cuda_failed(error);
    return device_.wait(stream_, deadline);
  }
  Status reserve(size_t bytes) noexcept {
    if (bytes <= bytes_) return {};
    if (memory_ != nullptr) cuda_.release(memory_);
    memory_ = nullptr, bytes_ = 0;
    if (const int error = cuda_.allocate(&memory_, bytes); error != 0) return cuda_failed(error);
    bytes_ = bytes;
    return {};
  }
  Status cuda_failed(int error) noexcept {
    error_.format("host memory over devices: %s", cuda_.error_text(error));
    return {StatusCode::internal, error};
  }

  Communicator& device_;
  const Runtime& cuda_;
  const Stream stream_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
  Message description_, error_;
};

}  // namespace

Status make_staged(Communicator& device, Stream stream, std::unique_ptr<Communicator>* out, Message* why) noexcept {
  Message unused;
  if (why == nullptr) why = &unused;
  const Runtime* cuda = kernels::cuda::runtime(why);
  if (cuda == nullptr) return StatusCode::unsupported;
  out->reset(new (std::nothrow) StagedRank(device, *cuda, stream));
  return *out == nullptr ? Status{StatusCode::out_of_memory} : Status{};
}

}  // namespace gradgate
