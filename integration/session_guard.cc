// What the session measures for the guard (gate/guard.h): the loss of one compressed exchange, both stages, seen
// through the residual that it leaves. A codec without feedback gets a residual of zeros for this one exchange; it
// changes no result.
#include <cmath>
#include <cstring>

#include "integration/comm/half.h"
#include "integration/comm/hierarchical_layout.h"
#include "integration/comm/two_shot_layout.h"
#include "integration/session_impl.h"

namespace gradgate {
namespace {

template <class Visit>
void each_value(const Vec& v, size_t first, size_t count, Visit visit) noexcept {
  switch (v.dtype) {
    case DType::f32:
      for (size_t i = first; i < first + count; ++i) visit(i, static_cast<const float*>(v.data)[i]);
      return;
    case DType::bf16:
      for (size_t i = first; i < first + count; ++i)
        visit(i, comm::bf16_to_float(static_cast<const uint16_t*>(v.data)[i]));
      return;
    case DType::f16:
      for (size_t i = first; i < first + count; ++i)
        visit(i, comm::f16_to_float(static_cast<const uint16_t*>(v.data)[i]));
      return;
    default:  // no codec takes them
      return;
  }
}

/// Equal bytes, equal hash: 52 bits, exact as a double. By words, four streams, so that it runs at memory speed.
double hash_values(const Vec& v) noexcept {
  const auto* bytes = static_cast<const std::byte*>(v.data);
  const size_t size = v.count * dtype_bytes(v.dtype);
  uint64_t lanes[4] = {0x9e3779b97f4a7c15ull, 0xbf58476d1ce4e5b9ull, 0x94d049bb133111ebull, size};
  size_t at = 0;
  for (; at + 32 <= size; at += 32) {
    for (size_t lane = 0; lane < 4; ++lane) {
      uint64_t word;
      std::memcpy(&word, bytes + at + 8 * lane, sizeof(word));
      lanes[lane] = (lanes[lane] ^ word) * 0x100000001b3ull;
    }
  }
  uint64_t hash = fnv1a64(bytes + at, size - at);
  for (const uint64_t lane : lanes) hash = ((hash ^ lane) * 0xd6e8feb86659fd93ull) ^ (hash >> 29);
  return static_cast<double>(hash >> 12);
}

}  // namespace

comm::Shard owned_part(const ExchangeShape& shape) noexcept {
  if (shape.candidate.exchange == Exchange::hierarchical) {
    const comm::NodeShard shard(shape);
    return {shard.first, shard.count};
  }
  if (shape.candidate.exchange != Exchange::two_shot) return {};
  return comm::Shards(shape)[shape.rank];
}

bool SessionImpl::begin_guard(const gate::StepPlan& plan, ExchangeArgs* args, gate::GuardReading* reading) noexcept {
  const size_t count = args->shape.count;
  if (!plan.guard || args->feedback == Feedback::flush || args->shape.candidate == dense_candidate()) return false;
  if (args->feedback == Feedback::none) {
    if (shadow_.size() < count * sizeof(float)) return false;
    if (!place_.zero(shadow_.data(), count * sizeof(float)).ok()) return false;
    args->residual = shadow_.floats();
    args->feedback = Feedback::apply;
  }
  if (place_.on_device()) return true;  // the sums are enqueued
  *reading = {};
  reading->norm1 = reading->gradient = reading->non_finite_in = 0;
  const comm::Shard own = owned_part(args->shape);
  each_value(args->gradient, 0, count, [&](size_t i, float g) {
    if (!std::isfinite(g)) {
      ++reading->non_finite_in;
      return;
    }
    const double value = g, x = value + args->residual[i];
    reading->gradient += value * value;
    if (i - own.first >= own.count) reading->norm1 += x * x;
  });
  return true;
}

void SessionImpl::end_guard(uint32_t index, const ExchangeArgs& args, gate::GuardReading reading) noexcept {
  reading.error1 = reading.error2 = reading.norm2 = reading.non_finite_out = 0;
  const comm::Shard own = owned_part(args.shape);
  each_value(args.gradient, 0, args.shape.count, [&](size_t i, float out) {
    if (!std::isfinite(out)) {
      ++reading.non_finite_out;
      return;
    }
    const double e = args.residual[i];
    if (i - own.first >= own.count) {
      reading.error1 += e * e;
    } else {
      const double sum = static_cast<double>(out) * args.shape.ranks + e;
      reading.error2 += e * e;
      reading.norm2 += sum * sum;
    }
  });
  reading.residual = reading.error1 + reading.error2;
  reading.hash = hash_values(args.gradient);
  gate_.record_guard(index, reading);
}

}  // namespace gradgate
