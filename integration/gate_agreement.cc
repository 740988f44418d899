#include "integration/gate_agreement.h"

#include <new>

namespace gradgate {

Status GateAgreement::run(gate::Gate& gate, Communicator& control, uint64_t step, double timeout_s,
                          Message* why) noexcept {
  const auto failed = [&](Status s, const char* stage) {
    why->format("gate agreement after step %llu: %s: %s", static_cast<unsigned long long>(step), stage,
                control.last_error()[0] ? control.last_error() : s.message());
    return s;
  };
  try {
    report_.resize(gate.report_size());
    reports_.resize(report_.size() * static_cast<size_t>(control.size()));
    message_.resize(gate.message_size());
  } catch (const std::bad_alloc&) {
    return failed(StatusCode::out_of_memory, "memory for the reports");
  }
  if (const Status s = gate.write_report(report_); !s.ok()) return failed(s, "writing the report");
  const Deadline deadline = Deadline::after(timeout_s);
  if (const Status s = control.all_gather(report_.data(), reports_.data(), report_.size(), DType::f64, {}, deadline);
      !s.ok())
    return failed(s, "gathering the reports");
  if (control.rank() == 0) {
    if (const Status s = gate.decide(reports_, message_); !s.ok()) return failed(s, "deciding");
  }
  if (const Status s = control.broadcast(message_.data(), message_.size(), DType::f64, 0, {}, deadline); !s.ok())
    return failed(s, "sending the plan");
  if (const Status s = gate.apply(message_); !s.ok()) return failed(s, "applying the plan");
  return {};
}

}  // namespace gradgate
