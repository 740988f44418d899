// Ranks as processes of an MPI job: argument checks and the virtual functions over Hub and Moves.
#include "integration/mpi/mpi_comm.h"

#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "integration/comm/rank_sum.h"
#include "integration/mpi/hub.h"
#include "integration/mpi/moves.h"

namespace gradgate::mpi {
namespace {

struct Machinery {
  Machinery(MPI_Comm comm, const Limits& limits) : hub(comm), moves(hub, limits) {}
  Hub hub;
  Moves moves;
};

class MpiRank final : public Communicator {
 public:
  /// Takes `comm` over. Allocates: may throw std::bad_alloc.
  MpiRank(MPI_Comm comm, const Limits& limits)
      : machinery_(std::make_unique<Machinery>(comm, limits)), hub_(machinery_->hub), limits_(limits) {
    char library[MPI_MAX_LIBRARY_VERSION_STRING] = {};
    int length = 0;
    MPI_Get_library_version(library, &length);
    std::snprintf(description_, sizeof description_, "%d MPI rank%s, %.*s", size(), size() == 1 ? "" : "s",
                  static_cast<int>(std::strcspn(library, ",\n")), library);
  }
  ~MpiRank() override {
    // MPI may still write into buffers of an operation that failed, and cannot be told to stop: they stay for ever.
    if (hub_.failed()) static_cast<void>(machinery_.release());
  }

  int rank() const noexcept override { return hub_.rank(); }
  int size() const noexcept override { return hub_.size(); }
  bool supports(Collective op, DType dtype) const noexcept override {
    if (op == Collective::all_reduce || op == Collective::reduce_scatter) return comm::can_sum(dtype);
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
    if (out == nullptr) return hub_.refuse(Collective::none, StatusCode::invalid_argument, "no place for the result");
    if (color < 0) return hub_.refuse(Collective::none, StatusCode::invalid_argument, "the color is negative");
    GRADGATE_TRY(hub_.meet({}, deadline));
    // All ranks are here. MPI has no nonblocking split; from now on only the death of a process, which ends the job,
    // could keep it from returning.
    MPI_Comm part = MPI_COMM_NULL;
    GRADGATE_TRY(hub_.check(MPI_Comm_split(hub_.comm(), color, key, &part), "MPI_Comm_split"));
    try {
      *out = std::make_unique<MpiRank>(part, limits_);
      return {};
    } catch (...) {
      return hub_.out_of_memory();
    }
  }
  void abort() noexcept override { hub_.abort(); }

  double now() const noexcept override {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void advance(double) noexcept override {}
  bool virtual_clock() const noexcept override { return false; }
  const char* last_error() const noexcept override { return hub_.last_error(); }

 private:
  Status run(const Call& call, Stream stream, Deadline deadline) noexcept {
    Message reason;
    if (const Status status = refusal(call, stream, &reason); !status.ok())
      return hub_.refuse(call.op, status, reason.text);
    GRADGATE_TRY(hub_.meet(call, deadline));
    return machinery_->moves.move(call);
  }

  Status refusal(const Call& call, Stream stream, Message* reason) const noexcept {
    const size_t element = dtype_bytes(call.dtype);
    if (stream.handle != nullptr) {
      reason->format("a device stream was passed, MPI ranks move host memory");
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

  std::unique_ptr<Machinery> machinery_;
  Hub& hub_;
  Limits limits_;
  char description_[96] = {};
};

Status refuse(Message* why, const char* text) noexcept {
  if (why != nullptr) why->format("make_mpi: %s", text);
  return StatusCode::invalid_argument;
}

}  // namespace

Status make_mpi(MPI_Comm comm, const Limits& limits, std::unique_ptr<Communicator>* out, Message* why) noexcept {
  if (out == nullptr) return refuse(why, "no place for the result");
  int yes = 0;
  if (MPI_Initialized(&yes) != MPI_SUCCESS || !yes) return refuse(why, "MPI_Init was not called");
  if (MPI_Finalized(&yes) != MPI_SUCCESS || yes) return refuse(why, "MPI_Finalize was called");
  if (comm == MPI_COMM_NULL) return refuse(why, "MPI_COMM_NULL");
  if (MPI_Comm_test_inter(comm, &yes) != MPI_SUCCESS || yes) return refuse(why, "an intercommunicator");
  MPI_Comm copy = MPI_COMM_NULL;
  if (MPI_Comm_dup(comm, &copy) != MPI_SUCCESS) {
    if (why != nullptr) why->format("make_mpi: MPI_Comm_dup failed");
    return StatusCode::io_error;
  }
  try {
    *out = std::make_unique<MpiRank>(copy, limits);
    return {};
  } catch (...) {
    if (why != nullptr) why->format("make_mpi: no memory");
    return StatusCode::out_of_memory;
  }
}

}  // namespace gradgate::mpi

namespace gradgate {

Status make_mpi(MPI_Comm comm, std::unique_ptr<Communicator>* out, Message* why) noexcept {
  return mpi::make_mpi(comm, mpi::Limits{}, out, why);
}

}  // namespace gradgate
