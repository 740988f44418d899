// Communicator: the collectives gradgate needs, over whatever carries them. The only virtual class of the library. One
// object is one rank; it is used by one thread at a time, and collectives are issued in the same order on every rank.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "gradgate/types.h"

namespace gradgate {

/// A device stream (cudaStream_t) or null for host memory. Explicit in every call, never defaulted.
struct Stream {
  void* handle = nullptr;
};

/// Point on the steady clock after which a wait gives up. Always real time, also on a virtual clock: it guards against
/// peers that never come.
struct Deadline {
  std::chrono::steady_clock::time_point at = std::chrono::steady_clock::time_point::max();

  static Deadline after(double seconds) noexcept {
    return {std::chrono::steady_clock::now() +
            std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds))};
  }
};

enum class Collective : uint8_t {
  none = 0,
  all_reduce = 1,
  all_gather = 2,
  all_to_all = 3,
  reduce_scatter = 4,
  broadcast = 5,
  barrier = 6
};
GRADGATE_API const char* collective_name(Collective collective) noexcept;

/// Every call blocks until this rank's result is there (host) or is enqueued (device), or fails: timeout, peer_mismatch
/// (ranks called different operations, counts or dtypes), aborted. After a failure last_error() names the operation,
/// the time waited and the reason, and the communicator stays failed: every later call returns the same error at once.
class GRADGATE_API Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  virtual bool supports(Collective op, DType dtype) const noexcept = 0;
  /// For reports: "4 thread ranks", "4 thread ranks, link 1 Gbit/s 50 us (emulated)".
  virtual const char* description() const noexcept = 0;

  /// recv[i] = Σ over ranks of send[i], i < count, summed in rank order. send may equal recv.
  virtual Status all_reduce_sum(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                                Deadline deadline) noexcept = 0;
  /// recv holds size() blocks of `count` elements in rank order. send may be the own block of recv.
  virtual Status all_gather(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                            Deadline deadline) noexcept = 0;
  /// send and recv hold size() blocks of `count` elements: block r of send goes to rank r. They must not overlap.
  virtual Status all_to_all(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                            Deadline deadline) noexcept = 0;
  /// send holds size() blocks of `count` elements; recv gets the sum of block rank() over all ranks. No overlap.
  virtual Status reduce_scatter_sum(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                                    Deadline deadline) noexcept = 0;
  virtual Status broadcast(void* data, size_t count, DType dtype, int root, Stream stream,
                           Deadline deadline) noexcept = 0;
  virtual Status barrier(Stream stream, Deadline deadline) noexcept = 0;
  /// Whether an all_gather can be started, in host memory, and waited for later.
  virtual bool can_start() const noexcept { return false; }
  /// An all_gather that returns when it is under way. send and recv must stay until finish_all_gather(), which waits
  /// for the oldest that was started. Ranks start them in the same order; where other collectives come between may
  /// differ.
  virtual Status start_all_gather(const void* send, void* recv, size_t count, DType dtype,
                                  Deadline deadline) noexcept {
    (void)send, (void)recv, (void)count, (void)dtype, (void)deadline;
    return StatusCode::unsupported;
  }
  virtual Status finish_all_gather(Deadline deadline) noexcept {
    (void)deadline;
    return StatusCode::unsupported;
  }
  /// Whether calls take device memory and a stream.
  virtual bool on_device() const noexcept { return false; }
  /// Returns when all that was enqueued on `stream` is done, or a peer or the device failed, or the deadline passed.
  /// Host memory: nothing is ever outstanding.
  virtual Status wait(Stream stream, Deadline deadline) noexcept {
    (void)stream, (void)deadline;
    return {};
  }

  /// Ranks with the same color form a communicator, ordered by key, then by rank. Collective.
  virtual Status split(int color, int key, std::unique_ptr<Communicator>* out, Deadline deadline) noexcept = 0;
  /// Wakes every rank of this communicator with `aborted`. May be called from any thread.
  virtual void abort() noexcept = 0;

  /// Seconds on the clock by which this communicator's transfers are measured (steady clock, or a virtual one).
  virtual double now() const noexcept = 0;
  /// Work of this rank that took `seconds`; moves a virtual clock, otherwise does nothing.
  virtual void advance(double seconds) noexcept = 0;
  virtual bool virtual_clock() const noexcept = 0;

  /// Text of the last failure; empty when there was none.
  virtual const char* last_error() const noexcept = 0;
};

/// Ranks as threads of this process: shared memory, sums in rank order in f32 (f64 for f64), identical on every rank.
class GRADGATE_API ThreadGroup {
 public:
  /// invalid_argument outside 1 … 1024 ranks.
  static Status create(int ranks, std::unique_ptr<ThreadGroup>* out) noexcept;
  virtual ~ThreadGroup() = default;
  /// The communicator of one rank, owned by the group; each is used by one thread.
  virtual Communicator& rank(int r) noexcept = 0;
  virtual int size() const noexcept = 0;
};

/// A link to pace to: T(step) = alpha_s + bytes / beta_bytes_per_s, per message, one way.
struct LinkSpec {
  double alpha_s = 0;
  double beta_bytes_per_s = 0;
};
enum class ClockKind : uint8_t { real, virtual_time };

/// Wraps `inner` and makes each collective last as long as the ring or pairwise algorithm would take on `link`
/// (gate/cost.h), counted from the arrival of the last rank. On a real clock it sleeps for what is left; on a virtual
/// clock it only moves the clock, which every rank shares and which Communicator::advance() moves for computation. An
/// emulation, and described as one. `inner` must outlive it.
GRADGATE_API Status make_shaped(Communicator& inner, LinkSpec link, ClockKind clock,
                                std::unique_ptr<Communicator>* out) noexcept;

}  // namespace gradgate
