// Ranks as threads of this process: argument checks and the virtual functions over ThreadHub.
#include <cstdio>
#include <limits>
#include <new>

#include "gradgate/communicator.h"
#include "integration/comm/rank_sum.h"
#include "integration/comm/thread_hub.h"

namespace gradgate {
namespace comm {
namespace {

constexpr int kMaxRanks = 1024;

class ThreadRank final : public Communicator {
 public:
  ThreadRank(std::shared_ptr<ThreadHub> hub, int rank) noexcept : hub_(std::move(hub)), rank_(rank) {
    std::snprintf(description_, sizeof description_, "%d thread rank%s", hub_->size(), hub_->size() == 1 ? "" : "s");
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return hub_->size(); }
  bool supports(Collective op, DType dtype) const noexcept override {
    if (op == Collective::all_reduce || op == Collective::reduce_scatter) return can_sum(dtype);
    return op != Collective::none && dtype_bytes(dtype) != 0;
  }
  const char* description() const noexcept override { return description_; }

  Status all_reduce_sum(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                        Deadline deadline) noexcept override {
    return run({Collective::all_reduce, dtype, 0, count, send, recv}, stream, deadline);
  }
  Status all_gather(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                    Deadline deadline) noexcept override {
    return run({Collective::all_gather, dtype, 0, count, send, recv}, stream, deadline);
  }
  Status all_to_all(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                    Deadline deadline) noexcept override {
    return run({Collective::all_to_all, dtype, 0, count, send, recv}, stream, deadline);
  }
  Status reduce_scatter_sum(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                            Deadline deadline) noexcept override {
    return run({Collective::reduce_scatter, dtype, 0, count, send, recv}, stream, deadline);
  }
  Status broadcast(void* data, size_t count, DType dtype, int root, Stream stream,
                   Deadline deadline) noexcept override {
    return run({Collective::broadcast, dtype, root, count, data, data}, stream, deadline);
  }
  Status barrier(Stream stream, Deadline deadline) noexcept override {
    return run({Collective::barrier}, stream, deadline);
  }

  Status split(int color, int key, std::unique_ptr<Communicator>* out, Deadline deadline) noexcept override {
    if (out == nullptr)
      return hub_->refuse(rank_, "split", StatusCode::invalid_argument, "no place for the result", &error_);
    GRADGATE_TRY(hub_->meet(rank_, {.color = color, .key = key}, deadline, &error_));
    ThreadHub::Child child = hub_->take_child(rank_);
    out->reset(new (std::nothrow) ThreadRank(std::move(child.hub), child.rank));
    return *out
               ? Status()
               : hub_->refuse(rank_, "split", StatusCode::out_of_memory, "no memory for the new communicator", &error_);
  }
  void abort() noexcept override { hub_->abort(); }

  double now() const noexcept override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void advance(double) noexcept override {}
  bool virtual_clock() const noexcept override { return false; }
  const char* last_error() const noexcept override { return error_.text; }

 private:
  Status run(const ThreadHub::Call& call, Stream stream, Deadline deadline) noexcept {
    Message reason;
    const Status status = check(call, stream, &reason);
    if (!status.ok()) return hub_->refuse(rank_, call_name(call.op), status, reason.text, &error_);
    return hub_->meet(rank_, call, deadline, &error_);
  }

  Status check(const ThreadHub::Call& call, Stream stream, Message* reason) const noexcept {
    const size_t element = dtype_bytes(call.dtype);
    if (stream.handle != nullptr) {
      reason->format("a device stream was passed, thread ranks move host memory");
      return StatusCode::unsupported;
    }
    if (!supports(call.op, call.dtype)) {
      reason->format("dtype %s (%u) is not supported", dtype_name(call.dtype), static_cast<unsigned>(call.dtype));
      return StatusCode::unsupported;
    }
    if (call.count > std::numeric_limits<size_t>::max() / element / static_cast<size_t>(size())) {
      reason->format("count %zu overflows", call.count);
      return StatusCode::invalid_argument;
    }
    if (call.count != 0 && (call.send == nullptr || call.recv == nullptr)) {
      reason->format("null %s buffer with count %zu", call.send == nullptr ? "send" : "receive", call.count);
      return StatusCode::invalid_argument;
    }
    if (call.root < 0 || call.root >= size()) {
      reason->format("root %d is outside 0 … %d", call.root, size() - 1);
      return StatusCode::invalid_argument;
    }
    return {};
  }

  std::shared_ptr<ThreadHub> hub_;
  int rank_;
  char description_[32] = {};
  Message error_;
};

class ThreadGroupImpl final : public ThreadGroup {
 public:
  explicit ThreadGroupImpl(int ranks) : hub_(std::make_shared<ThreadHub>(ranks)) {
    ranks_.reserve(static_cast<size_t>(ranks));
    for (int r = 0; r < ranks; ++r) ranks_.emplace_back(hub_, r);
  }
  ~ThreadGroupImpl() override { hub_->close(); }

  Communicator& rank(int r) noexcept override { return ranks_[static_cast<size_t>(r)]; }
  int size() const noexcept override { return hub_->size(); }

 private:
  std::shared_ptr<ThreadHub> hub_;
  std::vector<ThreadRank> ranks_;
};

}  // namespace
}  // namespace comm

const char* collective_name(Collective collective) noexcept {
  switch (collective) {
    case Collective::none:
      return "none";
    case Collective::all_reduce:
      return "all_reduce";
    case Collective::all_gather:
      return "all_gather";
    case Collective::all_to_all:
      return "all_to_all";
    case Collective::reduce_scatter:
      return "reduce_scatter";
    case Collective::broadcast:
      return "broadcast";
    case Collective::barrier:
      return "barrier";
  }
  return "?";
}

Status ThreadGroup::create(int ranks, std::unique_ptr<ThreadGroup>* out) noexcept {
  if (out == nullptr || ranks < 1 || ranks > comm::kMaxRanks) return StatusCode::invalid_argument;
  try {
    *out = std::make_unique<comm::ThreadGroupImpl>(ranks);
    return {};
  } catch (...) {
    return StatusCode::out_of_memory;
  }
}

}  // namespace gradgate
