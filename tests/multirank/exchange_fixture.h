// A group of ranks with a gradient and a residual each, exchanges run over them, and what format.md says must come out,
// by sequential code over the reference codecs.
#pragma once

#include <cstring>
#include <stdexcept>
#include <vector>

#include "codecs/reference.h"
#include "gradgate/exchange.h"
#include "integration/comm/half.h"
#include "tests/support/gen.h"
#include "tests/support/rank_harness.h"
#include "tests/support/specs.h"

namespace gradgate::test {

/// What one exchange gave on one rank.
struct Outcome {
  Status status;
  Message why;
  ExchangeTimes times;
};

/// The state of all ranks between exchanges.
struct Ranks {
  Ranks(int n_ranks, size_t n_elements, DType type)
      : count(n_elements), dtype(type), gradients(static_cast<size_t>(n_ranks)) {
    residuals.assign(gradients.size(), std::vector<float>(count, 0.0f));
  }
  int size() const { return static_cast<int>(gradients.size()); }

  ExchangeArgs args(int rank, const Candidate& candidate, Feedback feedback, uint32_t step) {
    const auto r = static_cast<size_t>(rank);
    ExchangeArgs args;
    args.shape = {candidate, count, dtype, rank, size(), 1};
    args.gradient = gradients[r].vec();
    args.residual = feedback == Feedback::none ? nullptr : residuals[r].data();
    args.feedback = feedback;
    args.seed = {7, 3, step, 0};
    return args;
  }

  size_t count;
  DType dtype;
  std::vector<Gradient> gradients;
  std::vector<std::vector<float>> residuals;
};

/// A change of arguments: nodes of so many ranks, for hierarchical exchanges.
inline std::function<void(ExchangeArgs&)> nodes_of(int per_node) {
  return [per_node](ExchangeArgs& args) { args.shape.ranks_per_node = per_node; };
}

/// The communicators of a hierarchical exchange; none for the others.
inline NodeTiers tiers_of(Communicator& comm, const ExchangeShape& shape) {
  NodeTiers tiers;
  Message why;
  if (shape.candidate.exchange == Exchange::hierarchical &&
      !split_nodes(comm, shape.ranks_per_node, kWatchdogSeconds, &tiers, &why).ok())
    throw std::runtime_error(why.text);
  return tiers;
}

/// Runs one exchange on all ranks, from a workspace of any alignment; `change` may alter a rank's arguments before.
inline std::vector<Outcome> exchange(Ranks& ranks, const Candidate& candidate, Feedback feedback, uint32_t step,
                                     const std::function<void(ExchangeArgs&)>& change = {}) {
  std::vector<Outcome> outcomes(ranks.gradients.size());
  run_ranks(ranks.size(), [&](Communicator& comm) {
    ExchangeArgs args = ranks.args(comm.rank(), candidate, feedback, step);
    if (change) change(args);
    const NodeTiers tiers = tiers_of(comm, args.shape);
    std::vector<std::byte> workspace(exchange_workspace_bytes(args.shape) + 1);
    args.workspace = Bytes(workspace).subspan(1);
    Outcome& outcome = outcomes[static_cast<size_t>(comm.rank())];
    outcome.status = run_exchange(comm, args, kWatchdogSeconds, {}, &outcome.times, &outcome.why, &tiers);
  });
  return outcomes;
}

inline void expect_all_ok(const std::vector<Outcome>& outcomes) {
  for (size_t r = 0; r < outcomes.size(); ++r)
    EXPECT_TRUE(outcomes[r].status.ok()) << "rank " << r << ": " << outcomes[r].why.text;
}

/// The same exchange, one rank after the other.
inline void reference_two_shot(Ranks& ranks, const CodecSpec& spec, bool feedback, uint32_t step) {
  const size_t n = ranks.count, element = dtype_bytes(ranks.dtype);
  const auto size = ranks.gradients.size();
  const size_t unit = std::max<size_t>(256, spec.id == CodecId::chunk_topk ? spec.param1
                                            : spec.id == CodecId::onebit   ? 1024
                                                                           : 0);
  const size_t shard = unit * (((n + size - 1) / size + unit - 1) / unit);
  const auto first = [&](size_t r) { return std::min(n, r * shard); };
  const auto part = [&](size_t r, size_t owner) {
    return ConstVec(static_cast<const std::byte*>(ranks.gradients[r].data()) + first(owner) * element,
                    first(owner + 1) - first(owner), ranks.dtype);
  };
  const auto residual = [&](size_t r, size_t owner) {
    return feedback ? ranks.residuals[r].data() + first(owner) : nullptr;
  };
  Gradient result = ranks.gradients[0];
  for (size_t owner = 0; owner < size; ++owner) {
    std::vector<std::vector<std::byte>> payloads(size);
    std::vector<ConstBytes> views(size);
    for (size_t r = 0; r < size; ++r) {
      if (r == owner) continue;
      payloads[r] = reference::encode(spec, part(r, owner), residual(r, owner), false,
                                      {7, 3, step, static_cast<uint32_t>(r), first(owner)}, nullptr);
      views[r] = payloads[r];
    }
    const Seed seed{7, 3, step, static_cast<uint32_t>(size + owner), first(owner)};
    const auto sum =
        reference::reduce_encode(spec, views, owner, part(owner, owner), residual(owner, owner), seed, nullptr);
    const Vec out{static_cast<std::byte*>(result.data()) + first(owner) * element, first(owner + 1) - first(owner),
                  ranks.dtype};
    reference::decode(spec, ranks.dtype, sum.data(), out, static_cast<float>(1.0 / static_cast<double>(size)),
                      Into::store);
  }
  for (Gradient& gradient : ranks.gradients) gradient = result;
}

inline void reference_all_gather(Ranks& ranks, const CodecSpec& spec, bool feedback, uint32_t step) {
  const auto size = ranks.gradients.size();
  std::vector<std::vector<std::byte>> payloads(size);
  for (size_t r = 0; r < size; ++r) {
    payloads[r] = reference::encode(spec, ranks.gradients[r].view(), feedback ? ranks.residuals[r].data() : nullptr,
                                    false, {7, 3, step, static_cast<uint32_t>(r)}, nullptr);
  }
  const std::vector<ConstBytes> views(payloads.begin(), payloads.end());
  Gradient result = ranks.gradients[0];
  reference::decode_sum(spec, ranks.dtype, views, result.vec(), static_cast<float>(1.0 / static_cast<double>(size)));
  for (Gradient& gradient : ranks.gradients) gradient = result;
}

/// Sums of the values of payloads that were all made with one seed, in rank order and the values' dtype.
inline void reference_all_reduce(Ranks& ranks, const CodecSpec& spec, bool feedback, uint32_t step) {
  std::vector<std::vector<std::byte>> payloads;
  for (size_t r = 0; r < ranks.gradients.size(); ++r) {
    payloads.push_back(reference::encode(spec, ranks.gradients[r].view(),
                                         feedback ? ranks.residuals[r].data() : nullptr, false,
                                         {7, 3, step, 0xffffffffu}, nullptr));
  }
  const bool wide = spec.id == CodecId::randk && spec.value == DType::f32;
  for (size_t at = spec.id == CodecId::randk ? 48 : 32; ranks.count > 0 && at < payloads[0].size();
       at += wide ? 4 : 2) {
    float sum = 0;
    for (size_t r = 0; r < payloads.size(); ++r) {
      uint32_t bits = 0;
      std::memcpy(&bits, payloads[r].data() + at, wide ? 4 : 2);
      const float value = std::bit_cast<float>(wide ? bits : bits << 16);
      sum = r == 0 ? value : sum + value;
    }
    uint32_t bits = std::bit_cast<uint32_t>(sum);
    if (!wide) bits = comm::float_to_bf16(sum);
    std::memcpy(payloads[0].data() + at, &bits, wide ? 4 : 2);
  }
  Gradient result = ranks.gradients[0];
  reference::decode(spec, ranks.dtype, payloads[0].data(), result.vec(),
                    static_cast<float>(1.0 / static_cast<double>(payloads.size())), Into::store);
  for (Gradient& gradient : ranks.gradients) gradient = result;
}

inline void reference_exchange(Ranks& ranks, const Candidate& candidate, bool feedback, uint32_t step) {
  if (candidate.exchange == Exchange::all_gather) return reference_all_gather(ranks, candidate.codec, feedback, step);
  if (candidate.exchange == Exchange::all_reduce) return reference_all_reduce(ranks, candidate.codec, feedback, step);
  reference_two_shot(ranks, candidate.codec, feedback, step);
}

}  // namespace gradgate::test
