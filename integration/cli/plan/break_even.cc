#include "integration/cli/plan/break_even.h"

#include <cmath>
#include <limits>

#include "gradgate/exchange.h"

namespace gradgate::cli {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kScan = 96;     // sizes at which crossovers are looked for
constexpr double kSawtooth = 4;  // crossovers that are closer than this factor are teeth of the padding of shards
constexpr int kBisections = 40;  // to less than a byte

// Bytes that stand for one rank's payload of `count` elements when the exchange is priced.
double flat_payload(const CodecSpec& spec, Exchange exchange, DType dtype, size_t count, uint32_t ranks) {
  ExchangeShape shape;
  shape.candidate = {spec, exchange};
  shape.count = count;
  shape.dtype = dtype;
  shape.ranks = static_cast<int>(ranks);
  return static_cast<double>(exchange_wire_bytes(shape));
}

}  // namespace

Planner::Planner(PlanNetwork network, PlanCodecs codecs, DType dtype)
    : network_(std::move(network)), codecs_(std::move(codecs)), dtype_(dtype) {
  for (size_t i = 0; i < codecs_.list.size(); ++i) {
    const NamedCodec& codec = codecs_.list[i].codec;
    const Exchange usual = codec_info(codec.spec.id).exchange;
    candidates_.push_back({i, usual, usual, codec.text});
    if (network_.ranks_per_node > 1)
      candidates_.push_back({i, Exchange::hierarchical, usual, codec.text + " hierarchical"});
  }
}

double Planner::whole(double bytes) const {
  const double element = static_cast<double>(dtype_bytes(dtype_));
  return std::fmax(1, std::floor(bytes / element)) * element;
}

DenseCost Planner::dense(uint32_t ranks, double bytes) const {
  const gate::LinkModel model = network_.model(ranks, bytes);
  DenseCost best{gate::exchange_cost(Exchange::all_reduce, model, bytes), Exchange::all_reduce};
  if (!network_.two_levels(ranks)) return best;
  const double sharded = gate::exchange_cost(Exchange::hierarchical, model, bytes, bytes, Exchange::all_reduce);
  return sharded < best.seconds ? DenseCost{sharded, Exchange::hierarchical} : best;
}

PlanCost Planner::cost(const PlanCandidate& candidate, uint32_t ranks, double bytes) const {
  const PlanCodec& codec = codecs_.list[candidate.codec];
  const bool levels = candidate.exchange == Exchange::hierarchical;
  if (ranks < 2 || (levels && !network_.two_levels(ranks))) return {};
  const double nodes = levels ? network_.ranks_per_node : 1;
  const uint32_t peers = levels ? ranks / network_.ranks_per_node : ranks;
  const auto count = static_cast<size_t>(std::ceil(bytes / static_cast<double>(dtype_bytes(dtype_)) / nodes));
  PlanCost cost;
  cost.payload_bytes = nodes * flat_payload(codec.codec.spec, candidate.between, dtype_, count, peers);
  if (!cost.offered()) return {};
  const double vector = candidate.between == Exchange::all_gather ? peers * cost.payload_bytes : cost.payload_bytes;
  cost.transfer_s = gate::exchange_cost(candidate.exchange, network_.model(ranks, vector), cost.payload_bytes, bytes,
                                        candidate.between);
  const double part = bytes / nodes;  // of the gradient that this rank encodes
  cost.encode_s = codec.fixed_s + part / codec.encode_Bps;
  cost.decode_s = gate::decode_passes(candidate.between, peers) * part / codec.decode_Bps;
  return cost;
}

bool Planner::pays(const PlanCandidate& candidate, uint32_t ranks, double bytes) const {
  const PlanCost c = cost(candidate, ranks, bytes);
  return c.offered() && c.payload_bytes < bytes &&
         c.codec_s() < gate::codec_budget(dense(ranks, bytes).seconds, c.transfer_s);
}

PlanCell Planner::cell(uint32_t ranks, double bytes) const {
  PlanCell cell;
  cell.ranks = ranks;
  cell.bytes = whole(bytes);
  cell.dense = dense(ranks, cell.bytes);
  cell.bf16_s = kNone;
  std::vector<gate::CandidateCost> costs;
  for (const PlanCandidate& candidate : candidates_) {
    const PlanCost cost = this->cost(candidate, ranks, cell.bytes);
    const CodecSpec& spec = codecs_.list[candidate.codec].codec.spec;
    cell.costs.push_back(cost);
    costs.push_back(
        {cost.encode_s, cost.transfer_s, cost.decode_s, cost.payload_bytes, codec_fidelity(spec), false});
    if (spec.id == CodecId::bf16 && cost.offered() && !(cell.bf16_s <= cost.total_s())) cell.bf16_s = cost.total_s();
  }
  cell.decision = gate::decide(cell.dense.seconds, cell.bytes, costs);
  return cell;
}

uint32_t Planner::most_ranks(size_t codec, double bytes) const {
  const uint32_t most = gate::breakeven_ranks([&](uint32_t ranks) {
    if (!network_.takes(ranks)) return false;
    for (const PlanCandidate& candidate : candidates_) {
      if (candidate.codec == codec && pays(candidate, ranks, whole(bytes))) return true;
    }
    return false;
  });
  return most == 1 ? 0 : most;
}

std::vector<Crossover> Planner::crossovers(uint32_t ranks, double low, double high) const {
  std::vector<Crossover> found;
  const std::vector<double> sizes = log_spaced(low, high, kScan);
  for (size_t i = 0; i < candidates_.size(); ++i) {
    const auto good = [&](double bytes) { return pays(candidates_[i], ranks, whole(bytes)); };
    std::vector<Crossover> mine;  // from the largest size down
    for (size_t k = sizes.size() - 1; k > 0; --k) {
      double below = sizes[k - 1], above = sizes[k];
      const bool before = good(below), after = good(above);
      if (before == after) continue;
      if (!mine.empty() && (mine.back().pays_above == after || above * kSawtooth > mine.back().bytes)) continue;
      for (int step = 0; step < kBisections; ++step) {
        const double middle = std::sqrt(below * above);
        (good(middle) == before ? below : above) = middle;
      }
      mine.push_back({ranks, i, whole(above), after});
    }
    found.insert(found.end(), mine.rbegin(), mine.rend());
  }
  return found;
}

std::vector<double> log_spaced(double low, double high, size_t count) {
  if (!(low < high) || count < 2) return {low};
  std::vector<double> values;
  for (size_t i = 0; i < count; ++i)
    values.push_back(low * std::pow(high / low, static_cast<double>(i) / static_cast<double>(count - 1)));
  values.back() = high;
  return values;
}

}  // namespace gradgate::cli
