#include "integration/hook_gate.h"

#include <cstdio>
#include <limits>
#include <new>

#include "integration/session_impl.h"

namespace gradgate {

Status HookGate::create(Communicator& comm, const HookGateOptions& options, std::unique_ptr<HookGate>* out,
                        Message* why) noexcept {
  const AgreedField fields[] = {agreed_field("hook", "%s", options.name),
                                agreed_field("bytes", "%.17g", options.dense_bytes)};
  GRADGATE_TRY(agree_on(comm, fields, options.timeout_s, why));
  try {
    auto made = std::unique_ptr<HookGate>(new HookGate(comm, options));
    gate::GateConfig config;
    config.ranks = static_cast<uint32_t>(comm.size());
    gate::CandidateInfo candidate;
    std::snprintf(candidate.name, sizeof(candidate.name), "%.47s", options.name);
    candidate.fidelity = 1;
    candidate.unpriced = true;
    gate::BucketInfo bucket;
    bucket.dense_bytes = options.dense_bytes;
    bucket.payload_bytes[0] = options.dense_bytes;
    if (const Status s = gate::Gate::create(config, {&candidate, 1}, {&bucket, 1}, &made->gate_); !s.ok()) {
      why->format("hook '%s', %g bytes: the gate refused them (a name of 1 … 47 characters, bytes >= 0)", options.name,
                  options.dense_bytes);
      return s;
    }
    made->gate_.set_log(options.log);
    *out = std::move(made);
    return {};
  } catch (const std::bad_alloc&) {
    why->format("out of memory while creating a gate");
    return StatusCode::out_of_memory;
  }
}

Status HookGate::end_step(double now_s) noexcept {
  if (!failed_.ok()) return failed_;
  gate_.end_step(timed_ ? now_s - last_end_s_ : std::numeric_limits<double>::quiet_NaN());
  last_end_s_ = now_s;
  timed_ = true;
  if (!gate_.agreement_due()) return {};
  failed_ = agree();
  return failed_;
}

Status HookGate::agree() noexcept {
  GRADGATE_TRY(agreement_.run(gate_, comm_, gate_.step(), options_.timeout_s, &error_));
  const int now = gate_.running(0) * 2 + (gate_.settled() ? 1 : 0);
  if (now != explained_) {
    explained_ = now;
    say(gate_.explain(0));
    say(gate_.explain_plan());
  }
  return {};
}

void HookGate::say(const Message& message) const noexcept {
  if (comm_.rank() == 0 && options_.explain != nullptr && message.text[0] != '\0')
    options_.explain(options_.explain_context, message.text);
}

}  // namespace gradgate
