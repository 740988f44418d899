// The numbers of `gradgate model`: every cost model of gate/models/ for one link, one number of ranks and one size.
#pragma once

#include <optional>
#include <string>

#include "gate/models/point_to_point.h"
#include "integration/cli/options.h"

namespace gradgate::cli {

struct ModelInput {
  gate::Link link;  ///< between nodes, where there are two levels
  uint32_t ranks = 1;
  double bytes = 0;
  std::optional<double> ratio, codec_s;

  struct Nodes {
    uint32_t ranks_per_node = 1;  ///< divides ranks
    gate::Link inside;
  };
  std::optional<Nodes> nodes;

  struct Pipeline {
    double stages = 1, micro_batches = 1, chunks = 1;
    std::optional<double> target;  ///< share of idle time to reach
  };
  std::optional<Pipeline> pipeline;

  std::optional<gate::LogGP> loggp;  ///< for messages of `bytes`
  double messages = 1;

  struct CodecRate {
    double fixed_s = 0, rate_Bps = 0;
  };
  std::optional<CodecRate> codec_rate;
};

/// One flat object of plain numbers in seconds and bytes, full precision; null where there is no number, or where the
/// input that it needs was not given. The keys are those of docs/cost-models.md; `bubble…`, `loggp…` and
/// `breakeven_bytes_ring` are there only when their options are.
Json model_json(const ModelInput& input);

/// The same for people, with what it means.
std::string model_text(const ModelInput& input, const std::string& link_text);

}  // namespace gradgate::cli
