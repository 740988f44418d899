// The session's buckets: checking a layout, giving every parameter its residual, and moving residuals when the trainer
// regroups its buckets.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "codecs/traits.h"
#include "integration/session_impl.h"

namespace gradgate {

Status SessionImpl::check_layout(std::span<const BucketLayout> buckets, Message* why) {
  std::unordered_set<uint64_t> seen;
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b].dtype == DType::u8 || dtype_bytes(buckets[b].dtype) == 0) {
      why->format("bucket %zu has dtype %s, accepted: f32, bf16, f16, f64", b, dtype_name(buckets[b].dtype));
      return StatusCode::invalid_argument;
    }
    size_t offset = 0;
    for (const ParamSlice& slice : buckets[b].slices) {
      if (slice.offset != offset) {
        why->format("bucket %zu parameter %llu starts at %zu, accepted: %zu (slices are ascending, without gaps)", b,
                    static_cast<unsigned long long>(slice.param_id), slice.offset, offset);
        return StatusCode::invalid_argument;
      }
      if (!seen.insert(slice.param_id).second) {
        why->format("parameter %llu occurs twice in the layout, accepted: once",
                    static_cast<unsigned long long>(slice.param_id));
        return StatusCode::invalid_argument;
      }
      offset += slice.count;
      if (offset < slice.count || offset > SIZE_MAX / 64) {
        why->format("bucket %zu has too many elements", b);
        return StatusCode::invalid_argument;
      }
    }
  }
  return {};
}

namespace {

/// The parts of parameters that lie in a codec's group together with a part of another one.
std::vector<Edge> shared_edges(std::span<const ParamSlice> slices, size_t total) {
  using codecs::kGroup;
  std::vector<Edge> edges;
  for (const ParamSlice& slice : slices) {
    const size_t end = slice.offset + slice.count;
    const size_t head =
        slice.offset % kGroup == 0 ? slice.offset : std::min(end, slice.offset / kGroup * kGroup + kGroup);
    const size_t tail = end == total ? end : std::max(head, end / kGroup * kGroup);
    if (head > slice.offset) edges.push_back({slice.offset, head - slice.offset});
    if (end > tail) edges.push_back({tail, end - tail});
  }
  return edges;
}

}  // namespace

Status SessionImpl::set_layout(std::span<const BucketLayout> buckets) noexcept {
  if (failed_) return refuse(StatusCode::bad_state, "this session failed before: %s", error_.text);
  if (next_bucket_ != 0 && !unplanned_)
    return refuse(StatusCode::bad_state, "set_layout within a step (bucket %u is next); call it between steps",
                  next_bucket_);
  try {
    Message why;
    if (const Status s = check_layout(buckets, &why); !s.ok()) return refuse(s, "set_layout: %s", why.text);
    GRADGATE_TRY(settle());
    if (unplanned_) GRADGATE_TRY(end_unplanned_step());
    if (const Status s = build_layout(buckets); !s.ok()) return s;

    size_t elements = 0;
    for (const Bucket& bucket : buckets_) elements += bucket.count;
    const AgreedField fields[] = {
        agreed_field("layout", "%zu buckets, %zu elements, hash %016llx", buckets_.size(), elements,
                     static_cast<unsigned long long>(layout_hash())),
        agreed_field("step", "%llu", static_cast<unsigned long long>(step_)),
    };
    if (const Status s = agree_on(control(), fields, options_.timeout_s, &why); !s.ok()) {
      Message full;
      full.format("set_layout at step %llu: %s", static_cast<unsigned long long>(step_), why.text);
      return fail(s, full);
    }
    return {};
  } catch (const std::bad_alloc&) {
    Message full;
    full.format("set_layout: out of memory");
    return fail(StatusCode::out_of_memory, full);
  }
}

ExchangeShape SessionImpl::shape_of(const Bucket& bucket, const Candidate& candidate) const noexcept {
  ExchangeShape shape{candidate, bucket.count, bucket.dtype, comm_.rank(), comm_.size(), options_.executor.width};
  shape.device = place_.on_device();
  if (candidate.exchange == Exchange::hierarchical) shape.ranks_per_node = options_.ranks_per_node;
  return shape;
}

Status SessionImpl::build_layout(std::span<const BucketLayout> layout) {
  std::vector<Bucket> next;
  size_t residual_count = 0, work = 0, shadow = 0;
  const bool uses_codecs = options_.mode != Mode::off && comm_.size() > 1;
  const bool measures = uses_codecs && options_.mode != Mode::on;
  for (const BucketLayout& described : layout) {
    Bucket bucket;
    bucket.dtype = described.dtype;
    bucket.slices.assign(described.slices.begin(), described.slices.end());
    for (const ParamSlice& slice : bucket.slices) bucket.count += slice.count;
    for (size_t c = 0; c < (uses_codecs ? candidates_.size() : 1); ++c) {
      const Candidate& candidate = candidates_[c];
      if (!codec_takes(candidate.codec, bucket.dtype)) continue;
      // In mode observe nothing is ever sent with feedback, so nothing can be left to keep: only the scratch of the
      // shadow call is needed.
      bucket.has_residual = bucket.has_residual || (candidate.codec.feedback && options_.mode != Mode::observe);
      work = std::max(work, exchange_workspace_bytes(shape_of(bucket, candidate)));
      // The guard looks through a residual, and gives a codec that has none this one.
      if (options_.mode == Mode::on && !candidate.codec.feedback)
        shadow = std::max(shadow, bucket.count * sizeof(float));
      if (measures && c > 0) {
        const ExchangeShape shape = shape_of(bucket, candidate);
        shadow = std::max(shadow, shape.device ? device_shadow_bytes(shape) : exchange_shadow_bytes(shape));
      }
    }
    if (bucket.has_residual) {
      bucket.residual_offset = residual_count;
      residual_count += bucket.count;
      bucket.edges = shared_edges(bucket.slices, bucket.count);
    }
    next.push_back(std::move(bucket));
  }

  // Room for what hold_edges() takes out of any bucket's residual.
  size_t edges = 0, held = 0;
  for (const Bucket& bucket : next) {
    size_t elements = 0;
    for (const Edge& edge : bucket.edges) elements += edge.count;
    edges = std::max(edges, bucket.edges.size());
    held = std::max(held, elements);
  }
  for (HostFlight& flight : host_flights_) {
    if (place_.on_device()) break;
    flight.held.resize(held);
    flight.is_held.resize(edges);
  }

  std::vector<Bucket> old_buckets = std::move(buckets_);
  Memory old_residuals = std::move(residuals_);
  buckets_ = std::move(next);
  GRADGATE_TRY(place_.allocate(residual_count * sizeof(float), &residuals_));
  GRADGATE_TRY(place_.zero(residuals_.data(), residuals_.size()));
  if (scaled_) GRADGATE_TRY(place_.allocate(residuals_.size(), &before_));
  work = (work + 63) / 64 * 64 * workspaces();
  if (work > workspace_.size()) {
    // Zero, so that what a collective that failed did not bring is no payload of anything.
    GRADGATE_TRY(place_.allocate(work, &workspace_));
    GRADGATE_TRY(place_.zero(workspace_.data(), workspace_.size()));
  }
  if (shadow > shadow_.size()) GRADGATE_TRY(place_.allocate(shadow, &shadow_));
  if (place_.on_device()) GRADGATE_TRY(allocate_flights(buckets_.size()));
  if (has_layout_) GRADGATE_TRY(move_residuals(old_buckets, old_residuals));

  GRADGATE_TRY(make_gate());
  timed_step_ = false;
  has_layout_ = true;
  return {};
}

Status SessionImpl::move_residuals(const std::vector<Bucket>& old_buckets, const Memory& old_residuals) {
  struct Source {
    const float* data;
    size_t count;
    bool pending, taken;
  };
  std::unordered_map<uint64_t, Source> sources;
  for (const Bucket& bucket : old_buckets) {
    if (!bucket.has_residual) continue;
    for (const ParamSlice& slice : bucket.slices)
      sources[slice.param_id] = {old_residuals.floats() + bucket.residual_offset + slice.offset, slice.count,
                                 bucket.pending, false};
  }
  bool any_pending = false;
  for (Bucket& bucket : buckets_) {
    if (!bucket.has_residual) continue;
    for (const ParamSlice& slice : bucket.slices) {
      const auto found = sources.find(slice.param_id);
      if (found == sources.end() || found->second.count != slice.count) continue;
      found->second.taken = true;
      bucket.pending = bucket.pending || found->second.pending;
      GRADGATE_TRY(place_.copy(residuals_.floats() + bucket.residual_offset + slice.offset, found->second.data,
                               slice.count * sizeof(float)));
    }
    any_pending = any_pending || bucket.pending;
  }
  uint64_t dropped = 0;
  std::vector<float> values;
  for (const auto& [id, source] : sources) {
    if (source.taken) continue;
    values.resize(source.count);
    GRADGATE_TRY(place_.read(values.data(), source.data, source.count * sizeof(float)));
    for (const float value : values) {
      if (value == 0.0f) continue;
      ++dropped;
      stats_.dropped_sum += static_cast<double>(value);
    }
  }
  if (dropped > 0) {
    stats_.dropped_residuals += dropped;
    Message text;
    text.format(
        "gradgate: step %llu layout changed: %llu residual elements dropped, their parameters vanished or changed size "
        "(stats: dropped_residuals, "
        "dropped_sum)",
        static_cast<unsigned long long>(step_), static_cast<unsigned long long>(dropped));
    say(text);
  }
  // The gate starts over with dense steps, so what is pending goes out with the first of them. In mode on the codec
  // just carries on.
  if (any_pending && options_.mode == Mode::automatic) flush_ = true;
  // The old memory goes when this returns.
  return place_.on_device() ? comm_.wait(place_.stream(), Deadline::after(options_.timeout_s)) : Status{};
}

Status SessionImpl::make_gate() {
  gate::GateConfig config;
  config.mode = options_.mode;
  config.ranks = static_cast<uint32_t>(comm_.size());
  config.error_budget = options_.error_budget;

  std::vector<gate::CandidateInfo> infos;
  for (size_t c = 1; c < candidates_.size(); ++c) {
    gate::CandidateInfo info;
    std::snprintf(info.name, sizeof(info.name), "%.47s", format_candidate(candidates_[c]).text);
    info.exchange = candidates_[c].exchange;
    info.between = candidates_[c].between;
    info.fidelity = codec_fidelity(candidates_[c].codec);
    info.feedback = candidates_[c].codec.feedback;
    infos.push_back(info);
  }
  std::vector<gate::BucketInfo> gate_buckets;
  for (const Bucket& bucket : buckets_) {
    gate::BucketInfo info;
    info.dense_bytes = static_cast<double>(bucket.count * dtype_bytes(bucket.dtype));
    bool offered = false;
    for (size_t c = 1; c < candidates_.size(); ++c) {
      info.payload_bytes[c - 1] = static_cast<double>(exchange_wire_bytes(shape_of(bucket, candidates_[c])));
      offered = offered || info.payload_bytes[c - 1] > 0;
    }
    gate_buckets.push_back(info);
    if (!offered && bucket.count > 0 && candidates_.size() > 1 && !warned_dtype_) {
      warned_dtype_ = true;
      Message text;
      text.format("gradgate: no listed codec takes %s gradients; such buckets are reduced dense",
                  dtype_name(bucket.dtype));
      say(text);
    }
  }
  Status s = gate::Gate::create(config, infos, gate_buckets, &gate_);
  if (!s.ok()) return refuse(s, "set_layout: the gate refused the configuration (%s)", s.message());
  gate_.set_link(link_);
  gate_.set_log({options_.log_context, options_.log});

  explained_.assign(buckets_.size(), 0);
  explained_phase_.reserve(32);
  explained_phase_ = gate_.phase_name();
  explained_settled_ = gate_.settled();
  return {};
}

uint64_t SessionImpl::layout_hash() const noexcept {
  uint64_t hash = fnv1a64("layout", 6);
  for (const Bucket& bucket : buckets_) {
    const uint64_t head[] = {static_cast<uint64_t>(bucket.dtype), bucket.count, bucket.slices.size()};
    hash = fnv1a64(head, sizeof(head), hash);
    for (const ParamSlice& slice : bucket.slices) {
      const uint64_t words[] = {slice.param_id, slice.offset, slice.count};
      hash = fnv1a64(words, sizeof(words), hash);
    }
  }
  return hash;
}

}  // namespace gradgate
