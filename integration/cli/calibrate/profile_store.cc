#include "integration/cli/calibrate/profile_store.h"

#include <algorithm>
#include <cmath>

#include "gate/estimator.h"
#include "integration/cli/error.h"
#include "integration/cli/file.h"
#include "integration/cli/json_fields.h"
#include "integration/cli/quantity.h"
#include "integration/cli/report.h"
#include "integration/cli/statistics.h"

namespace gradgate::cli {
namespace {

/// The fastest link a profile may hold; a flat stretch of a curve has no bandwidth of its own.
constexpr double kFastest = 1e15;

gate::Link link_of(gate::ProbeCollective collective, const gate::LinearCost& line, uint64_t ranks) {
  const gate::Link link = gate::ring_link(collective, line, static_cast<uint32_t>(ranks));
  return {link.alpha_s, std::min(link.beta_Bps, kFastest)};
}

std::string refusal_text(Status status, const CollectiveFit& fit) {
  if (status.code() == StatusCode::invalid_argument)
    return std::to_string(fit.points.size()) + " usable sizes, at least 2 are needed";
  return "the times do not lie near lines that grow with size (a third or more are off by over " +
         format_number(100 * gate::kCurveOutlier, 2) + " %, or one of the others by over " +
         format_number(100 * gate::kCurveMaxError, 2) + " %, or more bytes cost no more)";
}

}  // namespace

const char* collective_text(gate::ProbeCollective collective) {
  switch (collective) {
    case gate::ProbeCollective::all_reduce:
      return "all_reduce";
    case gate::ProbeCollective::all_gather:
      return "all_gather";
    case gate::ProbeCollective::all_to_all:
      return "all_to_all";
  }
  return "?";
}

CollectiveFit fit_collective(gate::ProbeCollective collective, std::vector<gate::FitPoint> points) {
  CollectiveFit fit;
  fit.collective = collective;
  std::stable_sort(points.begin(), points.end(), [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
  for (size_t i = 0; i < points.size();) {
    std::vector<double> seconds;
    const double bytes = points[i].bytes;
    for (; i < points.size() && points[i].bytes == bytes; ++i) {
      if (gate::usable_seconds(points[i].seconds)) seconds.push_back(points[i].seconds);
    }
    if (seconds.empty()) {
      ++fit.unusable;
    } else {
      fit.points.push_back({bytes, median(seconds)});
    }
  }
  const Status status = gate::fit_curve(fit.points, &fit.curve);
  if (!status.ok()) fit.refusal = refusal_text(status, fit);
  return fit;
}

ProfileCollective profile_collective(const CollectiveFit& fit, uint64_t ranks) {
  ProfileCollective result;
  const gate::Link overall = link_of(fit.collective, fit.curve.overall, ranks);
  result.alpha_s = overall.alpha_s;
  result.beta_bytes_per_s = overall.beta_Bps;
  result.confidence = fit.curve.confidence;
  for (int i = 0; fit.curve.count > 1 && i < fit.curve.count; ++i) {
    const gate::Link link = link_of(fit.collective, fit.curve.pieces[i].line, ranks);
    result.pieces.push_back({fit.curve.pieces[i].up_to_bytes, link.alpha_s, link.beta_Bps});
  }
  for (const gate::FitPoint& point : fit.points)
    result.errors.push_back({point.bytes, fit.curve(point.bytes) / point.seconds - 1});
  return result;
}

std::string staleness(const ProfileKey& profile, const ProfileKey& here) {
  const auto differ = [](const char* name, const std::string& a, const std::string& b) {
    return a == b ? std::string() : std::string(name) + " is '" + a + "' in the profile and '" + b + "' here";
  };
  const std::string fields[] = {
      differ("device", profile.device, here.device),
      differ("backend", profile.backend, here.backend),
      differ("world_size", std::to_string(profile.world_size), std::to_string(here.world_size)),
      differ("ranks_per_node", std::to_string(profile.ranks_per_node), std::to_string(here.ranks_per_node)),
      differ("version", profile.version, here.version),
      differ("topology", profile.topology, here.topology),
  };
  for (const std::string& field : fields) {
    if (!field.empty()) return field;
  }
  return "";
}

std::optional<Profile> load_profile(const std::string& path, const ProfileKey& here, std::string* why) {
  try {
    Profile profile = read_profile("profile", path);
    const std::string stale = staleness(profile.key, here);
    if (stale.empty()) return profile;
    *why = "profile " + path + " is ignored: " + stale + "; measure again with gradgate calibrate";
  } catch (const UsageError& error) {
    *why = std::string("profile ignored: ") + error.what();
  }
  return std::nullopt;
}

NamedLink parse_link_or_profile(std::string_view option, std::string_view text) {
  if (!text.ends_with(".json")) return parse_link(option, text);
  const Profile profile = read_profile(option, std::string(text));
  return {{profile.all_reduce.alpha_s, profile.all_reduce.beta_bytes_per_s}, std::string(text)};
}

void store_profile(const std::string& path, const Profile& profile) {
  write_whole(path, {dump(profile_json(profile))});
}

}  // namespace gradgate::cli
