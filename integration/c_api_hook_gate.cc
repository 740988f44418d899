// The C interface of HookGate.
#include <cmath>
#include <new>

#include "gradgate/gradgate_c.h"
#include "integration/c_api_types.h"
#include "integration/hook_gate.h"

using gradgate::Message;
using gradgate::StatusCode;
using gradgate::c_api::code;
using gradgate::c_api::report;

struct gg_hook_gate {
  std::unique_ptr<gradgate::HookGate> gate;
  Message text;
};

extern "C" {

int gg_hook_gate_create(gg_comm* comm, const gg_hook_gate_options* options, gg_hook_gate** out, char* why,
                        size_t why_bytes) {
  Message message;
  if (out != nullptr) *out = nullptr;
  if (comm == nullptr || options == nullptr || out == nullptr || options->size != sizeof(*options) ||
      options->name == nullptr || !(options->timeout_s > 0) || !std::isfinite(options->timeout_s)) {
    message.format("gg_hook_gate_create: comm, options with size, name and a positive timeout_s, and out are needed");
    return report(StatusCode::invalid_argument, message, why, why_bytes);
  }
  gradgate::HookGateOptions o;
  std::snprintf(o.name, sizeof(o.name), "%s", options->name);
  o.dense_bytes = options->dense_bytes;
  o.timeout_s = options->timeout_s;
  o.log = {options->log_context, options->log};
  o.explain = options->explain;
  o.explain_context = options->explain_context;
  auto holder = std::unique_ptr<gg_hook_gate>(new (std::nothrow) gg_hook_gate);
  if (!holder) return report(StatusCode::out_of_memory, message, why, why_bytes);
  if (const auto s = gradgate::HookGate::create(*comm->comm, o, &holder->gate, &message); !s.ok())
    return report(s, message, why, why_bytes);
  *out = holder.release();
  return 0;
}
void gg_hook_gate_destroy(gg_hook_gate* gate) { delete gate; }

int gg_hook_gate_plan(const gg_hook_gate* gate) {
  return gate == nullptr ? GG_STEP_DENSE : static_cast<int>(gate->gate->plan());
}
int gg_hook_gate_end_step(gg_hook_gate* gate, double now_s) {
  return gate == nullptr ? code(StatusCode::invalid_argument) : code(gate->gate->end_step(now_s));
}
const char* gg_hook_gate_explain(gg_hook_gate* gate) {
  if (gate == nullptr) return "";
  gate->text = gate->gate->explain();
  return gate->text.text;
}
const char* gg_hook_gate_phase(const gg_hook_gate* gate) { return gate == nullptr ? "" : gate->gate->phase(); }
void gg_hook_gate_get_stats(const gg_hook_gate* gate, gg_hook_gate_stats* out) {
  if (gate == nullptr || out == nullptr) return;
  const gradgate::gate::GateTotals t = gate->gate->totals();
  *out = {t.steps, t.compressed_steps, t.saved_s, t.dense_step_s, t.plan_step_s};
}
const char* gg_hook_gate_last_error(const gg_hook_gate* gate) {
  return gate == nullptr ? "no gate" : gate->gate->last_error();
}

}  // extern "C"
