#include "integration/comm/callback_comm.h"

#include <algorithm>
#include <new>

#include "integration/comm/rank_sum.h"

namespace gradgate::comm {
namespace {

class CallbackRank final : public Communicator {
 public:
  CallbackRank(int rank, int ranks, const gg_communicator_ops& ops, void* context, const char* description) noexcept
      : rank_(rank), ranks_(ranks), ops_(ops), context_(context) {
    description_.format("%s", description != nullptr ? description : "callbacks");
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return ranks_; }
  bool supports(Collective op, DType dtype) const noexcept override {
    if (op == Collective::reduce_scatter && ops_.reduce_scatter_sum == nullptr) return false;
    if (op == Collective::all_reduce || op == Collective::reduce_scatter) return can_sum(dtype);
    return op != Collective::none && dtype_bytes(dtype) != 0;
  }
  const char* description() const noexcept override { return description_.text; }

  Status all_reduce_sum(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                        Deadline deadline) noexcept override {
    return run("all_reduce", stream, deadline, [&](double left) {
      return ops_.all_reduce_sum(context_, send, recv, count, static_cast<int>(dtype), left);
    });
  }
  Status all_gather(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                    Deadline deadline) noexcept override {
    return run("all_gather", stream, deadline, [&](double left) {
      return ops_.all_gather(context_, send, recv, count, static_cast<int>(dtype), left);
    });
  }
  Status all_to_all(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                    Deadline deadline) noexcept override {
    return run("all_to_all", stream, deadline, [&](double left) {
      return ops_.all_to_all(context_, send, recv, count, static_cast<int>(dtype), left);
    });
  }
  Status reduce_scatter_sum(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                            Deadline deadline) noexcept override {
    if (ops_.reduce_scatter_sum == nullptr) return StatusCode::unsupported;
    return run("reduce_scatter", stream, deadline, [&](double left) {
      return ops_.reduce_scatter_sum(context_, send, recv, count, static_cast<int>(dtype), left);
    });
  }
  Status broadcast(void* data, size_t count, DType dtype, int root, Stream stream,
                   Deadline deadline) noexcept override {
    return run("broadcast", stream, deadline,
               [&](double left) { return ops_.broadcast(context_, data, count, static_cast<int>(dtype), root, left); });
  }
  Status barrier(Stream stream, Deadline deadline) noexcept override {
    return run("barrier", stream, deadline, [&](double left) { return ops_.barrier(context_, left); });
  }
  bool can_start() const noexcept override { return ops_.start_all_gather != nullptr; }
  Status start_all_gather(const void* send, void* recv, size_t count, DType dtype,
                          Deadline deadline) noexcept override {
    if (!can_start()) return StatusCode::unsupported;
    return run("all_gather", {}, deadline, [&](double left) {
      return ops_.start_all_gather(context_, send, recv, count, static_cast<int>(dtype), left);
    });
  }
  Status finish_all_gather(Deadline deadline) noexcept override {
    if (!can_start()) return StatusCode::unsupported;
    return run("all_gather", {}, deadline, [&](double left) { return ops_.finish_all_gather(context_, left); });
  }

  // Sub-groups are made by whoever owns the transport.
  Status split(int, int, std::unique_ptr<Communicator>*, Deadline) noexcept override { return StatusCode::unsupported; }
  void abort() noexcept override {
    if (ops_.abort != nullptr) ops_.abort(context_);
  }

  double now() const noexcept override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void advance(double) noexcept override {}
  bool virtual_clock() const noexcept override { return false; }
  const char* last_error() const noexcept override { return error_.text; }

 private:
  template <class Call>
  Status run(const char* name, Stream stream, Deadline deadline, Call call) noexcept {
    if (!failed_.ok()) return failed_;
    if (stream.handle != nullptr) return StatusCode::unsupported;
    const auto start = std::chrono::steady_clock::now();
    const std::chrono::duration<double> left = deadline.at - start;
    const int code = call(std::clamp(left.count(), 1e-3, 1e9));
    if (code == 0) return {};
    const bool known = code > 0 && code <= static_cast<int>(StatusCode::internal);
    failed_ = known ? static_cast<StatusCode>(code) : StatusCode::internal;
    const char* reason = ops_.last_error != nullptr ? ops_.last_error(context_) : nullptr;
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    error_.format("%s failed after %.1f s: %.220s", name, waited.count(),
                  reason != nullptr && reason[0] != '\0' ? reason : failed_.message());
    return failed_;
  }

  const int rank_, ranks_;
  const gg_communicator_ops ops_;
  void* const context_;
  Status failed_;  ///< once not ok, for good
  Message description_, error_;
};

}  // namespace

Status make_callback_comm(int rank, int ranks, const gg_communicator_ops& ops, void* context, const char* description,
                          std::unique_ptr<Communicator>* out, Message* why) noexcept {
  if (ops.size != sizeof(ops)) {
    why->format("gg_communicator_ops.size is %zu, accepted: %zu", ops.size, sizeof(ops));
    return StatusCode::invalid_argument;
  }
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    why->format("rank %d of %d ranks, accepted: 0 <= rank < ranks", rank, ranks);
    return StatusCode::invalid_argument;
  }
  const char* missing = ops.all_reduce_sum == nullptr ? "all_reduce_sum"
                        : ops.all_gather == nullptr   ? "all_gather"
                        : ops.all_to_all == nullptr   ? "all_to_all"
                        : ops.broadcast == nullptr    ? "broadcast"
                        : ops.barrier == nullptr      ? "barrier"
                        : ops.start_all_gather == nullptr && ops.finish_all_gather != nullptr ? "start_all_gather"
                        : ops.start_all_gather != nullptr && ops.finish_all_gather == nullptr ? "finish_all_gather"
                                                                                              : nullptr;
  if (missing != nullptr) {
    why->format("gg_communicator_ops.%s is null", missing);
    return StatusCode::invalid_argument;
  }
  out->reset(new (std::nothrow) CallbackRank(rank, ranks, ops, context, description));
  return *out ? Status() : StatusCode::out_of_memory;
}

}  // namespace gradgate::comm
