// Table and JSON of the break-even table.
#include <algorithm>
#include <cmath>

#include "integration/cli/plan/break_even.h"
#include "integration/cli/quantity.h"
#include "integration/cli/report.h"
#include "integration/cli/table.h"

namespace gradgate::cli {
namespace {

std::string ratio_text(double ratio) {
  return std::isfinite(ratio) ? format_number(ratio, ratio < 9.95 ? 2 : 3) + "x" : "-";
}

std::string ranks_text(uint32_t most) {
  if (most == 0) return "none";
  return most == gate::kMostRanks ? ">= " + std::to_string(most) : std::to_string(most);
}

Json cost_json(const Planner& planner, const PlanCell& cell, size_t i) {
  const PlanCandidate& candidate = planner.candidates()[i];
  const PlanCost& cost = cell.costs[i];
  return {{"candidate", candidate.name},
          {"codec", planner.codecs().list[candidate.codec].codec.text},
          {"exchange", exchange_name(candidate.exchange)},
          {"payload_bytes", cost.payload_bytes},
          {"encode_s", number(cost.encode_s)},
          {"transfer_s", number(cost.transfer_s)},
          {"decode_s", number(cost.decode_s)},
          {"total_s", number(cost.total_s())},
          {"budget_s", number(gate::codec_budget(cell.dense.seconds, cost.transfer_s))},
          {"pays", cost.payload_bytes < cell.bytes && cost.total_s() < cell.dense.seconds}};
}

}  // namespace

std::string choice_name(const Planner& planner, int choice) {
  return choice == 0 ? "dense" : planner.candidates()[static_cast<size_t>(choice) - 1].name;
}

std::string plan_assumptions(const Planner& planner) {
  std::string text = planner.network().describe() + "\n" + dtype_name(planner.dtype()) + " gradients; codec speeds " +
                     planner.codecs().source;
  for (const PlanCodec& codec : planner.codecs().list) {
    text += "\n  " + codec.codec.text + ": encode " + format_bandwidth(codec.encode_Bps) + ", decode " +
            format_bandwidth(codec.decode_Bps);
    if (codec.fixed_s > 0) text += ", and " + format_time(codec.fixed_s) + " an exchange";
  }
  return text;
}

std::string break_even_table(const Planner& planner, const std::vector<PlanCell>& cells) {
  int width = 5;
  for (const PlanCandidate& candidate : planner.candidates())
    width = std::max(width, static_cast<int>(candidate.name.size()));
  const Table table({{"message", "", 9},
                     {"ranks", "", 6},
                     {"best", "", width, true},
                     {"time", "", 9},
                     {"dense", "", 9},
                     {"vs dense", "", 8},
                     {"vs bf16", "", 8},
                     {"codec", "", 9},
                     {"budget", "", 9},
                     {"pays up to", "ranks", 10},
                     {"considered", "", width, true}});
  std::string text = comment("gradgate plan, modelled: " + plan_assumptions(planner) +
                             "\nbest: the most faithful candidate within 5 % of the fastest that pays; budget: T(M) - "
                             "T(M/r), what its codec may cost") +
                     comment("") + table.header();
  for (const PlanCell& cell : cells) {
    const gate::Decision& d = cell.decision;
    const bool numbers = d.considered != 0;
    text +=
        table.row({format_decimal_size(cell.bytes), std::to_string(cell.ranks), choice_name(planner, d.chosen),
                   format_tenths(cell.best_s()), format_tenths(cell.dense.seconds),
                   ratio_text(cell.dense.seconds / cell.best_s()), ratio_text(cell.bf16_s / cell.best_s()),
                   numbers ? format_tenths(d.codec_s()) : "-", numbers ? format_tenths(d.gain_s()) : "-",
                   numbers ? ranks_text(cell.most_ranks) : "-", numbers ? choice_name(planner, d.considered) : "-"});
  }
  return text;
}

Json break_even_json(const Planner& planner, const std::vector<PlanCell>& cells,
                     const std::vector<Crossover>& crossovers) {
  Json codecs = Json::array(), results = Json::array(), points = Json::array();
  for (const PlanCodec& codec : planner.codecs().list) {
    codecs.push_back({{"codec", codec.codec.text},
                      {"encode_bytes_per_s", codec.encode_Bps},
                      {"decode_bytes_per_s", codec.decode_Bps},
                      {"fixed_s", codec.fixed_s}});
  }
  for (const PlanCell& cell : cells) {
    const gate::Decision& d = cell.decision;
    Json row = {{"ranks", cell.ranks},
                {"bytes", cell.bytes},
                {"best", choice_name(planner, d.chosen)},
                {"why", gate::why_name(d.why)},
                {"time_s", number(cell.best_s())},
                {"dense_s", number(cell.dense.seconds)},
                {"dense_exchange", exchange_name(cell.dense.exchange)},
                {"bf16_s", number(cell.bf16_s)},
                {"speedup_dense", number(cell.dense.seconds / cell.best_s())},
                {"speedup_bf16", number(cell.bf16_s / cell.best_s())},
                {"considered", d.considered == 0 ? Json(nullptr) : Json(choice_name(planner, d.considered))},
                {"codec_s", number(d.codec_s())},
                {"budget_s", number(d.gain_s())},
                {"most_ranks", d.considered == 0 ? Json(nullptr) : Json(cell.most_ranks)}};
    row["candidates"] = Json::array();
    for (size_t i = 0; i < cell.costs.size(); ++i) {
      if (cell.costs[i].offered()) row["candidates"].push_back(cost_json(planner, cell, i));
    }
    results.push_back(std::move(row));
  }
  for (const Crossover& point : crossovers) {
    points.push_back({{"ranks", point.ranks},
                      {"candidate", planner.candidates()[point.candidate].name},
                      {"bytes", point.bytes},
                      {"pays", point.pays_above ? "above" : "below"}});
  }
  return {{"network", planner.network().json()},
          {"dtype", dtype_name(planner.dtype())},
          {"codec_speeds", planner.codecs().source},
          {"codecs", codecs},
          {"results", results},
          {"crossovers", points}};
}

}  // namespace gradgate::cli
