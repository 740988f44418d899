// The decision log: one JSON line per thing that an agreement decided. Field by field in docs/gate.md.
#include <cmath>

#include "gate/plan/state.h"

namespace gradgate::gate {
namespace {

const char* candidate_name(const GateShape& shape, int c) noexcept {
  return c >= 1 && static_cast<size_t>(c) <= shape.candidates.size() ? shape.candidates[c - 1].name : "dense";
}

double ratio(double dense, double compressed) noexcept { return dense / compressed; }

JsonLine record(std::string_view event, const PlanState& s) noexcept {
  JsonLine line(event);
  line.integer("step", static_cast<int64_t>(s.applies_at)).integer("epoch", static_cast<int64_t>(s.epoch));
  return line;
}

int64_t open_buckets(const PlanState& s) noexcept {
  int64_t n = 0;
  for (const BucketState& b : s.buckets) n += b.running != 0;
  return n;
}

void log_prediction(const GateShape& shape, const PlanState& s, size_t bucket, const LogSink& sink) noexcept {
  const Decision& d = s.buckets[bucket].decision;
  JsonLine line = record("predict", s);
  line.integer("bucket", static_cast<int64_t>(bucket)).number("dense_bytes", shape.buckets[bucket].dense_bytes);
  // The prediction as it was made; what finally runs is in "verify" and "hold".
  line.string("chosen", candidate_name(shape, d.chosen)).string("why", why_name(d.why));
  line.string("considered", candidate_name(shape, d.considered)).number("dense_s", d.dense_s);
  line.number("encode_s", d.encode_s).number("transfer_s", d.transfer_s).number("decode_s", d.decode_s);
  line.number("payload_bytes", d.considered > 0 ? d.payload_bytes : kMissing).number("codec_s", d.codec_s());
  line.number("gain_s", d.gain_s()).number("tolerable_inflation", d.tolerable_inflation());
  line.string("objective", s.exposed ? "exposed" : "serial").number("ready_s", s.buckets[bucket].ready_s);
  line.number("exposed_dense_s", s.exposed_dense_s).number("exposed_plan_s", s.exposed_plan_s);
  line.write(sink);
}

}  // namespace

void log_start(const GateShape& shape, const PlanState& s, uint64_t step, const LogSink& sink) noexcept {
  if (sink.write == nullptr) return;
  JsonLine line("start");
  line.integer("step", static_cast<int64_t>(step)).integer("epoch", static_cast<int64_t>(s.epoch));
  line.string("mode", mode_name(shape.config.mode))
      .integer("ranks", shape.config.ranks)
      .string("phase", phase_text(s.phase));
  line.integer("buckets", static_cast<int64_t>(shape.buckets.size()));
  double bytes = 0;
  for (const BucketInfo& b : shape.buckets) bytes += b.dense_bytes;
  line.number("dense_bytes", bytes).open_array("candidates");
  for (const CandidateInfo& c : shape.candidates) line.item(c.name);
  line.close_array()
      .string("why", s.buckets.empty() ? "no_candidate" : why_name(s.buckets[0].decision.why))
      .write(sink);
}

void log_events(const GateShape& shape, const PlanState& s, const LogSink& sink) noexcept {
  if (sink.write == nullptr) return;
  if (s.events & kEventStartup) {
    record("startup", s)
        .integer("steps", s.window_steps)
        .number("median_step_s", s.step_s)
        .number("shadow_s", s.startup_shadow_s)
        .write(sink);
  }
  if (s.events & kEventFailure) {
    record("failure", s).integer("failed_calls", s.failed_calls).write(sink);
  }
  if (s.events & kEventVerify) {
    record("verify", s)
        .string("what", s.test_challenge ? "challenge" : "recheck")
        .string("verdict", verdict_name(s.verdict))
        .number("plan_step_s", s.test_plan_s)
        .number("base_step_s", s.test_base_s)
        .number("median_gain_s", s.median_gain_s)
        .integer("pairs", s.pairs)
        .integer("wins", s.wins)
        .integer("losses", s.losses)
        .number("p", s.p)
        .number("speedup", ratio(s.test_base_s, s.test_plan_s))
        .number("tolerable_inflation", ratio(s.test_base_s, s.test_plan_s) - 1)
        .number("cost_s", s.check_cost_s)
        .number("saved_s", s.saved_s)
        .write(sink);
  }
  if (s.events & kEventAccount) {
    const bool shut = s.shut_by == static_cast<uint8_t>(Why::lost_account);
    record("account", s)
        .integer("steps", s.window_steps)
        .number("step_s", s.step_s)
        .number("dense_step_s", s.dense_step_s)
        .number("window_saved_s", s.window_saved_s)
        .number("saved_s", s.saved_s)
        .integer("losing_windows", s.losing)
        .string("action", shut                     ? "shut"
                          : s.deferred_drift_check ? "wait"
                                                   : "recheck")
        .write(sink);
  }
  if (s.events & kEventDrift) {
    record("drift", s)
        .number("from_s", s.drift_from_s)
        .number("step_s", s.step_s)
        .number("tokens_s", s.tokens_s)
        .string("action", s.deferred_drift_check ? "wait" : phase_text(s.phase))
        .write(sink);
  }
  for (size_t i = 0; (s.events & kEventGuard) && i < s.buckets.size(); ++i) {
    const BucketState& b = s.buckets[i];
    if (!b.guarded_now) continue;
    record("guard", s)
        .integer("bucket", static_cast<int64_t>(i))
        .string("candidate", candidate_name(shape, b.guard_candidate))
        .number("error_stage1", b.guard_stage1)
        .number("error_stage2", b.guard_stage2)
        .number("residual", b.guard_residual)
        .number("non_finite", b.guard_non_finite)
        .string("action", b.closed_now && b.barred_why >= Why::guard_error ? why_name(b.barred_why) : "keep")
        .write(sink);
  }
  if (s.events & kEventClose) {
    for (size_t i = 0; i < s.buckets.size(); ++i) {
      const BucketState& b = s.buckets[i];
      if (!b.closed_now) continue;
      record("close", s)
          .integer("bucket", static_cast<int64_t>(i))
          .string("candidate", candidate_name(shape, b.closed_candidate))
          .string("why", why_name(b.barred_why))
          .boolean("flush", b.flush)
          .write(sink);
    }
  }
  if (s.events & kEventDefer) {
    record("defer", s).number("tokens_s", s.tokens_s).number("cost_s", s.check_cost_s).write(sink);
  }
  if (s.events & kEventPredict) {
    for (size_t i = 0; i < s.buckets.size(); ++i) log_prediction(shape, s, i, sink);
  }
  if (s.events & kEventObserve) {
    record("observe", s)
        .string("label", "predicted")
        .number("dense_step_s", s.dense_step_s)
        .number("plan_step_s", s.plan_step_s)
        .number("speedup", ratio(s.dense_step_s, s.plan_step_s))
        .number("tolerable_inflation", ratio(s.dense_step_s, s.plan_step_s) - 1)
        .number("shadow_s", s.startup_shadow_s)
        .write(sink);
  }
  if (s.events & kEventHold) {
    record("hold", s)
        .integer("steps", static_cast<int64_t>(s.phase_end - s.phase_start))
        .integer("open", open_buckets(s))
        .integer("buckets", static_cast<int64_t>(s.buckets.size()))
        .number("dense_step_s", s.dense_step_s)
        .number("plan_step_s", open_buckets(s) > 0 ? s.plan_step_s : kMissing)
        .number("saved_s", s.saved_s)
        .number("tokens_s", s.tokens_s)
        .write(sink);
  }
}

}  // namespace gradgate::gate
