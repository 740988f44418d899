// gradgate bench: what it reports, not how fast anything is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <bit>
#include <cmath>
#include <fstream>

#include "gradgate/exchange.h"
#include "integration/cli/bench_report.h"
#include "integration/cli/statistics.h"
#include "tests/cli/run_program.h"
#include "tests/support/test_folder.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using test::test_folder;

TEST(Statistics, AreOrderStatistics) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(quantile({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 0.99), 10);
  EXPECT_EQ(quantile({5, 1, 3}, 0), 1);
  EXPECT_TRUE(std::isnan(median({})));
  EXPECT_EQ(median_ratio({2, 40, 3}, {1, 10, 1}), 3) << "round by round";
  // A first call of 0.2 s does not move the median of the other nine.
  EXPECT_EQ(median({214477, 14, 5, 3, 4, 5, 4, 4, 4, 4}), 4);
}

TEST(Bench, ReportsEveryCodecAndVerifiesIt) {
  const Finished finished = run_program("bench --json -b 1M -n 2 --threads 2 --ranks 4");
  ASSERT_EQ(finished.code, 0) << finished.err;
  const nlohmann::json json = strict_json(finished.out);
  EXPECT_EQ(json["schema"], "gradgate.bench/1");
  EXPECT_EQ(json["count"], 262144);
  EXPECT_EQ(json["out_of_bounds"], 0);
  ASSERT_EQ(json["results"].size(), codec_infos().size());
  for (const nlohmann::json& row : json["results"]) {
    CodecSpec spec;
    ASSERT_TRUE(parse_codec(row["codec"].get<std::string>(), &spec, nullptr).ok());
    EXPECT_EQ(row["payload_bytes"], payload_bytes(spec, DType::f32, 262144)) << "the bytes on the wire, header included";
    EXPECT_DOUBLE_EQ(row["ratio"].get<double>(), 1048576.0 / row["payload_bytes"].get<double>());
    EXPECT_EQ(row["wrong"], 0);
    EXPECT_GT(row["encode_gb_s"].get<double>(), 0);
    EXPECT_EQ(row["encode_feedback_gb_s"].is_null(), row["codec"] == "none");
    EXPECT_EQ(row["break_even_dense_bytes_per_s"].is_null(), row["codec"] == "none");
    EXPECT_EQ(row["exchange_wire_bytes"], exchange_wire_bytes({.candidate = default_candidate(spec), .count = 262144, .dtype = DType::f32, .rank = 0, .ranks = 4, .width = 1}));
  }
}

TEST(Bench, FloorsListTheGoals) {
  const Finished finished = run_program("bench --floors -b 4M -n 1");
  EXPECT_EQ(finished.code, 0) << "a missed goal is not an error: " << finished.err;
  for (const char* goal : {"<= 2.0", "<= 1.2", "<= 1.5", "<= 1.6", "x read", "x axpy", "chunk-topk:8/1024", "int8"}) EXPECT_THAT(finished.out, HasSubstr(goal));
  const nlohmann::json json = strict_json(run_program("bench --floors -b 4M -n 1 --json").out);
  ASSERT_EQ(json["goals"].size(), 10u) << "three of int8, one each of fp8, int4, onebit and chunk-topk, three of topk";
  for (const nlohmann::json& goal : json["goals"]) EXPECT_EQ(goal["met"].get<bool>(), goal["measured"].get<double>() <= goal["at_most"].get<double>());
  const nlohmann::json& topk = json["results"].back();
  EXPECT_EQ(topk["codec"], "topk:0.01");
  EXPECT_GT(topk["encode_first_s"].get<double>(), 0);
  EXPECT_GT(topk["sum_of_8_s"].get<double>(), 0);
  EXPECT_TRUE(topk["encode_one_thread_s"].is_null()) << "one thread has nothing to be compared with";
  EXPECT_EQ(topk["wrong"], 0);
}

TEST(Bench, FloorsOfTwoThreadsAreComparedWithOne) {
  const nlohmann::json json = strict_json(run_program("bench int8 --floors -b 4M -n 1 --threads 2 --json").out);
  ASSERT_EQ(json["goals"].size(), 4u);
  EXPECT_EQ(json["goals"][3]["against"], "1 thread");
  EXPECT_EQ(json["goals"][3]["at_least"], 1.6);
  EXPECT_DOUBLE_EQ(json["goals"][3]["memory_allows"].get<double>(), json["results"][0]["encode_one_thread_s"].get<double>() / json["floors"]["read_s"].get<double>());
  EXPECT_TRUE(json["goals"][0]["memory_allows"].is_null());
  EXPECT_GT(json["results"][0]["encode_one_thread_s"].get<double>(), 0);
}

// A Python without torch, and none at all, are one line; the peer of the standard library is always there and chooses the same.
TEST(Bench, PeersAreVerifiedAndTorchMayBeMissing) {
  for (const auto& [python, note] : {std::pair{"false", "false"}, {"/nonexistent/python", "torch not found: cannot run /nonexistent/python"}}) {
    const Finished finished = run_program(std::string("bench topk:0.01 --peers -b 1M -n 2 --json --python ") + python);
    if (std::string(python) == "false") {
      EXPECT_EQ(finished.code, 1);
      EXPECT_THAT(finished.err, HasSubstr("--peers: false ended with"));
      continue;
    }
    ASSERT_EQ(finished.code, 0) << finished.err;
    const nlohmann::json json = strict_json(finished.out);
    EXPECT_EQ(json["peers_note"], note);
    ASSERT_EQ(json["peers"].size(), 1u);
    EXPECT_EQ(json["peers"][0]["name"], "std::nth_element 1 %");
    EXPECT_GT(json["peers"][0]["encode_s"].get<double>(), 0);
    EXPECT_TRUE(json["peers"][0]["decode_s"].is_null());
    EXPECT_EQ(json["peers"][0]["wrong"], 0);
  }
  EXPECT_EQ(run_program("bench int8 --peers -d half -n 1 -b 1M").code, 2) << "peers take float gradients";
  EXPECT_EQ(run_program("bench int8 --peers -n 1 -b 0 --python /nonexistent/python").code, 0);
}

// What the process says is parsed and compared: a stand-in for torch that chooses otherwise is found.
TEST(Bench, TorchIsComparedBySums) {
  std::vector<float> x(1000);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i) * (i % 2 == 0 ? 1.0f : -1.0f);
  const PeerSums sums = expected_sums(x);
  uint64_t greatest = 0;
  for (size_t i = 990; i < 1000; ++i) greatest += std::bit_cast<uint32_t>(std::fabs(x[i]));
  EXPECT_EQ(sums.topk, greatest);
  const std::string path = test_folder() + "/python";
  const auto stand_in = [&](uint64_t topk) {
    std::ofstream(path) << "#!/bin/sh\nprintf '%s' '{\"version\": \"9\", \"where\": \"1 thread\", \"seconds\": {\"topk\": [1, 2], \"f16\": [1], \"f16_back\": [1], \"bf16\": [1], \"bf16_back\": [1]}, "
                        << "\"topk_bits\": " << topk << ", \"f16_bits\": " << sums.f16 << ", \"bf16_bits\": " << sums.bf16 << "}'\n";
    chmod(path.c_str(), 0700);
    std::string note;
    const std::vector<PeerTimes> peers = torch_peers({.python = path, .rounds = 2}, x, sums, &note);
    EXPECT_THAT(note, HasSubstr("torch 9, 1 thread"));
    EXPECT_EQ(peers.size(), 3u);
    EXPECT_EQ(peers[1].wrong + peers[2].wrong, 0u);
    EXPECT_EQ(peers[0].encode_s, (std::vector<double>{1, 2}));
    return peers[0].wrong;
  };
  EXPECT_EQ(stand_in(sums.topk), 0u);
  EXPECT_EQ(stand_in(sums.topk + 1), 1u);
  NthElementPeer nth(x);
  nth.choose();
  EXPECT_EQ(nth.sum(), sums.topk);
}

TEST(Bench, TinyAndEmptyGradientsGiveStrictJson) {
  for (const char* bytes : {"0", "4", "1020"}) {
    const Finished finished = run_program(std::string("bench --json -n 1 -b ") + bytes, "LC_ALL=de_DE.UTF-8");
    ASSERT_EQ(finished.code, 0) << bytes << finished.err;
    EXPECT_EQ(strict_json(finished.out)["out_of_bounds"], 0);
    EXPECT_EQ(run_program(std::string("bench -n 1 -d bfloat16 -b ") + bytes).code, 0) << bytes;
  }
}

// ---- The reporter, on injected times.

BenchResult injected() {
  BenchResult result;
  result.read_s = {1e-3, 1e-3, 1e-3};
  result.copy_s = result.axpy_s = {2e-3, 2e-3, 2e-3};
  CodecTimes int8;
  int8.codec = parse_one_codec("codec", "int8");
  int8.payload = 1000000;
  int8.encode_s = {1.9e-3, 1.8e-3, 2.5e-3};
  int8.decode_s = {1.3e-3, 1.3e-3, 1.3e-3};
  int8.encode_feedback_s = {2.8e-3, 2.8e-3, 2.8e-3};
  int8.exchange = {{3e-3, 3e-3, 3e-3}, 1000000};
  result.codecs.push_back(int8);
  result.bf16 = {{2e-3, 2e-3, 2e-3}, 2000000};
  return result;
}
BenchSetup injected_setup() {
  BenchSetup setup;
  setup.count = 1000000;
  setup.rounds = 3;
  return setup;
}

TEST(BenchReport, BreakEvenIsTheFormula) {
  const nlohmann::json row = nlohmann::json::parse(bench_json(injected_setup(), injected()).dump())["results"][0];
  // 2·3/4·(4 MB − 1 MB)/3 ms and 1.5·(2 MB − 1 MB)/(3 − 2) ms.
  EXPECT_DOUBLE_EQ(row["break_even_dense_bytes_per_s"].get<double>(), 1.5e9);
  EXPECT_NEAR(row["break_even_bf16_bytes_per_s"].get<double>(), 1.5e9, 1);
  EXPECT_DOUBLE_EQ(row["encode_gb_s"].get<double>(), 4e6 / 1.9e-3 / 1e9);
  EXPECT_THAT(bench_table(injected_setup(), injected()), HasSubstr("12 Gbit/s"));
  BenchResult faster = injected();
  faster.codecs[0].exchange.seconds = {1e-3, 1e-3, 1e-3};
  EXPECT_THAT(bench_table(injected_setup(), faster), HasSubstr("any")) << "faster and smaller than bf16: on every link";
  BenchResult larger = injected();
  larger.codecs[0].exchange.wire_bytes = 5000000;
  EXPECT_THAT(bench_table(injected_setup(), larger), HasSubstr("never"));
}

TEST(BenchReport, MissedGoalsAndWrongValuesAreSaid) {
  const std::string table = floors_table(injected_setup(), injected());
  EXPECT_THAT(table, AllOf(HasSubstr("1.90 x read"), HasSubstr("met"), HasSubstr("1.30 x read"), HasSubstr("MISSED"), HasSubstr("1.40 x axpy"), HasSubstr(": 0 OK")));
  BenchResult result = injected();
  result.codecs[0].wrong = 2;
  EXPECT_EQ(wrong_values(result), 2u);
  EXPECT_THAT(bench_table(injected_setup(), result), HasSubstr("# Out of bounds values : 2 FAILED"));
  EXPECT_THAT(floors_table(injected_setup(), result), AllOf(HasSubstr(": 2 FAILED"), Not(HasSubstr(": 0 OK"))));
}

}  // namespace
}  // namespace gradgate::cli
