// What `gradgate plan` computes with: a network of one or two levels, named or calibrated, and codecs with their speed.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "gate/cost.h"
#include "integration/cli/codec_option.h"
#include "integration/cli/link.h"
#include "integration/cli/profile.h"

namespace gradgate::cli {

/// The links between the ranks.
struct PlanNetwork {
  NamedLink between;               ///< of all ranks, or between nodes; unused with a profile
  std::optional<Profile> profile;  ///< takes the place of `between`
  uint32_t ranks_per_node = 1;
  NamedLink inside;  ///< with ranks_per_node > 1

  /// True where `ranks` fill whole nodes, or fit into one.
  bool takes(uint32_t ranks) const { return ranks <= ranks_per_node || ranks % ranks_per_node == 0; }
  /// Several full nodes of several ranks.
  bool two_levels(uint32_t ranks) const { return ranks_per_node > 1 && ranks > ranks_per_node && takes(ranks); }
  /// The model for collectives whose whole vector is about `vector_bytes`: a calibrated profile can have several
  /// pieces.
  gate::LinkModel model(uint32_t ranks, double vector_bytes) const;
  /// One line per link.
  std::string describe() const;
  Json json() const;
};

/// A codec with its speed on one rank, in gradient bytes per second; `fixed_s` comes on top of every exchange.
struct PlanCodec {
  NamedCodec codec;
  double encode_Bps = 0, decode_Bps = 0;
  double fixed_s = 0;
};

struct PlanCodecs {
  std::vector<PlanCodec> list;
  std::string source;  ///< where the speeds come from, for people
};

/// Where speeds come from: given rates, a file of `gradgate bench`, the profile, or a short measurement here and now,
/// the first of these that there is.
struct SpeedOptions {
  std::optional<double> encode_Bps, decode_Bps, fixed_s;
  std::string bench_option, bench_file;
};
/// Throws UsageError where a file lacks a codec, RunError where a codec fails.
PlanCodecs codec_speeds(const CodecList& codecs, DType dtype, const SpeedOptions& options,
                        const std::optional<Profile>& profile);

}  // namespace gradgate::cli
