// Results of NVIDIA's nccl-tests (`all_reduce_perf -J file.json`, also all_gather_perf and alltoall_perf) as points for
// a fit.
#pragma once

#include <string>
#include <vector>

#include "integration/cli/calibrate/profile_store.h"

namespace gradgate::cli {

struct NcclResults {
  gate::ProbeCollective collective = gate::ProbeCollective::all_reduce;
  std::vector<gate::FitPoint> points;  ///< bytes of the whole vector; out of place where both were run
  size_t wrong = 0;                    ///< rows left out because the run reported wrong values
  uint64_t ranks = 0, ranks_per_node = 0, nodes = 0;
  std::string device;   ///< of rank 0
  std::string library;  ///< NCCL's version
};

/// Throws UsageError naming `path` and the key: not JSON, not a result of nccl-tests, another collective, no ranks, no
/// rows.
NcclResults parse_nccl_results(const std::string& path, const std::string& text);

/// A profile from one file per collective. What no file covers gets α and β of all_reduce (or of the first file) with
/// confidence 0, and the topology says so. Throws UsageError where files disagree about ranks, name a collective twice,
/// or a fit is refused.
Profile import_nccl(const std::vector<NcclResults>& files, const std::vector<std::string>& paths);

}  // namespace gradgate::cli
