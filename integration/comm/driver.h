// The C++ driver of an exchange in two halves, so that one can be left on the wire while the next is encoded.
#pragma once

#include "gradgate/exchange.h"
#include "integration/comm/codec_time.h"

namespace gradgate::comm {

/// A transfer whose wait took less had probably ended before: when is not known.
inline constexpr double kSeenWait = 50e-6;

/// One exchange over a communicator of host memory. Reusable; holds a machine, allocates nothing.
class ExchangeRun {
 public:
  /// Encodes and performs the collectives. With `leave` the last one is only started where it is an all_gather and the
  /// communicator can (Communicator::can_start()). Arguments and errors as in run_exchange().
  Status start(Communicator& comm, const ExchangeArgs& args, double timeout_s, const CodecRates& rates,
               const NodeTiers* tiers, bool leave, Message* why) noexcept;
  bool under_way() const noexcept { return under_way_; }
  /// Waits for what is under way, the oldest of its communicator, and decodes. *wire_free_s, on its clock: in, when the
  /// transfer before this one had arrived; out, when this one had.
  Status finish(double* wire_free_s, Message* why) noexcept;
  /// Of the whole exchange once nothing is under way, or after a failure.
  const ExchangeTimes& times() const noexcept { return times_; }

 private:
  Status next(CollectiveCall* call, Lap* lap, Message* why) noexcept;

  Communicator* comm_ = nullptr;
  ExchangeShape shape_;
  CodecRates rates_;
  ExchangeMachine machine_;
  ExchangeTimes times_;
  double timeout_s_ = 0, started_s_ = 0;
  bool under_way_ = false;
};

}  // namespace gradgate::comm
