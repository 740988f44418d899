// A gate around somebody else's reduction of a whole step, a black box: it is not priced, only compared with dense on
// the running job, agreed, and verified like any plan (docs/gate.md).
#pragma once

#include <memory>

#include "gate/gate.h"
#include "gradgate/communicator.h"
#include "integration/gate_agreement.h"

namespace gradgate {

struct HookGateOptions {
  char name[48] = {};      ///< of the reduction, for log and explanations
  double dense_bytes = 0;  ///< of all gradients of a step
  double timeout_s = 30;
  gate::LogSink log;
  void (*explain)(void* context, const char* line) = nullptr;  ///< rank 0 only
  void* explain_context = nullptr;
};

class HookGate {
 public:
  /// Collective: the ranks compare name and bytes. `comm` must outlive the gate.
  static Status create(Communicator& comm, const HookGateOptions& options, std::unique_ptr<HookGate>* out,
                       Message* why) noexcept;

  /// What the step that begins does: compress (run the hook), dense, probe (dense, the hook's residual untouched), or
  /// flush (dense, and the hook's residual goes with it). The same on every rank.
  gate::Action plan() const noexcept { return gate_.plan(0).action; }
  /// Ends a step whose last bucket was complete at `now_s` (seconds of the communicator's now()). Collective where an
  /// agreement is due. After an error every later call returns it.
  Status end_step(double now_s) noexcept;

  Message explain() const noexcept { return gate_.explain(0); }
  const char* phase() const noexcept { return gate_.phase_name(); }
  gate::GateTotals totals() const noexcept { return gate_.totals(); }
  const char* last_error() const noexcept { return error_.text; }

 private:
  explicit HookGate(Communicator& comm, const HookGateOptions& options) noexcept : comm_(comm), options_(options) {}
  Status agree() noexcept;
  void say(const Message& message) const noexcept;

  Communicator& comm_;
  const HookGateOptions options_;
  gate::Gate gate_;
  GateAgreement agreement_;
  double last_end_s_ = 0;
  bool timed_ = false;
  int explained_ = -1;
  Status failed_;
  Message error_;
};

}  // namespace gradgate
