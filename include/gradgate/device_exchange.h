// Exchanges in device memory: the machine of exchange.h, its codec calls and collectives enqueued on one stream. The
// host never waits in between; what a CPU's exchange returns is read afterwards from a record, its times from events.
#pragma once

#include "gradgate/exchange.h"

namespace gradgate {

/// What a device leaves behind of one exchange: the first fault, with the header that arrived, and the elements of x
/// that were not finite. Zero before the exchange; read by exchange_record_status() once it was copied to the host.
struct ExchangeRecord {
  alignas(8) std::byte bytes[48] = {};
};

/// An exchange in device memory: gradient, residual and workspace are the device's, begin() and next() only enqueue on
/// `stream`, and the driver enqueues the collectives there. Errors that the device finds (a damaged payload, a peer's
/// failure) stop everything that follows on this rank, reach the peers as error payloads, and stand in the record.
struct DevicePlace {
  Stream stream;
  ExchangeRecord* record = nullptr;    ///< in device memory
  const uint32_t* step = nullptr;      ///< in device memory; where set, takes the place of seed.step when the work runs
  ExchangeMachine* between = nullptr;  ///< hierarchical: host memory for the machine between nodes, as long as this one
                                       ///< lives; enqueue_exchange() brings its own
};

/// What the record of an exchange on a device says: ok, or the status that next() would have returned on a CPU and its
/// text in `why` (optional). `args` as they were at begin(). Adds to *non_finite (optional).
GRADGATE_API Status exchange_record_status(const ExchangeArgs& args, const ExchangeRecord& record, uint64_t* non_finite,
                                           Message* why) noexcept;

/// Marks on a stream between the parts of an exchange: CUDA events, read without synchronising. Movable, not copyable.
class GRADGATE_API DeviceMarks {
 public:
  enum class Part : uint8_t { encode, transfer, decode };

  DeviceMarks() = default;
  ~DeviceMarks();
  DeviceMarks(DeviceMarks&& other) noexcept;
  DeviceMarks& operator=(DeviceMarks&& other) noexcept;

  /// Makes the events: unsupported without a device, internal where CUDA refuses.
  Status create() noexcept;
  void begin(Stream stream) noexcept;
  /// What was enqueued since the last mark belongs to `part`. At most nine per exchange.
  void mark(Part part, Stream stream) noexcept;
  /// Whether the last mark has been reached; false with an error too, which read() returns.
  bool complete() const noexcept;
  /// Waits for one mark after the other, by way of `idle`, a stream with nothing else to do, so that after an error
  /// (that of comm.wait()) *pending says which part had not ended.
  Status wait(Communicator& comm, Stream idle, Deadline deadline, Part* pending) const noexcept;
  /// Adds to the three times. bad_state before the last mark is reached.
  Status read(ExchangeTimes* times) const noexcept;
  /// Seconds from the last mark of another exchange to the last mark of this one.
  Status since(const DeviceMarks& earlier, double* seconds) const noexcept;

 private:
  static constexpr int kMost = 10;
  void* events_[kMost] = {};
  Part parts_[kMost] = {};
  int used_ = 0;
  bool failed_ = false;
};

/// Enqueues a whole exchange. `args.device` must be set; `comm` enqueues its collectives on streams. Returns what is
/// known on the host: refused arguments, a communicator that failed. `marks` (optional) was created. A hierarchical
/// exchange needs `tiers`, split off `comm`. May be captured in a CUDA graph, by all ranks alike and without marks; a
/// replay reads gradient, residual and, by DevicePlace::step, the step anew, and adds to the same record.
GRADGATE_API Status enqueue_exchange(Communicator& comm, const ExchangeArgs& args, double timeout_s, DeviceMarks* marks,
                                     Message* why, const NodeTiers* tiers = nullptr) noexcept;

/// shadow_exchange() on a device: enqueues the codec work of one exchange, without communication and without changing
/// gradient or residual, between `marks`. `scratch` is device memory of device_shadow_bytes(shape) bytes;
/// args.workspace is not used; faults go into args.device's record.
GRADGATE_API size_t device_shadow_bytes(const ExchangeShape& shape) noexcept;
GRADGATE_API Status enqueue_shadow(const ExchangeArgs& args, Bytes scratch, DeviceMarks* marks) noexcept;

}  // namespace gradgate
