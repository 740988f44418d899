// gradgate calibrate: what it finds on links whose numbers are known, what it refuses, and what becomes of a profile
// that is not for this place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <iterator>
#include <thread>

#include "integration/cli/calibrate/nccl_import.h"
#include "integration/cli/calibrate/profile_store.h"
#include "integration/cli/error.h"
#include "integration/cli/report.h"
#include "tests/cli/run_program.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

gate::LinearCost line_of(gate::ProbeCollective collective, const ProfileCollective& fitted, uint32_t ranks) {
  return gate::ring_line(collective, {fitted.alpha_s, fitted.beta_bytes_per_s}, ranks);
}

TEST(Calibrate, FindsAVirtualLinkAndPredictsOtherSizes) {
  const std::string path = test_folder() + "/p.json";
  const Finished finished =
      run_program("calibrate --link 1gbit:50us --virtual -c none --ranks 3 -b 4K -e 4M -f 4 -n 3 -o " + path);
  ASSERT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.out,
              AllOf(HasSubstr("3 thread ranks"), HasSubstr("emulated"), HasSubstr("all_to_all: alpha 50 us")));
  const Profile profile = parse_profile(path, content(path));
  EXPECT_EQ(profile.key.world_size, 3u);
  EXPECT_EQ(profile.key.backend, "thread");
  EXPECT_EQ(profile.key.ranks_per_node, 3u);
  EXPECT_THAT(profile.key.topology, HasSubstr("1gbit:50us"));
  const ProfileCollective* const all[] = {&profile.all_reduce, &profile.all_gather, &profile.all_to_all};
  const Finished others =
      run_program("calibrate --json --link 1gbit:50us --virtual -c none --ranks 3 -b 9000 -e 40M -f 8 -n 3");
  const nlohmann::json json = strict_json(others.out);
  for (int c = 0; c < gate::kProbeCollectives; ++c) {
    const auto collective = static_cast<gate::ProbeCollective>(c);
    EXPECT_NEAR(all[c]->alpha_s / 50e-6, 1, 0.1);
    EXPECT_NEAR(all[c]->beta_bytes_per_s / 1.25e8, 1, 0.1);
    EXPECT_GT(all[c]->confidence, 0.99);
    EXPECT_EQ(all[c]->errors.size(), 6u);
    const gate::LinearCost line = line_of(collective, *all[c], 3);
    size_t seen = 0;
    for (const nlohmann::json& row : json["results"]) {
      if (row["collective"] != collective_text(collective)) continue;
      ++seen;
      EXPECT_NEAR(line(row["size_bytes"].get<double>()) * 1e6 / row["time_us"].get<double>(), 1, 0.1) << row.dump();
    }
    EXPECT_GE(seen, 4u);
  }
}

TEST(Calibrate, AProfileIsALinkToEmulate) {
  const std::string path = test_folder() + "/p.json";
  ASSERT_EQ(run_program("calibrate --link 1gbit:50us --virtual -c none --ranks 4 -e 1M -n 2 -o " + path).code, 0);
  const std::string arguments = "allreduce --json -c none -b 1M -e 1M --ranks 4 --virtual -n 1 -w 0 --link ";
  const nlohmann::json named = strict_json(run_program(arguments + "1gbit:50us").out),
                       from_file = strict_json(run_program(arguments + path).out);
  EXPECT_NEAR(from_file["results"][0]["time_us"].get<double>(), named["results"][0]["time_us"].get<double>(), 1e-3);
  EXPECT_EQ(run_program(arguments + test_folder() + "/absent.json").code, 2);
}

// Real time, on a link so slow that a busy machine is small beside it; three tries all the same.
TEST(Calibrate, FindsAShapedLink) {
  for (int attempt = 1;; ++attempt) {
    const std::string path = test_folder() + "/p.json";
    const Finished finished =
        run_program("calibrate --link 2.5MB/s:5ms -c none --ranks 2 -b 8K -e 128K -n 5 -w 1 -o " + path);
    bool good = finished.code == 0;
    if (good) {
      const Profile profile = parse_profile(path, content(path));
      for (const ProfileCollective* fitted : {&profile.all_reduce, &profile.all_gather, &profile.all_to_all})
        good = good && std::fabs(fitted->alpha_s / 5e-3 - 1) < 0.1 &&
               std::fabs(fitted->beta_bytes_per_s / 2.5e6 - 1) < 0.1;
    }
    if (good) return;
    if (attempt == 3) FAIL() << finished.out << finished.err;
  }
}

TEST(Calibrate, TimesCodecsOnGradientsOfTheSizesAskedFor) {
  const Finished finished =
      run_program("calibrate --json --link 1gbit:50us --virtual -c int8,bf16 --buckets 64K,1M --ranks 2 -e 1M -n 2");
  ASSERT_EQ(finished.code, 0) << finished.err;
  const nlohmann::json codecs = strict_json(finished.out)["profile"]["codecs"];
  ASSERT_EQ(codecs.size(), 4u);
  for (const nlohmann::json& codec : codecs) {
    EXPECT_GT(codec["encode_s"].get<double>(), 0);
    EXPECT_GT(codec["decode_s"].get<double>(), 0);
  }
  EXPECT_EQ(codecs[0]["codec"], "int8");
  EXPECT_EQ(codecs[1]["bytes"], 1048576);
}

TEST(Calibrate, BadUsageNamesTheOption) {
  const auto refused = [](const std::string& arguments) {
    const Finished finished = run_program("calibrate " + arguments);
    EXPECT_EQ(finished.code, 2) << arguments;
    return finished.err;
  };
  EXPECT_THAT(refused("--ranks 1"), HasSubstr("--ranks"));
  EXPECT_THAT(refused("-b 1M -e 1K"), HasSubstr("--minbytes"));
  EXPECT_THAT(refused("-b 1M -e 4M"), HasSubstr("at least 4"));
  EXPECT_THAT(refused("--virtual"), HasSubstr("--link"));
  EXPECT_THAT(refused("--import /absent.json"), HasSubstr("/absent.json"));
  EXPECT_THAT(refused("--buckets 1"), HasSubstr("--buckets"));
}

std::vector<gate::FitPoint> sweep(double alpha_s, double beta) {
  std::vector<gate::FitPoint> points;
  const gate::LinearCost line = gate::ring_line(gate::ProbeCollective::all_reduce, {alpha_s, beta}, 8);
  for (double m = 4096; m < 5e6; m *= 2) points.push_back({m, line(m)});
  return points;
}

TEST(ProfileStore, AFitIsRefusedWithItsReason) {
  const auto refusal = [](std::vector<gate::FitPoint> points) {
    return fit_collective(gate::ProbeCollective::all_reduce, std::move(points)).refusal;
  };
  EXPECT_EQ(refusal(sweep(1e-5, 1e9)), "");
  EXPECT_THAT(refusal({{1e6, 1e-3}}), HasSubstr("1 usable size"));
  EXPECT_THAT(refusal({{1e6, 1e-3}, {1e6, 2e-3}, {1e6, 3e-3}}), HasSubstr("1 usable size"));
  EXPECT_THAT(refusal({{1e6, 1e-3}, {2e6, std::nan("")}, {3e6, -1}}), HasSubstr("1 usable size"));
  EXPECT_THAT(refusal({{1e3, 1}, {1e4, 1e-3}, {1e5, 1}, {1e6, 1e-3}, {1e7, 1}}), HasSubstr("do not lie near lines"));
}

TEST(ProfileStore, PiecesAndErrorsAreKept) {
  std::vector<gate::FitPoint> points;
  for (double m = 4096; m <= 16777216; m *= 2) points.push_back({m, m < 65536 ? 1e-5 + m / 2e8 : 4e-4 + m / 2e9});
  const CollectiveFit fit = fit_collective(gate::ProbeCollective::all_gather, points);
  ASSERT_EQ(fit.refusal, "");
  const ProfileCollective stored = profile_collective(fit, 4);
  ASSERT_EQ(stored.pieces.size(), 2u);
  EXPECT_NEAR(stored.pieces[1].alpha_s, 4e-4 / 3, 1e-9);
  EXPECT_NEAR(stored.pieces[1].beta_bytes_per_s, 0.75 * 2e9, 1e3);
  ASSERT_EQ(stored.errors.size(), points.size());
  for (const ProfileError& error : stored.errors) EXPECT_LT(std::fabs(error.relative), 1e-6);
}

Profile sample() {
  Profile profile;
  profile.key = {"Some CPU", "mpi", 4, 2, "0.1.0", "2 nodes of up to 2 ranks"};
  const CollectiveFit fit = fit_collective(gate::ProbeCollective::all_reduce, sweep(1e-5, 1e9));
  profile.all_reduce = profile.all_gather = profile.all_to_all = profile_collective(fit, 8);
  return profile;
}

TEST(ProfileStore, AStaleDamagedOrForeignProfileIsIgnoredWithOneLine) {
  const std::string path = test_folder() + "/p.json";
  const Profile profile = sample();
  store_profile(path, profile);
  std::string why;
  ASSERT_TRUE(load_profile(path, profile.key, &why).has_value()) << why;
  EXPECT_EQ(load_profile(path, profile.key, &why)->all_reduce.alpha_s, profile.all_reduce.alpha_s);
  const auto ignored = [&](const ProfileKey& here) {
    why.clear();
    EXPECT_FALSE(load_profile(path, here, &why).has_value());
    EXPECT_THAT(why, AllOf(HasSubstr(path), HasSubstr("ignored"), Not(HasSubstr("\n"))));
    return why;
  };
  ProfileKey here = profile.key;
  here.world_size = 8;
  EXPECT_THAT(ignored(here), HasSubstr("world_size is '4' in the profile and '8' here"));
  here = profile.key, here.device = "Other";
  EXPECT_THAT(ignored(here), HasSubstr("device"));
  here = profile.key, here.backend = "thread";
  EXPECT_THAT(ignored(here), HasSubstr("backend"));
  here = profile.key, here.version = "0.2.0";
  EXPECT_THAT(ignored(here), HasSubstr("version"));
  here = profile.key, here.topology = "1 node of up to 4 ranks";
  EXPECT_THAT(ignored(here), HasSubstr("topology"));
  const std::string whole = content(path);
  for (const std::string& damaged :
       {whole.substr(0, whole.size() / 2), std::string(), std::string("{\"format\": NaN}"), std::string("\x93NUMPY"),
        std::string(whole).replace(whole.find("0.1.0"), 5, "0.\n.0")}) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << damaged;
    ignored(profile.key);
  }
  std::ofstream(path) << whole.substr(0, whole.size() - 2) << ", \"later\": 1}";
  EXPECT_THAT(ignored(profile.key), HasSubstr("later"));
}

TEST(ProfileStore, TwoWritersLeaveAWholeFile) {
  const std::string path = test_folder() + "/p.json";
  Profile a = sample(), b = a;
  b.key.device = std::string(20000, 'x');
  const auto write = [&](const Profile& profile) {
    for (int i = 0; i < 50; ++i) store_profile(path, profile);
  };
  store_profile(path, a);
  std::thread first(write, std::cref(a)), second(write, std::cref(b));
  for (int i = 0; i < 50; ++i) EXPECT_NO_THROW((void)parse_profile(path, content(path)));
  first.join();
  second.join();
  EXPECT_NO_THROW((void)parse_profile(path, content(path)));
  EXPECT_THROW(store_profile("/absent/p.json", a), RunError);
}

// A file as nccl-tests writes it: times in us, sizes of the whole vector.
nlohmann::json nccl_file(const std::string& program, double alpha_us, double bytes_per_us) {
  nlohmann::json rows = nlohmann::json::array();
  for (double m = 8192; m < 2e8; m *= 4) {
    const double us = 14 * alpha_us + 1.75 * m / bytes_per_us;  // 8 ranks, all_reduce
    rows.push_back(
        {{"size", m},
         {"count", m / 4},
         {"type", "float"},
         {"redop", "sum"},
         {"root", "    -1"},
         {"out_of_place", {{"time", us}, {"alg_bw", m / us / 1e3}, {"bus_bw", 1.75 * m / us / 1e3}, {"nwrong", 0}}},
         {"in_place", {{"time", us * 2}, {"alg_bw", "nan"}, {"bus_bw", "nan"}, {"nwrong", nullptr}}},
         {"actual_iterations", 20},
         {"experiment_name", program}});
  }
  rows[2]["out_of_place"]["time"] = "nan";  // then the other run counts: an outlier here
  rows[4]["out_of_place"]["nwrong"] = 3;
  rows[4]["in_place"]["nwrong"] = 1;
  nlohmann::json devices = nlohmann::json::array();
  for (int r = 0; r < 8; ++r)
    devices.push_back({{"rank", r}, {"hostname", r < 4 ? "a" : "b"}, {"device_info", "NVIDIA H100"}});
  return {{"version", 2},          {"args", {"/opt/build/" + program, "-b", "8"}},
          {"nccl_version", 22809}, {"config", {{"nthreads", 1}, {"ngpus", 1}, {"devices", devices}}},
          {"results", rows},       {"out_of_bounds", {{"count", 0}, {"okay", "true"}}}};
}

TEST(NcclImport, ReadsAlphaAndBeta) {
  const std::string path = test_folder() + "/all_reduce.json", out = test_folder() + "/p.json";
  std::ofstream(path) << nccl_file("all_reduce_perf_mpi", 6, 20000).dump();
  const Finished finished = run_program("calibrate --import " + path + " -o " + out);
  ASSERT_EQ(finished.code, 0) << finished.err;
  const Profile profile = parse_profile(out, content(out));
  EXPECT_EQ(profile.key.backend, "nccl");
  EXPECT_EQ(profile.key.world_size, 8u);
  EXPECT_EQ(profile.key.ranks_per_node, 4u);
  EXPECT_EQ(profile.key.device, "NVIDIA H100");
  EXPECT_THAT(profile.key.topology, AllOf(HasSubstr("2 nodes"), HasSubstr("all_gather as all_reduce")));
  EXPECT_NEAR(profile.all_reduce.alpha_s, 6e-6, 1e-9);
  EXPECT_NEAR(profile.all_reduce.beta_bytes_per_s, 2e10, 1e6);
  EXPECT_EQ(profile.all_gather.beta_bytes_per_s, profile.all_reduce.beta_bytes_per_s);
  EXPECT_EQ(profile.all_gather.confidence, 0);
  EXPECT_EQ(profile.all_reduce.errors.size(), 7u) << "8 sizes, one of them wrong";
}

TEST(NcclImport, RefusesOtherFilesByKey) {
  const nlohmann::json good = nccl_file("all_gather_perf", 5, 1e4);
  EXPECT_EQ(parse_nccl_results("f", good.dump()).collective, gate::ProbeCollective::all_gather);
  EXPECT_EQ(parse_nccl_results("f", good.dump()).wrong, 2u);
  const auto refusal = [&](const std::function<void(nlohmann::json&)>& change) -> std::string {
    nlohmann::json json = good;
    change(json);
    try {
      (void)parse_nccl_results("f.json", json.dump());
      return "accepted";
    } catch (const UsageError& error) {
      return error.what();
    }
  };
  EXPECT_THAT(refusal([](auto& j) { j["args"][0] = "sendrecv_perf"; }), HasSubstr("sendrecv_perf"));
  EXPECT_THAT(refusal([](auto& j) { j.erase("config"); }), HasSubstr("config"));
  EXPECT_THAT(refusal([](auto& j) { j["config"]["nthreads"] = 0; }), HasSubstr("nthreads"));
  EXPECT_THAT(refusal([](auto& j) { j["config"]["devices"] = nlohmann::json::array(); }), HasSubstr("0 ranks"));
  EXPECT_THAT(refusal([](auto& j) { j.erase("results"); }), HasSubstr("results"));
  EXPECT_THAT(refusal([](auto& j) { j["results"] = nlohmann::json::array(); }), HasSubstr("no row"));
  EXPECT_THAT(refusal([](auto& j) { j = 1; }), HasSubstr("not a JSON object"));
  const NcclResults results = parse_nccl_results("f", good.dump());
  EXPECT_THROW((void)import_nccl({results, results}, {"a", "b"}), UsageError) << "the same collective twice";
}

}  // namespace
}  // namespace gradgate::cli
