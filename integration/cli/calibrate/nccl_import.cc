#include "integration/cli/calibrate/nccl_import.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "gradgate/version.h"
#include "integration/cli/error.h"

namespace gradgate::cli {
namespace {

constexpr uint64_t kMostRanks = 1u << 20;

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw UsageError(
      path + ": " + why +
      "; expected the file that all_reduce_perf, all_gather_perf or alltoall_perf of nccl-tests writes with -J");
}

// "/opt/nccl-tests/build/all_reduce_perf_mpi" → all_reduce.
gate::ProbeCollective collective_of(const std::string& path, const Json& json) {
  std::string program;
  if (json.contains("args") && json["args"].is_array() && !json["args"].empty() && json["args"][0].is_string())
    program = json["args"][0].get<std::string>();
  program = program.substr(program.rfind('/') == std::string::npos ? 0 : program.rfind('/') + 1);
  if (program.rfind("all_reduce_perf", 0) == 0) return gate::ProbeCollective::all_reduce;
  if (program.rfind("all_gather_perf", 0) == 0) return gate::ProbeCollective::all_gather;
  if (program.rfind("alltoall_perf", 0) == 0) return gate::ProbeCollective::all_to_all;
  refuse(path, "args[0] is '" + program + "'");
}

// A number, also where it was written as a text; NaN for anything else ("nan", null, absent).
double number_at(const Json& object, const char* key) {
  if (object.is_object() && object.contains(key) && object[key].is_number()) return object[key].get<double>();
  return std::numeric_limits<double>::quiet_NaN();
}

uint64_t positive(const std::string& path, const Json& config, const char* key) {
  const double value = number_at(config, key);
  if (!(value >= 1 && value <= static_cast<double>(kMostRanks)))
    refuse(path, std::string("config.") + key + " is missing or not a count");
  return static_cast<uint64_t>(value);
}

std::string text_at(const Json& object, const char* key) {
  return object.is_object() && object.contains(key) && object[key].is_string() ? object[key].get<std::string>()
                                                                               : std::string();
}

// One run of a row; NaN where it was not made or its result was wrong.
double seconds_of(const Json& row, const char* run, size_t* wrong) {
  if (!row.contains(run) || !row[run].is_object()) return std::numeric_limits<double>::quiet_NaN();
  if (number_at(row[run], "nwrong") > 0) {
    ++*wrong;
    return std::numeric_limits<double>::quiet_NaN();
  }
  return number_at(row[run], "time") * 1e-6;
}

}  // namespace

NcclResults parse_nccl_results(const std::string& path, const std::string& text) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) refuse(path, "not a JSON object");
  NcclResults results;
  results.collective = collective_of(path, json);
  if (!json.contains("config") || !json["config"].is_object()) refuse(path, "config is missing");
  const Json& config = json["config"];
  // One entry per process, each with nthreads × ngpus ranks.
  const uint64_t per_process = positive(path, config, "nthreads") * positive(path, config, "ngpus");
  std::map<std::string, uint64_t> nodes;
  if (config.contains("devices") && config["devices"].is_array()) {
    for (const Json& device : config["devices"]) {
      nodes[text_at(device, "hostname")] += per_process;
      results.ranks += per_process;
      if (results.device.empty()) results.device = text_at(device, "device_info");
    }
  }
  if (results.ranks < 2 || results.ranks > kMostRanks)
    refuse(path, std::to_string(results.ranks) + " ranks in config.devices; a profile is for 2 or more");
  for (const auto& [host, ranks] : nodes) results.ranks_per_node = std::max(results.ranks_per_node, ranks);
  results.nodes = nodes.size();
  if (results.device.empty()) results.device = "unknown GPU";
  results.library = std::isfinite(number_at(json, "nccl_version"))
                        ? std::to_string(static_cast<int64_t>(number_at(json, "nccl_version")))
                        : "unknown";
  if (!json.contains("results") || !json["results"].is_array()) refuse(path, "results is missing");
  for (const Json& row : json["results"]) {
    if (!row.is_object()) continue;
    const double bytes = number_at(row, "size");
    double seconds = seconds_of(row, "out_of_place", &results.wrong);
    if (!(seconds > 0)) seconds = seconds_of(row, "in_place", &results.wrong);
    if (bytes > 0 && seconds > 0) results.points.push_back({bytes, seconds});
  }
  if (results.points.empty()) refuse(path, "results has no row with a size and a time");
  return results;
}

Profile import_nccl(const std::vector<NcclResults>& files, const std::vector<std::string>& paths) {
  Profile profile;
  ProfileCollective* const places[] = {&profile.all_reduce, &profile.all_gather, &profile.all_to_all};
  bool have[gate::kProbeCollectives] = {};
  for (size_t i = 0; i < files.size(); ++i) {
    const auto which = static_cast<size_t>(files[i].collective);
    const std::string name = collective_text(files[i].collective);
    if (files[i].ranks != files[0].ranks) {
      throw UsageError(paths[i] + ": " + std::to_string(files[i].ranks) + " ranks, but " + paths[0] + " has " +
                       std::to_string(files[0].ranks));
    }
    if (have[which]) throw UsageError(paths[i] + ": a second file of " + name);
    const CollectiveFit fit = fit_collective(files[i].collective, files[i].points);
    if (!fit.refusal.empty()) throw UsageError(paths[i] + ": " + name + " cannot be fitted: " + fit.refusal);
    *places[which] = profile_collective(fit, files[i].ranks);
    have[which] = true;
  }
  const NcclResults& first = files[0];
  profile.key = {first.device,
                 "nccl",
                 first.ranks,
                 first.ranks_per_node,
                 GRADGATE_VERSION,
                 std::to_string(first.nodes) + (first.nodes == 1 ? " node" : " nodes") + " of up to " +
                     std::to_string(first.ranks_per_node) + " ranks, NCCL " + first.library};
  const size_t source = have[0] ? 0 : static_cast<size_t>(first.collective);
  for (size_t which = 0; which < std::size(places); ++which) {
    if (have[which]) continue;
    places[which]->alpha_s = places[source]->alpha_s;
    places[which]->beta_bytes_per_s = places[source]->beta_bytes_per_s;
    profile.key.topology += std::string(", ") + collective_text(static_cast<gate::ProbeCollective>(which)) + " as " +
                            collective_text(static_cast<gate::ProbeCollective>(source));
  }
  return profile;
}

}  // namespace gradgate::cli
