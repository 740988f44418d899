// From measurements to a profile file and back: fitting, the test whether a profile is for this place, atomic writing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "gate/fit.h"
#include "integration/cli/link.h"
#include "integration/cli/profile.h"

namespace gradgate::cli {

/// Points of one collective and what came of them.
struct CollectiveFit {
  gate::ProbeCollective collective = gate::ProbeCollective::all_reduce;
  std::vector<gate::FitPoint> points;  ///< usable ones, ascending sizes
  size_t unusable = 0;                 ///< sizes without a usable time
  gate::Curve curve;                   ///< count 0: refused
  std::string refusal;                 ///< why; empty when fitted
};

const char* collective_text(gate::ProbeCollective collective);

/// Fits the points of one collective; `points` may hold several of a size (their median counts) and unusable seconds.
CollectiveFit fit_collective(gate::ProbeCollective collective, std::vector<gate::FitPoint> points);

/// α and β of a fitted curve by the ring formula, its pieces and errors. key.world_size >= 2.
ProfileCollective profile_collective(const CollectiveFit& fit, uint64_t ranks);

/// Why a profile does not hold for `here`: the first field of the key that differs, with both values; empty when it
/// does.
std::string staleness(const ProfileKey& profile, const ProfileKey& here);

/// The profile at `path` if it is whole and for `here`; otherwise none, with one line in `why`: a profile never stops a
/// run.
std::optional<Profile> load_profile(const std::string& path, const ProfileKey& here, std::string* why);

/// A link as parse_link() takes it, or the file of a profile ("….json"): α and β of its all_reduce.
NamedLink parse_link_or_profile(std::string_view option, std::string_view text);

/// Writes it whole or not at all. Throws RunError.
void store_profile(const std::string& path, const Profile& profile);

}  // namespace gradgate::cli
