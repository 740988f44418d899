#include "integration/cli/model_numbers.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "gate/cost.h"
#include "gate/models/pipeline.h"
#include "integration/cli/quantity.h"
#include "integration/cli/report.h"
#include "integration/cli/table.h"

namespace gradgate::cli {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// What compression does with the payload's bytes. NaN where the ratio or the codec's time is not known.
struct Compression {
  double payload, ring, gather, two_shot;  // transfers
  double budget_ring, budget_gather, budget_two_shot;
  double bandwidth, ratio;
  std::optional<uint32_t> ranks;

  explicit Compression(const ModelInput& in) {
    const double a = in.link.alpha_s, b = in.link.beta_Bps, n = in.ranks, m = in.bytes;
    const double r = in.ratio.value_or(kNone), codec = in.codec_s.value_or(kNone);
    payload = m / r;
    ring = gate::ring_allreduce(a, b, n, payload);
    gather = gate::gather_exchange(a, b, n, payload);
    two_shot = gate::two_shot_exchange(a, b, n, payload);
    budget_ring = budget_two_shot = gate::codec_budget_ring(b, n, m, payload);
    budget_gather = gate::codec_budget_gather(a, b, n, m, payload);
    const bool both = in.ratio && in.codec_s;
    bandwidth = both ? gate::breakeven_bandwidth_ring(n, m, r, codec) : kNone;
    ratio = in.codec_s ? gate::breakeven_ratio_ring(b, n, m, codec) : kNone;
    if (both) ranks = gate::breakeven_ranks_gather(a, b, m, payload, codec);
  }
};

struct Hierarchical {
  double representative = kNone, sharded = kNone;

  explicit Hierarchical(const ModelInput& in) {
    if (!in.nodes) return;
    const double g = in.nodes->ranks_per_node, nodes = in.ranks / g;
    representative = gate::hierarchical_representative(in.nodes->inside, in.link, g, nodes, in.bytes);
    sharded = gate::hierarchical_sharded(in.nodes->inside, in.link, g, nodes, in.bytes);
  }
};

std::string times(double ratio) { return format_number(ratio, ratio < 9.95 ? 2 : 3) + "x"; }
std::string percent(double share) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f %%", share * 100);
  return text;
}

std::string line(const std::string& name, const std::string& value, const std::string& note = "") {
  static const Table columns({{"", "", 30, true}, {"", "", 10}, {"", "", 0, true}});
  return columns.row({name, value, note});
}

std::string message_lines(const ModelInput& in) {
  const double a = in.link.alpha_s, b = in.link.beta_Bps, star = gate::crossover_bytes(a, b);
  std::string text = comment("one message") + line("point to point", format_tenths(gate::p2p(a, b, in.bytes))) +
                     line("n* = alpha beta", format_decimal_size(star),
                          "much shorter messages cost their latency, whatever their size");
  if (in.loggp) {
    text += line("LogGP, one message", format_tenths(gate::loggp_long(*in.loggp, in.bytes)));
    text += line("LogGP, a train of them", format_tenths(gate::loggp_train(*in.loggp, in.bytes, in.messages)),
                 format_number(in.messages, 4) + " messages");
  }
  return text;
}

std::string collective_lines(const ModelInput& in) {
  const double a = in.link.alpha_s, b = in.link.beta_Bps, n = in.ranks, m = in.bytes;
  const gate::AlgorithmAdvice advice = gate::advise(in.link, in.ranks, m);
  const double crossover = gate::ring_tree_crossover(a, b, n);
  std::string text =
      comment("collectives; in parentheses in whole rounds") +
      line("ring all-reduce", format_tenths(gate::ring_allreduce(a, b, n, m)), "what the gate prices with") +
      line("tree all-reduce", format_tenths(gate::tree_allreduce(a, b, n, m)),
           "(" + format_tenths(advice.tree_s) + ")") +
      line("halving-doubling all-reduce", format_tenths(gate::halving_doubling_allreduce(a, b, n, m)),
           "(" + format_tenths(advice.halving_s) + ")") +
      line("all-gather, reduce-scatter", format_tenths(gate::ring_pass(a, b, n, m)), "also all-to-all, pairwise") +
      line("broadcast", format_tenths(gate::tree_broadcast(a, b, n, m)),
           "(" + format_tenths(gate::tree_broadcast_steps(a, b, in.ranks, m)) + ")");
  if (std::isfinite(crossover)) text += line("ring beats tree above", format_decimal_size(crossover));
  if (in.ranks > 1) {
    text += line("advice", algorithm_name(advice.best),
                 std::string("the fastest in whole rounds; of ring and tree: ") + algorithm_name(advice.ring_or_tree));
  }
  if (in.nodes) {
    const Hierarchical levels(in);
    text += comment("two levels, " + std::to_string(in.nodes->ranks_per_node) + " ranks a node, inside " +
                    format_bandwidth(in.nodes->inside.beta_Bps) + " and " + format_time(in.nodes->inside.alpha_s));
    text += line("one representative per node", format_tenths(levels.representative));
    text += line("sharded over the node", format_tenths(levels.sharded),
                 "every rank on a link of its own between the nodes");
  }
  return text;
}

std::string exchange_line(const Table& table, const ModelInput& in, const char* name, double transfer, double budget,
                          double dense) {
  if (!in.codec_s)
    return table.row({name, format_tenths(transfer), format_tenths(budget), "", "",
                      budget > 0 ? "" : "LOSES whatever the codec costs"});
  const double total = gate::compressed_total(*in.codec_s, transfer, 0), gain = budget - *in.codec_s;
  const std::string verdict = gain > 0 ? "pays, saves " + format_tenths(gain) : "LOSES " + format_tenths(-gain);
  return table.row(
      {name, format_tenths(transfer), format_tenths(budget), format_tenths(total), times(dense / total), verdict});
}

std::string compression_lines(const ModelInput& in) {
  if (!in.ratio) return "";
  const Compression c(in);
  const double dense = gate::ring_allreduce(in.link.alpha_s, in.link.beta_Bps, in.ranks, in.bytes);
  std::string title =
      "compressed " + times(*in.ratio) + " to " + format_decimal_size(c.payload) + " a rank";
  title += in.codec_s ? ", codec " + format_time(*in.codec_s) : ", codec time not given (--codec-time)";
  const Table table({{"exchange", "", 30, true},
                     {"transfer", "", 10},
                     {"budget", "", 10},
                     {"with codec", "", 10},
                     {"speed-up", "", 9},
                     {"", "", 0, true}});
  std::string text = comment(title) + table.header();
  text += exchange_line(table, in, "all_reduce (payloads that add)", c.ring, c.budget_ring, dense);
  text += exchange_line(table, in, "two_shot", c.two_shot, c.budget_two_shot, dense);
  text += exchange_line(table, in, "all_gather", c.gather, c.budget_gather, dense);
  if (in.codec_s) {
    const double codec = *in.codec_s, gather_gain = c.budget_gather - codec;
    if (gather_gain < 0 && c.budget_ring > codec) {
      text += comment("payloads that cannot be summed on the way (exact top-k) travel by all_gather: " +
                      format_tenths(c.gather) + " + " + format_tenths(codec) + " against " + format_tenths(dense) +
                      " dense.\nIt LOSES " + format_tenths(-gather_gain) + "; the " + times(dense / (c.ring + codec)) +
                      " of the ring formula is not for them.");
    }
    if (std::isfinite(c.bandwidth))
      text += line("pays on a ring below", format_bandwidth(c.bandwidth), "of link bandwidth, latency apart");
    if (std::isfinite(c.ratio)) text += line("pays on a ring above", format_number(c.ratio, 4) + "x", "of compression");
    if (std::isnan(c.ratio)) text += line("pays on a ring", "never", "the codec takes longer than the bytes do");
    const std::string most = *c.ranks == gate::kMostRanks ? "any number"
                             : *c.ranks == 1              ? "no number"
                                                          : "N <= " + std::to_string(*c.ranks);
    text += line("pays by all_gather at", most, "of ranks, looked at up to " + std::to_string(gate::kMostRanks));
  }
  return text;
}

std::string other_lines(const ModelInput& in) {
  std::string text;
  if (in.codec_rate && in.ratio) {
    const double bytes = gate::breakeven_bytes_ring(in.link.beta_Bps, in.ranks, *in.ratio, in.codec_rate->fixed_s,
                                                    in.codec_rate->rate_Bps);
    text +=
        line("pays on a ring from", std::isfinite(bytes) ? format_decimal_size(bytes) : "never",
             "codec " + format_time(in.codec_rate->fixed_s) + " + M / " + format_bandwidth(in.codec_rate->rate_Bps));
  }
  if (!in.pipeline) return text;
  const ModelInput::Pipeline& p = *in.pipeline;
  const std::string note = "p = " + format_number(p.stages, 4) + ", m = " + format_number(p.micro_batches, 4);
  text += comment("pipeline") + line("bubble", percent(gate::pipeline_bubble(p.stages, p.micro_batches)), note);
  if (p.chunks > 1)
    text += line("interleaved", percent(gate::pipeline_bubble(p.stages, p.micro_batches, p.chunks)),
                 "V = " + format_number(p.chunks, 4));
  if (p.target) {
    const double m = gate::micro_batches_for(p.stages, *p.target, p.chunks);
    text += line("micro-batches", std::to_string(static_cast<uint64_t>(m)),
                 "for a bubble of at most " + percent(*p.target));
  }
  return text;
}

}  // namespace

Json model_json(const ModelInput& in) {
  const double a = in.link.alpha_s, b = in.link.beta_Bps, n = in.ranks, m = in.bytes;
  const double pass = gate::ring_pass(a, b, n, m);
  const Compression c(in);
  const Hierarchical levels(in);
  Json json = {{"p2p", number(gate::p2p(a, b, m))},
               {"crossover_bytes", number(gate::crossover_bytes(a, b))},
               {"ring_allreduce", number(gate::ring_allreduce(a, b, n, m))},
               {"tree_allreduce", number(gate::tree_allreduce(a, b, n, m))},
               {"halving_doubling_allreduce", number(gate::halving_doubling_allreduce(a, b, n, m))},
               {"allgather", number(pass)},
               {"reduce_scatter", number(pass)},
               {"alltoall", number(pass)},
               {"broadcast", number(gate::tree_broadcast(a, b, n, m))},
               {"ring_tree_crossover", number(gate::ring_tree_crossover(a, b, n))},
               {"gather_exchange", number(c.gather)},
               {"two_shot_exchange", number(c.two_shot)},
               {"codec_budget_ring", number(c.budget_ring)},
               {"codec_budget_gather", number(c.budget_gather)},
               {"codec_budget_two_shot", number(c.budget_two_shot)},
               {"tree_allreduce_steps", number(gate::tree_allreduce_steps(a, b, in.ranks, m))},
               {"broadcast_steps", number(gate::tree_broadcast_steps(a, b, in.ranks, m))},
               {"halving_doubling_allreduce_steps", number(gate::halving_doubling_allreduce_steps(a, b, in.ranks, m))},
               {"hierarchical_representative", number(levels.representative)},
               {"hierarchical_sharded", number(levels.sharded)},
               {"breakeven_bandwidth_ring", number(c.bandwidth)},
               {"breakeven_ratio_ring", number(c.ratio)},
               {"breakeven_ranks_gather", c.ranks ? Json(*c.ranks) : Json(nullptr)}};
  if (in.codec_rate) {
    json["breakeven_bytes_ring"] = number(
        gate::breakeven_bytes_ring(b, n, in.ratio.value_or(kNone), in.codec_rate->fixed_s, in.codec_rate->rate_Bps));
  }
  if (in.loggp) {
    json["loggp_long"] = number(gate::loggp_long(*in.loggp, m));
    json["loggp_train"] = number(gate::loggp_train(*in.loggp, m, in.messages));
  }
  if (in.pipeline) {
    const ModelInput::Pipeline& p = *in.pipeline;
    json["bubble"] = number(gate::pipeline_bubble(p.stages, p.micro_batches));
    json["bubble_interleaved"] = number(gate::pipeline_bubble(p.stages, p.micro_batches, p.chunks));
    if (p.target) json["micro_batches_for_bubble"] = number(gate::micro_batches_for(p.stages, *p.target, p.chunks));
  }
  return json;
}

std::string model_text(const ModelInput& in, const std::string& link_text) {
  return comment("gradgate model: " + std::to_string(in.ranks) + (in.ranks == 1 ? " rank, " : " ranks, ") +
                 format_decimal_size(in.bytes) + " (" + format_size(static_cast<uint64_t>(in.bytes)) + "), " +
                 link_text + "\nmodelled: what a network can do at best; docs/cost-models.md has the formulas") +
         message_lines(in) + collective_lines(in) + compression_lines(in) + other_lines(in);
}

}  // namespace gradgate::cli
