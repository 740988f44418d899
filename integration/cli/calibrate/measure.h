// What `gradgate calibrate` and `gradgate doctor` measure: three collectives over a sweep of sizes, and codecs on
// gradients that look real. All ranks issue the same operations in the same order, whatever they find.
#pragma once

#include <cstdint>
#include <vector>

#include "gate/fit.h"
#include "integration/cli/codec_option.h"
#include "integration/cli/profile.h"
#include "integration/cli/ranks.h"
#include "integration/cli/report.h"

namespace gradgate::cli {

struct SweepSetup {
  Shaping shaping;
  std::vector<uint64_t> sizes;  ///< bytes of the whole vector, ascending; rounded up to a multiple of the ranks
  uint64_t rounds = 9, warmup = 2;
  /// A size whose rounds would take longer is measured in fewer, at least 3.
  double seconds_per_size = 2;
  double timeout_s = 60;
};

/// One size of one collective.
struct SweepPoint {
  double bytes = 0;
  double seconds = 0;          ///< median over rounds; NaN when no round was usable
  std::vector<double> rounds;  ///< MAX over ranks less the barrier's spread
};
struct Sweep {
  std::vector<SweepPoint> collectives[gate::kProbeCollectives];
  double barrier_spread_s = 0;  ///< how far apart ranks leave an empty barrier: median of MAX − MIN
};

/// Each collective at each size: a barrier, then the operation; per round the MAX over ranks less the spread of the
/// empty barrier, the median over rounds. Sizes are interleaved. The same result in every process.
Sweep measure_sweep(Ranks& ranks, const SweepSetup& setup, Progress& progress);

/// A median of one encode and one decode, the slowest rank's, all ranks at work at the same time.
std::vector<ProfileCodec> measure_codecs(Ranks& ranks, const std::vector<NamedCodec>& codecs, DType dtype,
                                         const std::vector<uint64_t>& bytes, uint64_t rounds, double timeout_s,
                                         Progress& progress);

/// What a profile of these ranks is valid for. Collective: the same in every process.
ProfileKey profile_key(Ranks& ranks, const Shaping& shaping, double timeout_s);

}  // namespace gradgate::cli
