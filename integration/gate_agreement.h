// One agreement of a gate: every rank's numbers to all, rank 0's decision to all, applied by all.
#pragma once

#include <cstdint>
#include <vector>

#include "gate/gate.h"
#include "gradgate/communicator.h"
#include "gradgate/status.h"
#include "gradgate/types.h"

namespace gradgate {

/// Keeps its memory from one agreement to the next. Reports differ in size from phase to phase, so an agreement may
/// allocate; a step without one never does.
class GateAgreement {
 public:
  /// Collective over `control`, after step `step` (for the message only). On an error `why` names the step, the stage
  /// and the cause, and the gate has not changed.
  Status run(gate::Gate& gate, Communicator& control, uint64_t step, double timeout_s, Message* why) noexcept;

 private:
  std::vector<double> report_, reports_, message_;
};

}  // namespace gradgate
