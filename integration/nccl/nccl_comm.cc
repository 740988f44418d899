// A Communicator over NCCL: every call enqueues on the caller's stream. NCCL finds faults of its own on a thread of its
// own, so waits poll for them.
#include <chrono>
#include <new>
#include <thread>

#include "gradgate/nccl.h"
#include "integration/nccl/api.h"
#include "kernels/cuda/runtime.h"

namespace gradgate {
namespace {

using kernels::cuda::Runtime;
using nccl::Api;
using nccl::kInProgress;
using nccl::kSuccess;
using Clock = std::chrono::steady_clock;

int nccl_type(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return nccl::kFloat32;
    case DType::bf16:
      return nccl::kBfloat16;
    case DType::f16:
      return nccl::kFloat16;
    case DType::f64:
      return nccl::kFloat64;
    case DType::u8:
      return nccl::kUint8;
  }
  return -1;
}

/// Grows from spinning to half a millisecond: short waits cost no wake-up, long ones no core.
class Backoff {
 public:
  void pause() noexcept {
    if (++round_ < 200) {
      std::this_thread::yield();
      return;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(round_ < 400 ? 20 : 500));
  }

 private:
  int round_ = 0;
};

double seconds_since(Clock::time_point start) noexcept {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class NcclRank final : public Communicator {
 public:
  NcclRank(const Api& api, const Runtime& cuda, nccl::Comm comm, bool owned, int rank, int ranks) noexcept
      : api_(api), cuda_(cuda), comm_(comm), owned_(owned), rank_(rank), ranks_(ranks) {
    description_.format("%d NCCL %d.%d.%d ranks", ranks, api.version / 10000, api.version / 100 % 100,
                        api.version % 100);
  }
  ~NcclRank() override {
    if (owned_ && comm_ != nullptr) failed_.ok() ? api_.comm_destroy(comm_) : api_.comm_abort(comm_);
    if (event_ != nullptr) cuda_.destroy_event(event_);
    if (scratch_ != nullptr) cuda_.release(scratch_);
  }

  Status prepare(Message* why) noexcept {
    int error = cuda_.create_event(&event_);
    if (error == 0) error = cuda_.allocate(&scratch_, sizeof(float));
    if (error == 0) error = cuda_.fill(scratch_, 0, sizeof(float), nullptr);
    if (error == 0) return {};
    why->format("memory for a communicator: %s", cuda_.error_text(error));
    return {StatusCode::internal, error};
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return ranks_; }
  bool supports(Collective op, DType dtype) const noexcept override {
    if (op == Collective::all_reduce || op == Collective::reduce_scatter)
      return dtype != DType::u8 && nccl_type(dtype) >= 0;
    return op != Collective::none && nccl_type(dtype) >= 0;
  }
  const char* description() const noexcept override { return description_.text; }
  bool on_device() const noexcept override { return true; }

  Status all_reduce_sum(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                        Deadline deadline) noexcept override {
    if (!supports(Collective::all_reduce, dtype)) return StatusCode::unsupported;
    return run("all_reduce", deadline, count,
               [&] { return api_.all_reduce(send, recv, count, nccl_type(dtype), nccl::kSum, comm_, stream.handle); });
  }
  Status all_gather(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                    Deadline deadline) noexcept override {
    return run("all_gather", deadline, count,
               [&] { return api_.all_gather(send, recv, count, nccl_type(dtype), comm_, stream.handle); });
  }
  Status all_to_all(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                    Deadline deadline) noexcept override {
    return run("all_to_all", deadline, count, [&] {
      const size_t block = count * dtype_bytes(dtype);
      int error = api_.group_start();
      for (int peer = 0; peer < ranks_ && going_on(error); ++peer) {
        const size_t at = static_cast<size_t>(peer) * block;
        error =
            api_.send(static_cast<const std::byte*>(send) + at, count, nccl_type(dtype), peer, comm_, stream.handle);
        if (going_on(error))
          error = api_.recv(static_cast<std::byte*>(recv) + at, count, nccl_type(dtype), peer, comm_, stream.handle);
      }
      const int ended = api_.group_end();
      return going_on(error) ? ended : error;
    });
  }
  Status reduce_scatter_sum(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                            Deadline deadline) noexcept override {
    if (!supports(Collective::reduce_scatter, dtype)) return StatusCode::unsupported;
    return run("reduce_scatter", deadline, count, [&] {
      return api_.reduce_scatter(send, recv, count, nccl_type(dtype), nccl::kSum, comm_, stream.handle);
    });
  }
  Status broadcast(void* data, size_t count, DType dtype, int root, Stream stream,
                   Deadline deadline) noexcept override {
    if (root < 0 || root >= ranks_) return StatusCode::invalid_argument;
    return run("broadcast", deadline, count,
               [&] { return api_.broadcast(data, data, count, nccl_type(dtype), root, comm_, stream.handle); });
  }
  Status barrier(Stream stream, Deadline deadline) noexcept override {
    return run("barrier", deadline, 1, [&] {
      return api_.all_reduce(scratch_, scratch_, 1, nccl::kFloat32, nccl::kSum, comm_, stream.handle);
    });
  }

  Status wait(Stream stream, Deadline deadline) noexcept override {
    if (!failed_.ok()) return failed_;
    const auto start = Clock::now();
    if (const int error = cuda_.record(event_, stream.handle); error != 0) return cuda_failed(error);
    Backoff backoff;
    for (;;) {
      bool done = false;
      if (const int error = cuda_.query(event_, &done); error != 0) return cuda_failed(error);
      if (done) return {};
      GRADGATE_TRY(look(start));
      if (Clock::now() >= deadline.at) {
        Message text;
        text.format("the stream was not through after %.3g s: a peer is missing, slow, or called something else",
                    seconds_since(start));
        return fail(StatusCode::timeout, text.text);
      }
      backoff.pause();
    }
  }

  Status split(int color, int key, std::unique_ptr<Communicator>* out, Deadline deadline) noexcept override {
    if (out == nullptr || color < 0) return StatusCode::invalid_argument;
    nccl::Comm part = nullptr;
    nccl::Config config;
    GRADGATE_TRY(run("split", deadline, 1, [&] { return api_.comm_split(comm_, color, key, &part, &config); }));
    Message why;
    const Status status = adopt(api_, cuda_, part, true, deadline, out, &why);
    return status.ok() ? status : fail(status.code(), why.text);
  }
  void abort() noexcept override {
    if (owned_ && comm_ != nullptr) {
      api_.comm_abort(comm_);
      comm_ = nullptr;
    }
    (void)fail(StatusCode::aborted, "aborted");
  }

  double now() const noexcept override {
    return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  }
  void advance(double) noexcept override {}
  bool virtual_clock() const noexcept override { return false; }
  const char* last_error() const noexcept override { return error_.text; }

  /// Waits until a communicator that was just made is there, then wraps it.
  static Status adopt(const Api& api, const Runtime& cuda, nccl::Comm comm, bool owned, Deadline deadline,
                      std::unique_ptr<Communicator>* out, Message* why) noexcept {
    const auto start = Clock::now();
    Backoff backoff;
    int state = kSuccess, rank = 0, ranks = 0;
    for (;;) {
      const int error = api.comm_get_async_error(comm, &state);
      if (error != kSuccess || (state != kSuccess && state != kInProgress)) {
        why->format("NCCL: %s", api.get_error_string(error != kSuccess ? error : state));
        if (owned) api.comm_abort(comm);
        return StatusCode::internal;
      }
      if (state == kSuccess) break;
      if (Clock::now() >= deadline.at) {
        why->format("NCCL: not all ranks came within %.3g s", seconds_since(start));
        if (owned) api.comm_abort(comm);
        return StatusCode::timeout;
      }
      backoff.pause();
    }
    int error = api.comm_user_rank(comm, &rank);
    if (error == kSuccess) error = api.comm_count(comm, &ranks);
    if (error != kSuccess) {
      why->format("NCCL: %s", api.get_error_string(error));
      if (owned) api.comm_abort(comm);
      return StatusCode::internal;
    }
    auto* made = new (std::nothrow) NcclRank(api, cuda, comm, owned, rank, ranks);
    if (made == nullptr) {
      if (owned) api.comm_abort(comm);
      return StatusCode::out_of_memory;
    }
    std::unique_ptr<Communicator> holder(made);
    GRADGATE_TRY(made->prepare(why));
    *out = std::move(holder);
    return {};
  }

 private:
  static bool going_on(int error) noexcept { return error == kSuccess || error == kInProgress; }

  // Enqueues one operation. With a communicator that does not block, NCCL may still be at it when the call returns:
  // what is enqueued afterwards must come after it.
  template <class Call>
  Status run(const char* op, Deadline deadline, size_t count, Call call) noexcept {
    if (!failed_.ok()) return failed_;
    op_ = op;
    if (count == 0) return {};
    const auto start = Clock::now();
    const int error = call();
    if (!going_on(error)) return nccl_failed(error);
    Backoff backoff;
    for (;;) {
      int state = kSuccess;
      if (const int asked = api_.comm_get_async_error(comm_, &state); asked != kSuccess) return nccl_failed(asked);
      if (state == kSuccess) return {};
      if (state != kInProgress) return nccl_failed(state);
      if (Clock::now() >= deadline.at) {
        Message text;
        text.format("NCCL was still enqueuing after %.3g s: a peer is missing", seconds_since(start));
        return fail(StatusCode::timeout, text.text);
      }
      backoff.pause();
    }
  }

  Status look(Clock::time_point start) noexcept {
    (void)start;
    int state = kSuccess;
    if (const int error = api_.comm_get_async_error(comm_, &state); error != kSuccess) return nccl_failed(error);
    return going_on(state) ? Status{} : nccl_failed(state);
  }

  Status nccl_failed(int error) noexcept {
    Message text;
    const char* last = api_.get_last_error(comm_);
    text.format("NCCL: %s%s%.200s", api_.get_error_string(error), last != nullptr && *last ? ": " : "",
                last != nullptr ? last : "");
    return fail(StatusCode::peer_failed, text.text);
  }
  Status cuda_failed(int error) noexcept { return fail(StatusCode::internal, cuda_.error_text(error)); }

  // Kernels of a collective that never ends would keep the stream for ever: an own communicator is aborted.
  Status fail(StatusCode code, const char* text) noexcept {
    if (failed_.ok()) {
      failed_ = code;
      error_.format("rank %d of %d, %s: %s", rank_, ranks_, op_, text);
      if (owned_ && comm_ != nullptr && code != StatusCode::aborted) {
        api_.comm_abort(comm_);
        comm_ = nullptr;
      }
    }
    return failed_;
  }

  const Api& api_;
  const Runtime& cuda_;
  nccl::Comm comm_;
  const bool owned_;
  const int rank_, ranks_;
  void* event_ = nullptr;
  void* scratch_ = nullptr;
  const char* op_ = "start";
  Status failed_;
  Message description_, error_;
};

// What a communicator needs before there is one.
Status find_libraries(const Api** api, const Runtime** cuda, Message* why) noexcept {
  *cuda = kernels::cuda::runtime(why);
  if (*cuda == nullptr) return StatusCode::unsupported;
  *api = nccl::api(why);
  return *api == nullptr ? Status{StatusCode::unsupported} : Status{};
}

}  // namespace

Status make_nccl(const NcclId& id, int rank, int ranks, double timeout_s, std::unique_ptr<Communicator>* out,
                 Message* why) noexcept {
  Message unused;
  if (why == nullptr) why = &unused;
  if (ranks < 1 || rank < 0 || rank >= ranks || out == nullptr) {
    why->format("rank %d of %d ranks, accepted: 0 … ranks − 1", rank, ranks);
    return StatusCode::invalid_argument;
  }
  const Api* api;
  const Runtime* cuda;
  GRADGATE_TRY(find_libraries(&api, &cuda, why));
  nccl::UniqueId unique;
  __builtin_memcpy(unique.internal, id.bytes, sizeof unique);
  nccl::Comm comm = nullptr;
  nccl::Config config;
  const Deadline deadline = Deadline::after(timeout_s);
  const int error = api->comm_init_rank_config(&comm, ranks, unique, rank, &config);
  if (error != kSuccess && error != kInProgress) {
    const char* last = api->get_last_error(nullptr);
    why->format("NCCL, rank %d of %d: %s%s%.200s", rank, ranks, api->get_error_string(error),
                last != nullptr && *last ? ": " : "", last != nullptr ? last : "");
    return {StatusCode::internal, error};
  }
  return NcclRank::adopt(*api, *cuda, comm, true, deadline, out, why);
}

Status wrap_nccl(void* nccl_comm, std::unique_ptr<Communicator>* out, Message* why) noexcept {
  Message unused;
  if (why == nullptr) why = &unused;
  if (nccl_comm == nullptr || out == nullptr) {
    why->format("the ncclComm_t is null");
    return StatusCode::invalid_argument;
  }
  const Api* api;
  const Runtime* cuda;
  GRADGATE_TRY(find_libraries(&api, &cuda, why));
  return NcclRank::adopt(*api, *cuda, nccl_comm, false, Deadline::after(30), out, why);
}

}  // namespace gradgate
