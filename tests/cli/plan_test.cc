// gradgate plan from outside: the table, its JSON, profiles, and the overlapped step. Codec speeds are given, so that
// nothing depends on the machine. The page: plan_page_test.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "gate/cost.h"
#include "integration/cli/profile.h"
#include "integration/cli/report.h"
#include "tests/cli/run_program.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

const std::string kRates = " --encode-rate 4GB/s --decode-rate 8GB/s";

nlohmann::json plan_json(const std::string& arguments) {
  const Finished finished = run_program("plan --json " + arguments);
  EXPECT_EQ(finished.code, 0) << finished.err;
  return strict_json(finished.out);
}

const nlohmann::json& row(const nlohmann::json& json, unsigned ranks, double bytes) {
  for (const auto& one : json["results"]) {
    if (one["ranks"] == ranks && one["bytes"] == bytes) return one;
  }
  ADD_FAILURE() << "no row of " << ranks << " ranks, " << bytes << " bytes";
  return json["results"][0];
}

TEST(Plan, PricesByHandAndDecidesAsTheGate) {
  const nlohmann::json json = plan_json("--link 1gbit:50us --ranks 4,8 --bytes 4MB,64MB" + kRates);
  EXPECT_EQ(json["schema"], "gradgate.plan/1");
  EXPECT_EQ(json["results"].size(), 4u);
  const nlohmann::json& cell = row(json, 4, 4e6);
  EXPECT_NEAR(cell["dense_s"].get<double>(), 2 * 3 * 50e-6 + 1.5 * 4e6 / 125e6, 1e-15);
  EXPECT_EQ(cell["best"], "int8");
  EXPECT_EQ(cell["why"], "fastest");
  EXPECT_GT(cell["speedup_dense"], 3.0);
  EXPECT_GT(cell["speedup_bf16"], 1.5);
  EXPECT_EQ(cell["most_ranks"], gate::kMostRanks) << "two_shot costs what a ring does: any number of ranks";
  for (const auto& c : cell["candidates"]) {
    const double payload = c["payload_bytes"];
    EXPECT_NEAR(c["transfer_s"].get<double>(), gate::two_shot_exchange(50e-6, 125e6, 4, payload), 1e-15);
    EXPECT_NEAR(c["encode_s"].get<double>(), 4e6 / 4e9, 1e-15);
    EXPECT_NEAR(c["decode_s"].get<double>(), 1.75 * 4e6 / 8e9, 1e-15);
    EXPECT_NEAR(c["budget_s"].get<double>(), cell["dense_s"].get<double>() - c["transfer_s"].get<double>(), 1e-15);
    EXPECT_TRUE(c["pays"]);
  }
  const nlohmann::json fast = plan_json("--link nvlink4 --ranks 8 --bytes 64MB" + kRates);
  EXPECT_EQ(fast["results"][0]["best"], "dense");
  EXPECT_EQ(fast["results"][0]["why"], "break_even");
  EXPECT_EQ(fast["results"][0]["speedup_dense"], 1.0);
  EXPECT_EQ(fast["results"][0]["most_ranks"], 0) << "on this link it pays nowhere";
  const nlohmann::json one = plan_json("--link 1gbit --ranks 1 --bytes 4MB" + kRates);
  EXPECT_EQ(one["results"][0]["best"], "dense");
  EXPECT_EQ(one["results"][0]["dense_s"], 0);
}

TEST(Plan, TheTableSaysWhatItAssumes) {
  const Finished table = run_program("plan --link ib-ndr:effective --ranks 8..64 --bytes 1MB..1GB" + kRates);
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out, AllOf(HasSubstr("modelled"), HasSubstr("given (--encode-rate)"),
                               HasSubstr("ib-ndr:effective = 376 Gbit/s, 8.5 us"), HasSubstr("pays up to")));
  EXPECT_THAT(table.out, AllOf(HasSubstr("int8: encode 4.00 GB/s"), HasSubstr("bf16: encode"), HasSubstr("1 GB")));
  const Finished measured = run_program("plan --link 1gbit --ranks 4 --bytes 1MB");
  EXPECT_THAT(measured.out, HasSubstr("measured now"));
  EXPECT_THAT(run_program("plan --link 1gbit --ranks 4 --bytes 1MB --dtype bf16" + kRates).out,
              AllOf(HasSubstr("bf16 gradients"), Not(HasSubstr("bf16: encode"))));
}

TEST(Plan, CrossoversAreWhereTheyPay) {
  const nlohmann::json json =
      plan_json("--link 10gbit:50us --ranks 8 --bytes 1kB..1GB --encode-rate 20GB/s --codec-fixed 2ms");
  ASSERT_FALSE(json["crossovers"].empty());
  for (const auto& point : json["crossovers"]) {
    EXPECT_EQ(point["pays"], "above");
    const auto pays = [&](double bytes) {
      const nlohmann::json at =
          plan_json("--link 10gbit:50us --ranks 8 --bytes " + std::to_string(static_cast<long>(bytes)) +
                    " --encode-rate 20GB/s --codec-fixed 2ms");
      for (const auto& c : at["results"][0]["candidates"]) {
        if (c["candidate"] == point["candidate"]) return c["pays"].get<bool>();
      }
      return false;
    };
    const double bytes = point["bytes"];
    EXPECT_TRUE(pays(bytes * 1.02)) << point;
    EXPECT_FALSE(pays(bytes * 0.98)) << point;
  }
}

TEST(Plan, TwoLevelsOfferTheHierarchicalExchange) {
  const nlohmann::json json =
      plan_json("--link tcp-25 --ranks-per-node 8 --intra-link nvlink4 --ranks 8,64 --bytes 256MB" + kRates);
  const nlohmann::json &inside = row(json, 8, 256e6), &across = row(json, 64, 256e6);
  EXPECT_EQ(inside["dense_exchange"], "all_reduce") << "one node: its own link";
  EXPECT_NEAR(inside["dense_s"].get<double>(), gate::ring_allreduce(0.5e-6, 450e9, 8, 256e6), 1e-15);
  EXPECT_EQ(across["dense_exchange"], "hierarchical");
  EXPECT_NEAR(across["dense_s"].get<double>(),
              gate::hierarchical_sharded({0.5e-6, 450e9}, {50e-6, 3.125e9}, 8, 8, 256e6), 1e-15);
  bool hierarchical = false;
  for (const auto& c : across["candidates"]) {
    if (c["candidate"] != "int8 hierarchical") continue;
    hierarchical = true;
    EXPECT_EQ(c["exchange"], "hierarchical");
    EXPECT_NEAR(c["encode_s"].get<double>(), 256e6 / 8 / 4e9, 1e-12) << "a rank encodes its shard";
    const double payload = c["payload_bytes"];
    EXPECT_NEAR(c["transfer_s"].get<double>(),
                2 * gate::ring_pass(0.5e-6, 450e9, 8, 256e6) + gate::two_shot_exchange(50e-6, 3.125e9, 8, payload / 8),
                1e-14);
  }
  EXPECT_TRUE(hierarchical);
  const Finished partial = run_program("plan --link tcp-25 --ranks-per-node 8 --ranks 12 --bytes 1MB" + kRates);
  EXPECT_EQ(partial.code, 2);
  EXPECT_THAT(partial.err, AllOf(HasSubstr("--ranks: 12"), HasSubstr("nodes of 8")));
}

Profile sample_profile() {
  Profile profile;
  profile.key = {"Some CPU", "thread", 4, 4, "0.1.0", "one node"};
  profile.all_reduce = {40e-6, 1e9, 0.99, {}, {}};
  profile.all_gather = {20e-6, 2e9, 0.99, {}, {}};
  profile.all_to_all = {30e-6, 0.5e9, 0.99, {}, {}};
  profile.all_reduce.pieces = {{1e5, 10e-6, 3e9}, {std::numeric_limits<double>::infinity(), 40e-6, 1e9}};
  return profile;
}

TEST(Plan, AProfilePricesEachCollectiveByItself) {
  const std::string path = test_folder() + "/profile.json";
  Profile profile = sample_profile();
  std::ofstream(path) << dump(profile_json(profile));
  const nlohmann::json json = plan_json("--link '" + path + "' --ranks 4 --bytes 100kB,4MB -c int8" + kRates);
  const nlohmann::json &small = row(json, 4, 1e5), &large = row(json, 4, 4e6);
  EXPECT_NEAR(small["dense_s"].get<double>(), gate::ring_allreduce(10e-6, 3e9, 4, 1e5), 1e-15) << "the first piece";
  EXPECT_NEAR(large["dense_s"].get<double>(), gate::ring_allreduce(40e-6, 1e9, 4, 4e6), 1e-15);
  const nlohmann::json& int8 = large["candidates"][1];
  EXPECT_EQ(int8["candidate"], "int8");
  const double payload = int8["payload_bytes"];
  EXPECT_NEAR(int8["transfer_s"].get<double>(),
              gate::ring_pass(30e-6, 0.5e9, 4, payload) + gate::ring_pass(20e-6, 2e9, 4, payload), 1e-14);
  EXPECT_EQ(json["network"]["profile"]["key"]["backend"], "thread");

  for (const char* codec : {"bf16", "int8"}) profile.codecs.push_back({codec, "f32", 1e6, 1e-3, 5e-4});
  profile.codecs.push_back({"int8", "f32", 4e6, 2e-3, 1e-3});
  std::ofstream(path) << dump(profile_json(profile));
  const nlohmann::json timed = plan_json("--link '" + path + "' --ranks 4 --bytes 4MB -c int8");
  EXPECT_THAT(timed["codec_speeds"].get<std::string>(), HasSubstr("the profile"));
  EXPECT_NEAR(timed["results"][0]["candidates"][1]["encode_s"].get<double>(), 2e-3, 1e-12) << "the largest size";

  std::ofstream(path) << R"({"format": "gradgate-profile", "version": 1})";
  const Finished damaged = run_program("plan --link '" + path + "'" + kRates);
  EXPECT_EQ(damaged.code, 2);
  EXPECT_THAT(damaged.err, AllOf(HasSubstr("profile.json"), HasSubstr("key: is missing")));
}

TEST(Plan, SpeedsComeFromABenchFile) {
  const std::string path = test_folder() + "/bench.json";
  ASSERT_EQ(run_program("bench int8 bf16 -b 256K -n 1 -J '" + path + "'").code, 0);
  std::ifstream file(path);
  const nlohmann::json bench = nlohmann::json::parse(file);
  const nlohmann::json json = plan_json("--link 1gbit --ranks 4 --bytes 4MB --codec-times '" + path + "'");
  EXPECT_THAT(json["codec_speeds"].get<std::string>(), HasSubstr("bench.json"));
  for (const auto& codec : json["codecs"]) {
    for (const auto& result : bench["results"]) {
      if (result["codec"] == codec["codec"]) {
        EXPECT_NEAR(codec["encode_bytes_per_s"].get<double>(), 262144 / result["encode_s"].get<double>(), 1);
      }
    }
  }
  const Finished lacking =
      run_program("plan --link 1gbit --ranks 4 --bytes 4MB -c chunk-topk:8/1024 --codec-times '" + path + "'");
  EXPECT_EQ(lacking.code, 2);
  EXPECT_THAT(lacking.err, AllOf(HasSubstr("bench.json"), HasSubstr("chunk-topk:8/1024")));
  std::ofstream(path) << "{}";
  EXPECT_THAT(run_program("plan --link 1gbit --codec-times '" + path + "'").err, HasSubstr("gradgate.bench/1"));
}

TEST(Plan, BucketSizesOfAnOverlappedStep) {
  const std::string base = "--link 10gbit:50us --ranks 8 --params 350M --step 420ms --buckets 1MiB..256MiB" + kRates;
  const nlohmann::json json = plan_json(base);
  EXPECT_EQ(json["gradient_bytes"], 1.4e9);
  ASSERT_EQ(json["results"].size(), 5u);
  double fewest = 1e9;
  for (const auto& one : json["results"]) {
    const double dense = one["dense"]["step_s"], best = one["best"]["step_s"];
    EXPECT_GE(dense, 0.420);
    EXPECT_LE(best, dense);
    EXPECT_NEAR(one["dense"]["exposed_s"].get<double>(), dense - 0.420, 1e-12);
    EXPECT_LT(one["buckets"], fewest) << "larger buckets, fewer of them";
    fewest = one["buckets"];
    EXPECT_EQ(one["all"].size(), 2u);
  }
  // 1.4 GB in 1335 + 1 buckets: 1.75·M/β and 14 latencies each, far more than the backward pass hides; all of them on
  // one wire.
  const nlohmann::json& small = json["results"][0];
  const double wire = 1.75 * 1.4e9 / 1.25e9 + 14 * 50e-6 * small["buckets"].get<double>();
  EXPECT_NEAR(small["dense"]["wire_busy_s"].get<double>(), wire, 1e-9);
  EXPECT_NE(small["best"]["candidate"], "dense");

  const nlohmann::json hidden =
      plan_json("--link nvlink4 --ranks 8 --params 350M --step 420ms --buckets 25MiB" + kRates);
  EXPECT_EQ(hidden["results"][0]["best"]["candidate"], "dense") << "what is hidden stays dense";
  const nlohmann::json compute = plan_json("--encode-on compute " + base);
  EXPECT_GE(compute["results"][0]["all"][1]["step_s"].get<double>(), 0.420 + 1.4e9 / 4e9)
      << "encoding lengthens the backward pass";

  const Finished table = run_program("plan " + base);
  EXPECT_THAT(table.out, AllOf(HasSubstr("350000000 parameters (1.4 GB)"), HasSubstr("exposed"),
                               HasSubstr("shortest step"), HasSubstr("256 MiB")));
}

TEST(Plan, BadUsageNamesTheOption) {
  const struct {
    const char *arguments, *names;
  } bad[] = {
      {"", "--link: is missing"},
      {"--link fast", "--link: 'fast'"},
      {"--link absent.json", "--link: 'absent.json' cannot be read"},
      {"--link 1gbit --ranks 8..4", "--ranks: '8..4'"},
      {"--link 1gbit --ranks 0", "--ranks: '0'"},
      {"--link 1gbit --ranks 8..8192", "1 ... 4096"},
      {"--link 1gbit --bytes 1MB..", "--bytes"},
      {"--link 1gbit --bytes 1", "--bytes: '1' is outside"},
      {"--link 1gbit -c int9", "-c/--codec: 'int9'"},
      {"--link 1gbit -d f64", "-d/--dtype: 'f64'"},
      {"--link 1gbit -c bf16 -d bf16", "does not take bf16"},
      {"--link 1gbit --encode-rate 0GB/s", "--encode-rate"},
      {"--link 1gbit --decode-rate 1GB/s", "--encode-rate: is missing"},
      {"--link 1gbit --encode-rate 1GB/s --codec-times x.json", "exclude each other"},
      {"--link 1gbit --codec-times absent.json", "--codec-times: 'absent.json'"},
      {"--link 1gbit --intra-link slow --ranks-per-node 2", "--intra-link: 'slow'"},
      {"--link 1gbit --encode-rate 1GB/s -o page.txt", "-o/--output: 'page.txt'"},
      {"--link 1gbit --encode-rate 1GB/s --params 350M --ranks 8", "--step: is missing"},
      {"--link 1gbit --encode-rate 1GB/s --params 350M --step 1s", "--ranks: expected one"},
      {"--link 1gbit --encode-rate 1GB/s --params 350X --step 1s --ranks 8", "--params: '350X'"},
      {"--link 1gbit --encode-rate 1GB/s --params 350M --step 0s --ranks 8", "--step"},
      {"--link 1gbit --encode-rate 1GB/s --params 350M --step 1s --ranks 8 --buckets 0", "--buckets"},
      {"--link 1gbit --encode-rate 1GB/s --params 1000B --step 1s --ranks 8 --buckets 1KiB", "million"},
      {"--link 1gbit --encode-rate 1GB/s --params 350M --step 1s --ranks 8 --backward 0%", "--backward"},
      {"--link 1gbit --encode-rate 1GB/s --params 350M --step 1s --ranks 8 --encode-on gpu", "--encode-on: 'gpu'"},
      {"--link 1gbit --encode-rate 1GB/s --params 350M --step 1s --ranks 8 -o p.html", "-o/--output"}};
  for (const auto& [arguments, names] : bad) {
    const Finished finished = run_program(std::string("plan ") + arguments);
    EXPECT_EQ(finished.code, 2) << arguments << "\n" << finished.out << finished.err;
    EXPECT_THAT(finished.err, HasSubstr(names)) << arguments;
    EXPECT_THAT(finished.out, IsEmpty()) << arguments;
  }
  EXPECT_EQ(run_program("plan --link 1gbit --ranks 8 --bytes 1MB --encode-rate 1GB/s -o /absent/p.html").code, 1);
}

}  // namespace
}  // namespace gradgate::cli
