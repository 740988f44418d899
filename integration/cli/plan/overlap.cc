#include "integration/cli/plan/overlap.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "integration/cli/error.h"
#include "integration/cli/quantity.h"
#include "integration/cli/report.h"
#include "integration/cli/table.h"

namespace gradgate::cli {
namespace {

constexpr double kMostBuckets = 1e6;
constexpr size_t kTails = 64;  // how many tails are tried, evenly

double gradient_bytes(const Planner& planner, const OverlapInput& input) {
  return static_cast<double>(input.parameters) * static_cast<double>(dtype_bytes(planner.dtype()));
}

// Buckets in the order in which they become ready, with what each costs.
class Schedule {
 public:
  Schedule(const Planner& planner, const OverlapInput& input, double bucket_bytes) : planner_(planner), input_(input) {
    const double total = gradient_bytes(planner, input);
    for (double done = 0; done < total;) {
      const double size =
          std::min({sizes_.empty() ? std::min(bucket_bytes, kFirstBucket) : bucket_bytes, total - done});
      done += size;
      sizes_.push_back(size);
      ready_.push_back(gate::even_ready_time(input.step_s * (1 - input.backward_share), input.step_s, done, total));
    }
  }
  size_t buckets() const { return sizes_.size(); }

  // The last `tail` buckets by `candidate` (1-based), the others dense.
  OverlapChoice run(int candidate, size_t tail) {
    std::vector<gate::OverlapBucket> buckets(sizes_.size());
    for (size_t i = 0; i < sizes_.size(); ++i) {
      const PlanCell& cell = priced(sizes_[i]);
      buckets[i].ready_s = ready_[i];
      buckets[i].transfer_s = cell.dense.seconds;
      if (i + tail < sizes_.size()) continue;
      const PlanCost& cost = cell.costs[static_cast<size_t>(candidate) - 1];
      if (cost.offered()) buckets[i] = {ready_[i], cost.encode_s, cost.transfer_s, cost.decode_s};
    }
    return {tail == 0 ? 0 : candidate, tail, gate::overlapped_step(input_.step_s, buckets, input_.encode)};
  }

 private:
  const PlanCell& priced(double bytes) {
    auto found = cells_.find(bytes);
    if (found == cells_.end()) found = cells_.emplace(bytes, planner_.cell(input_.ranks, bytes)).first;
    return found->second;
  }

  const Planner& planner_;
  const OverlapInput& input_;
  std::vector<double> sizes_, ready_;
  std::map<double, PlanCell> cells_;  // at most three sizes differ
};

bool offered(const Planner& planner, const OverlapInput& input, size_t i, double bucket_bytes) {
  return planner.cost(planner.candidates()[i], input.ranks, bucket_bytes).offered();
}

int fidelity(const Planner& planner, int candidate) {
  const size_t codec = planner.candidates()[static_cast<size_t>(candidate) - 1].codec;
  return codec_fidelity(planner.codecs().list[codec].codec.spec);
}

std::string step_cell(const OverlapChoice& choice) {
  return choice.step.step_s > 0 ? format_time(choice.step.step_s) : "-";
}

std::string best_text(const Planner& planner, const OverlapRow& row) {
  if (row.best.tail == 0) return "dense";
  const std::string name = choice_name(planner, row.best.candidate);
  return row.best.tail == row.buckets ? name : name + ", last " + std::to_string(row.best.tail);
}

Json choice_json(const Planner& planner, const OverlapChoice& choice) {
  return {{"candidate", choice_name(planner, choice.candidate)},
          {"compressed_buckets", choice.tail},
          {"step_s", number(choice.step.step_s)},
          {"exposed_s", number(choice.step.exposed_s)},
          {"wire_busy_s", number(choice.step.busy_s)}};
}

}  // namespace

OverlapRow overlap_row(const Planner& planner, const OverlapInput& input, double bucket_bytes) {
  if (gradient_bytes(planner, input) / bucket_bytes > kMostBuckets) {
    throw UsageError("--buckets: " + format_size(static_cast<uint64_t>(bucket_bytes)) +
                     " makes more than a million buckets of these parameters");
  }
  Schedule schedule(planner, input, bucket_bytes);
  OverlapRow row;
  row.bucket_bytes = bucket_bytes;
  row.buckets = schedule.buckets();
  row.dense = schedule.run(0, 0);
  std::vector<OverlapChoice> best;  // per candidate: the fewest compressed buckets that reach its shortest step
  for (size_t i = 0; i < planner.candidates().size(); ++i) {
    const int c = static_cast<int>(i) + 1;
    OverlapChoice shortest = row.dense;
    if (offered(planner, input, i, bucket_bytes)) {
      row.all.push_back(schedule.run(c, row.buckets));
      const size_t tries = std::min(kTails, row.buckets);
      for (size_t k = 1; k <= tries; ++k) {
        const OverlapChoice choice = schedule.run(c, (row.buckets * k + tries - 1) / tries);
        if (choice.step.step_s < shortest.step.step_s * (1 - 1e-9)) shortest = choice;
      }
    } else {
      row.all.push_back({});
    }
    best.push_back(shortest);
  }
  double fastest = row.dense.step.step_s * (1 - kStepGain);
  row.best = row.dense;
  for (const OverlapChoice& choice : best) {
    if (choice.tail > 0 && choice.step.step_s < fastest) fastest = choice.step.step_s, row.best = choice;
  }
  for (const OverlapChoice& choice : best) {  // the most faithful of those that are as good
    if (choice.tail == 0 || row.best.tail == 0 || choice.step.step_s > fastest * (1 + kStepGain)) continue;
    if (choice.step.step_s >= row.dense.step.step_s * (1 - kStepGain)) continue;
    if (fidelity(planner, choice.candidate) < fidelity(planner, row.best.candidate)) row.best = choice;
  }
  return row;
}

std::string overlap_table(const Planner& planner, const OverlapInput& input, const std::vector<OverlapRow>& rows) {
  std::vector<Column> columns = {{"bucket", "", 9}, {"buckets", "", 7}, {"dense", "step", 9}, {"exposed", "", 9}};
  for (const PlanCandidate& c : planner.candidates())
    columns.push_back({c.name, "step", std::max(9, static_cast<int>(c.name.size()))});
  columns.insert(columns.end(), {{"best step", "", 9}, {"exposed", "", 9}, {"speed-up", "", 8}, {"best", "", 0, true}});
  const Table table(columns);
  const double backward = input.step_s * input.backward_share;
  std::string text =
      comment("gradgate plan, modelled: " + plan_assumptions(planner) + "\n" + std::to_string(input.ranks) +
              " ranks, " + format_number(double(input.parameters), 4) + " parameters (" +
              format_decimal_size(gradient_bytes(planner, input)) + "), step " + format_time(input.step_s) +
              ", of which the last " + format_time(backward) +
              " are the backward pass\ngradients become ready evenly over it; one queue reduces them in that order, "
              "the first bucket has at most 1 MiB as in PyTorch DDP" +
              "\nencoding runs " +
              (input.encode == gate::EncodeOn::compute ? "on the compute stream and delays the backward pass"
                                                       : "beside the backward pass, on the wire's queue") +
              "\nexposed: what communication adds to the step; best: the fewest compressed buckets, the late ones, "
              "that reach the shortest step") +
      comment("") + table.header();
  for (const OverlapRow& row : rows) {
    std::vector<std::string> cells = {format_size(static_cast<uint64_t>(row.bucket_bytes)), std::to_string(row.buckets),
                                      step_cell(row.dense), format_time(row.dense.step.exposed_s)};
    for (const OverlapChoice& choice : row.all) cells.push_back(step_cell(choice));
    const double speedup = row.dense.step.step_s / row.best.step.step_s;
    cells.insert(cells.end(), {step_cell(row.best), format_time(row.best.step.exposed_s),
                               format_number(speedup, 3) + "x", best_text(planner, row)});
    text += table.row(cells);
  }
  const auto best = std::min_element(rows.begin(), rows.end(), [](const OverlapRow& a, const OverlapRow& b) {
    return a.best.step.step_s < b.best.step.step_s;
  });
  const auto dense = std::min_element(rows.begin(), rows.end(), [](const OverlapRow& a, const OverlapRow& b) {
    return a.dense.step.step_s < b.dense.step.step_s;
  });
  text += comment("shortest step: " + best_text(planner, *best) + " with buckets of " +
                  format_size(static_cast<uint64_t>(best->bucket_bytes)) + ", " + format_time(best->best.step.step_s) +
                  "; dense alone: " + format_size(static_cast<uint64_t>(dense->bucket_bytes)) + ", " +
                  format_time(dense->dense.step.step_s));
  return text;
}

Json overlap_json(const Planner& planner, const OverlapInput& input, const std::vector<OverlapRow>& rows) {
  Json json = break_even_json(planner, {}, {});
  json.erase("crossovers");
  json["parameters"] = input.parameters;
  json["gradient_bytes"] = gradient_bytes(planner, input);
  json["step_s"] = input.step_s;
  json["backward_share"] = input.backward_share;
  json["encode_on"] = input.encode == gate::EncodeOn::compute ? "compute" : "wire";
  json["ranks"] = input.ranks;
  json["results"] = Json::array();
  for (const OverlapRow& row : rows) {
    Json one = {{"bucket_bytes", row.bucket_bytes},
                {"buckets", row.buckets},
                {"dense", choice_json(planner, row.dense)},
                {"best", choice_json(planner, row.best)}};
    one["all"] = Json::array();
    for (const OverlapChoice& choice : row.all) {
      if (choice.tail > 0) one["all"].push_back(choice_json(planner, choice));
    }
    json["results"].push_back(std::move(one));
  }
  return json;
}

}  // namespace gradgate::cli
