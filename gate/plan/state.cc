#include "gate/plan/state.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace gradgate::gate {
namespace {

constexpr double kMessageTag = 1195528004;  // "GGA\4": the message format; changes with the list of fields below
constexpr size_t kMessageHeader = 4;        // tag, status code, status detail, shape

// The one list of fields: writing, reading and counting all visit it.
template <class State, class Visit>
void visit_state(State& s, Visit&& visit) {
  visit(s.epoch), visit(s.applies_at), visit(s.phase), visit(s.phase_start), visit(s.last_agreement);
  visit(s.next_agreement), visit(s.phase_end), visit(s.hold_steps), visit(s.rounds), visit(s.challenge);
  visit(s.trial), visit(s.uniform_seen), visit(s.bring_up), visit(s.drift_deferred), visit(s.losing), visit(s.tokens_s),
      visit(s.saved_s);
  visit(s.startup_shadow_s), visit(s.dense_step_s), visit(s.plan_step_s), visit(s.reference_step_s);
  visit(s.measure_cost_s), visit(s.events), visit(s.step_s), visit(s.window_saved_s), visit(s.shadow_s);
  visit(s.check_cost_s), visit(s.window_steps), visit(s.verdict), visit(s.pairs), visit(s.wins), visit(s.losses);
  visit(s.p), visit(s.median_gain_s), visit(s.test_plan_s), visit(s.test_base_s), visit(s.drift_from_s),
      visit(s.test_challenge);
  visit(s.deferred_drift_check), visit(s.failed_calls), visit(s.shut_by);
  visit(s.exposed), visit(s.exposed_dense_s), visit(s.exposed_plan_s), visit(s.demotions);
  for (auto& b : s.buckets) {
    visit(b.running), visit(b.plan), visit(b.flush), visit(b.closed_now), visit(b.closed_candidate), visit(b.barred);
    visit(b.barred_why), visit(b.running_transfer_s), visit(b.decision.chosen), visit(b.decision.considered);
    visit(b.decision.dense_s), visit(b.decision.encode_s), visit(b.decision.transfer_s), visit(b.decision.decode_s);
    visit(b.decision.payload_bytes), visit(b.decision.why);
    visit(b.ready_s), visit(b.guarded_now), visit(b.guard_candidate), visit(b.guard_stage1), visit(b.guard_stage2);
    visit(b.guard_residual), visit(b.guard_non_finite);
  }
}

bool valid_state(const GateShape& shape, const PlanState& s) noexcept {
  const size_t candidates = shape.candidate_count();
  bool ok = s.phase <= Phase::fixed && s.verdict <= Verdict::lose && s.next_agreement <= kNever &&
            s.phase_end <= kNever && s.phase_start <= s.applies_at && s.last_agreement <= s.applies_at &&
            s.rounds <= shape.config.verify_rounds;
  ok = ok && (s.phase != Phase::verify || s.rounds >= 1) && s.shut_by < kWhyCount &&
       s.hold_steps <= shape.config.hold_max;
  for (size_t i = 0; ok && i < s.buckets.size(); ++i) {
    const BucketState& b = s.buckets[i];
    ok = b.running <= candidates && b.plan <= candidates && b.closed_candidate <= candidates &&
         b.guard_candidate <= candidates && (b.running == 0 || shape.offered(i, b.running)) &&
         (b.plan == 0 || shape.offered(i, b.plan)) && static_cast<int>(b.barred_why) < kWhyCount &&
         static_cast<int>(b.decision.why) < kWhyCount && b.decision.chosen >= 0 &&
         b.decision.chosen <= static_cast<int>(candidates) && b.decision.considered >= 0 &&
         b.decision.considered <= static_cast<int>(candidates);
  }
  return ok;
}

// Largest value of an integer field that a double from outside may turn into.
template <class Field>
constexpr double field_limit() {
  if constexpr (std::is_same_v<Field, uint64_t>)
    return static_cast<double>(kNever);
  else if constexpr (std::is_same_v<Field, bool>)
    return 1;
  else if constexpr (sizeof(Field) == 1)
    return 255;
  else if constexpr (std::is_signed_v<Field>)
    return 2147483647.0;
  else
    return 4294967295.0;
}

}  // namespace

const char* action_name(Action action) noexcept {
  switch (action) {
    case Action::dense:
      return "dense";
    case Action::probe:
      return "probe";
    case Action::flush:
      return "flush";
    case Action::compress:
      return "compress";
  }
  return "?";
}

bool valid_config(const GateConfig& c) noexcept {
  const auto share = [](double v) { return v >= 0 && v <= 1; };
  return c.mode <= Mode::observe && c.ranks >= 1 && std::isfinite(c.min_bytes) && c.min_bytes >= 0 &&
         c.shadow_samples >= 1 && c.startup_max >= 4 && c.startup_max <= 10000 && c.startup_min >= 1 &&
         c.startup_min <= c.startup_max && c.shadow_samples <= 1000 && c.window >= 1 && c.window <= kMaxWindow &&
         c.discard <= 1000 && c.verify_window > c.discard && c.verify_window <= 10000 && c.verify_rounds >= 1 &&
         c.verify_rounds <= 16 &&
         // Six pairs that all point one way are the fewest that p < 0.05 can accept.
         2 * (c.verify_window - c.discard) * c.verify_rounds >= 6 && share(c.significance) && share(c.min_gain) &&
         c.agree_every >= 1 && c.agree_every <= 1000000 && c.hold_first >= 1 && c.hold_max >= c.hold_first &&
         c.hold_max <= (1u << 30) && std::isfinite(c.drift) && c.drift > 0 && share(c.token_fraction) &&
         c.losing_windows >= 1 && c.observe_after >= 1 && c.error_budget > 0 && std::isfinite(c.error_budget) &&
         c.residual_budget > 0 && std::isfinite(c.residual_budget);
}

bool valid_inputs(std::span<const CandidateInfo> candidates, std::span<const BucketInfo> buckets) noexcept {
  if (candidates.size() > static_cast<size_t>(kMaxCandidates)) return false;
  for (const CandidateInfo& c : candidates) {
    if (c.name[0] == '\0' || std::memchr(c.name, '\0', sizeof(c.name)) == nullptr ||
        c.exchange > Exchange::hierarchical || c.between > Exchange::hierarchical)
      return false;
  }
  const auto size = [](double v) { return std::isfinite(v) && v >= 0; };
  for (const BucketInfo& b : buckets) {
    if (!size(b.dense_bytes) || !std::all_of(b.payload_bytes, b.payload_bytes + candidates.size(), size)) return false;
  }
  return true;
}

const char* phase_text(Phase phase) noexcept {
  switch (phase) {
    case Phase::startup:
      return "startup";
    case Phase::measure:
      return "measure";
    case Phase::verify:
      return "verify";
    case Phase::hold:
      return "hold";
    case Phase::observe:
      return "observe";
    case Phase::fixed:
      return "fixed";
  }
  return "?";
}

uint32_t GateShape::shadow_calls() const noexcept {
  const uint32_t n = static_cast<uint32_t>(std::max<size_t>(candidate_count(), 1));
  return std::max<uint32_t>(2, std::min(config.shadow_samples + 1, config.startup_max / n));
}

uint32_t GateShape::measure_steps() const noexcept {
  const uint32_t steps = static_cast<uint32_t>(candidate_count()) * shadow_calls();
  return std::clamp(steps, config.startup_min, config.startup_max);
}

size_t GateShape::step_capacity() const noexcept {
  return std::max<size_t>(
      {config.agree_every, size_t{4} * config.verify_window * config.verify_rounds, config.startup_max});
}

double hash_shape(const GateShape& shape) noexcept {
  uint64_t hash = 14695981039346656037ull;  // FNV-1a
  const auto bytes = [&](const void* data, size_t n) {
    for (size_t i = 0; i < n; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211ull;
  };
  const auto number = [&](double v) { bytes(&v, sizeof(v)); };
  const GateConfig& c = shape.config;
  for (const double v : {double(c.mode),
                         double(c.ranks),
                         c.min_bytes,
                         double(c.shadow_samples),
                         double(c.startup_max),
                         double(c.startup_min),
                         double(c.discard),
                         double(c.window),
                         double(c.verify_window),
                         double(c.verify_rounds),
                         c.significance,
                         c.min_gain,
                         double(c.agree_every),
                         double(c.hold_first),
                         double(c.hold_max),
                         c.drift,
                         c.token_fraction,
                         double(c.losing_windows),
                         double(c.observe_after),
                         c.error_budget,
                         c.residual_budget}) {
    number(v);
  }
  for (const CandidateInfo& candidate : shape.candidates) {
    bytes(candidate.name, std::strlen(candidate.name) + 1);
    number(candidate.feedback), number(candidate.unpriced), number(double(candidate.exchange)),
        number(candidate.fidelity), number(double(candidate.between));
  }
  for (const BucketInfo& bucket : shape.buckets) {
    number(bucket.dense_bytes);
    for (size_t i = 0; i < shape.candidate_count(); ++i) number(bucket.payload_bytes[i]);
  }
  return static_cast<double>(hash >> 12);  // 52 bits
}

PlanState initial_state(const GateShape& shape) {
  PlanState s;
  s.buckets.resize(shape.buckets.size());
  const GateConfig& c = shape.config;
  bool any_offered = false;
  for (size_t b = 0; b < shape.buckets.size(); ++b) {
    BucketState& bucket = s.buckets[b];
    for (size_t i = 1; i <= shape.candidate_count(); ++i)
      any_offered = any_offered || shape.offered(b, static_cast<int>(i));
    bucket.decision.why = c.ranks <= 1                                 ? Why::single_rank
                          : c.mode == Mode::off                        ? Why::mode_off
                          : shape.buckets[b].dense_bytes == 0          ? Why::empty_bucket
                          : shape.buckets[b].dense_bytes < c.min_bytes ? Why::below_min_bytes
                          : shape.candidates.empty()                   ? Why::no_candidate
                                                                       : Why::starting;
    if (c.mode == Mode::on && bucket.decision.why == Why::starting) {
      const bool open = shape.offered(b, 1);
      bucket.running = bucket.plan = open ? 1 : 0;
      bucket.decision.chosen = bucket.decision.considered = bucket.running;
      bucket.decision.why = open ? Why::mode_on : Why::no_candidate;
    }
  }
  if (c.ranks <= 1 || c.mode == Mode::off || !any_offered) return s;
  if (c.mode == Mode::on) {
    // Nothing is measured or compared; the ranks meet for the guard and for exchanges that failed.
    for (const BucketState& bucket : s.buckets) {
      if (bucket.running != 0) s.next_agreement = c.agree_every;
    }
    return s;
  }
  s.phase = c.mode == Mode::observe ? Phase::observe : Phase::startup;
  s.phase_end = c.mode == Mode::observe ? c.observe_after : shape.measure_steps();
  s.next_agreement = s.phase_end;
  s.hold_steps = c.hold_first;
  return s;
}

Assignment assignment(const GateShape& shape, const PlanState& state, size_t bucket, uint64_t step) noexcept {
  const BucketState& b = state.buckets[bucket];
  if (state.phase != Phase::verify || step >= state.phase_end) return {b.running, false};
  const bool plan = verify_runs_plan(step - state.phase_start, shape.config.verify_window);
  const uint8_t base = state.challenge ? b.running : 0, candidate = plan ? b.plan : base;
  return {candidate, candidate == 0 && (b.plan != 0 || b.running != 0)};
}

int shadow_candidate(const GateShape& shape, const PlanState& state, size_t bucket, uint64_t step) noexcept {
  if (state.phase != Phase::startup && state.phase != Phase::measure && state.phase != Phase::observe) return -1;
  const uint64_t offset = step - state.phase_start, n = shape.candidate_count();
  if (offset >= n * shape.shadow_calls() || offset >= shape.measure_steps()) return -1;
  // Buckets are staggered so that a step carries a mix of cheap and dear candidates.
  const int candidate = 1 + static_cast<int>((offset + bucket) % n);
  if (shape.candidates[static_cast<size_t>(candidate) - 1].unpriced) return -1;
  if (!selectable(shape, state, bucket, candidate)) return -1;
  return candidate == state.buckets[bucket].running ? -1 : candidate;  // what runs is measured as it runs
}

bool transfer_counts(const GateShape& shape, const PlanState& state, uint64_t step) noexcept {
  const uint64_t offset = step - state.phase_start;
  if (state.phase == Phase::verify) return offset % shape.config.verify_window >= shape.config.discard;
  return offset >= shape.config.discard;
}

bool guard_step(const GateShape& shape, const PlanState& state, uint64_t step) noexcept {
  if (state.next_agreement == kNever) return false;
  if (state.phase == Phase::verify) return step + shape.config.verify_window == state.phase_end;
  return step + 1 == state.next_agreement;
}

size_t message_doubles(size_t buckets) {
  PlanState state;
  state.buckets.resize(buckets);
  size_t n = kMessageHeader;
  visit_state(state, [&](auto&) { ++n; });
  return n;
}

void write_message(const GateShape& shape, const PlanState& state, std::span<double> out) noexcept {
  out[0] = kMessageTag, out[1] = 0, out[2] = 0, out[3] = shape.hash;
  size_t at = kMessageHeader;
  visit_state(state, [&](const auto& field) { out[at++] = static_cast<double>(field); });
}

void write_error_message(const GateShape& shape, Status error, std::span<double> out) noexcept {
  std::fill(out.begin(), out.end(), 0.0);
  out[0] = kMessageTag, out[1] = static_cast<double>(error.code()), out[2] = static_cast<double>(error.detail());
  out[3] = shape.hash;
}

Status read_message(const GateShape& shape, std::span<const double> in, PlanState* state, Status* error) {
  if (in.size() != shape.message_size || in[0] != kMessageTag || in[3] != shape.hash) return StatusCode::bad_payload;
  if (!(in[1] >= 0 && in[1] <= static_cast<double>(StatusCode::internal)) || !(std::fabs(in[2]) <= kNever)) {
    return StatusCode::bad_payload;
  }
  *error = Status(static_cast<StatusCode>(static_cast<uint32_t>(in[1])), static_cast<int64_t>(in[2]));
  if (!error->ok()) return {};
  PlanState read;
  read.buckets.resize(shape.buckets.size());
  size_t at = kMessageHeader;
  bool ok = true;
  visit_state(read, [&](auto& field) {
    using Field = std::remove_reference_t<decltype(field)>;
    const double value = in[at++];
    if constexpr (std::is_same_v<Field, double>) {
      field = value;
    } else if (value >= 0 && value <= field_limit<Field>() && value == std::floor(value)) {
      field = static_cast<Field>(value);
    } else {
      ok = false;
    }
  });
  if (!ok || !valid_state(shape, read)) return StatusCode::bad_payload;
  *state = std::move(read);
  return {};
}

}  // namespace gradgate::gate
