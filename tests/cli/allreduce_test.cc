// gradgate allreduce: the table, strict JSON, the virtual link's literal times, and what happens on a wrong value.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "integration/cli/allreduce_check.h"
#include "integration/cli/allreduce_report.h"
#include "integration/cli/error.h"
#include "integration/cli/test_data.h"
#include "integration/comm/rank_sum.h"
#include "tests/cli/run_program.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> list;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    list.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return list;
}

TEST(AllReduce, PrintsATableThatNcclTestsUsersKnow) {
  const Finished finished = run_program("allreduce -c int8,none,bf16,chunk-topk:8/1024,int8:ef -b 64K -e 256K -f 4 --ranks 3 -n 2 -w 1");
  EXPECT_EQ(finished.code, 0) << finished.err;
  size_t rows = 0;
  for (const std::string& line : lines(finished.out)) {
    if (line[0] == '#') continue;
    ++rows;
    EXPECT_EQ(line.substr(line.size() - 2), " 0") << "#wrong: " << line;
  }
  EXPECT_EQ(rows, 10u) << finished.out;
  EXPECT_THAT(finished.out, AllOf(HasSubstr("# Out of bounds values : 0 OK"), HasSubstr("# Avg bus bandwidth"), HasSubstr("3 thread ranks")));
  for (const char* column : {"size", "count", "type", "codec", "time", "algbw", "busbw", "ratio", "wire", "maxerr", "#wrong"}) EXPECT_THAT(finished.out, HasSubstr(column));
}

TEST(AllReduce, EveryRankCountAndDtypeIsRight) {
  for (const char* ranks : {"1", "2", "3", "4", "5", "8"}) {
    for (const char* type : {"float", "bfloat16", "half"}) {
      const Finished finished = run_program(std::string("allreduce --json -b 4 -e 40000 -i 13332 -n 1 -w 0 -d ") + type + " --ranks " + ranks);
      EXPECT_EQ(finished.code, 0) << ranks << " " << type << finished.err << finished.out;
      const nlohmann::json json = strict_json(finished.out);
      EXPECT_EQ(json["summary"]["out_of_bounds"], 0);
      for (const nlohmann::json& row : json["results"]) {
        if (row["codec"] == "none" && std::strchr("1248", ranks[0]) != nullptr) {
          EXPECT_EQ(row["max_error"], 0.0) << row.dump() << ": sums are exact";
        }
      }
    }
  }
}

TEST(AllReduce, AVirtualLinkHasLiteralTimes) {
  const Finished finished = run_program("allreduce --json -c none,int8 -b 1000000 -e 1000000 --ranks 4 --link 1gbit:50us --virtual --codec-rate 1GB/s:2GB/s -n 3 -w 0");
  ASSERT_EQ(finished.code, 0) << finished.err;
  const nlohmann::json json = strict_json(finished.out);
  EXPECT_THAT(json["ranks"].get<std::string>(), AllOf(HasSubstr("4 thread ranks"), HasSubstr("emulated")));
  const nlohmann::json& none = json["results"][0];
  // Ring: 2(n-1)·alpha + 2(n-1)/n·M/beta = 300 us + 12000 us.
  EXPECT_NEAR(none["time_us"].get<double>(), 12300, 1e-3);
  EXPECT_EQ(none["wire_bytes"], 1000000);
  EXPECT_NEAR(none["algbw_gb_s"].get<double>(), 1e6 / 12.3e-3 / 1e9, 1e-9);
  EXPECT_NEAR(none["busbw_gb_s"].get<double>(), 1.5 * 1e6 / 12.3e-3 / 1e9, 1e-9);
  const nlohmann::json& int8 = json["results"][1];
  // Two passes of 3·alpha + 3/4·wire/beta, 1000 us of encoding and 500 us of decoding.
  const double wire = int8["wire_bytes"].get<double>();
  EXPECT_NEAR(int8["time_us"].get<double>(), 2 * (150 + 0.75 * wire / 125e6 * 1e6) + 1500, 1e-3);
  EXPECT_NEAR(int8["encode_us"].get<double>(), 1000, 1e-3);
  EXPECT_NEAR(int8["decode_us"].get<double>(), 500, 1e-3);
  EXPECT_NEAR(int8["ratio"].get<double>(), 1e6 / wire, 1e-9);
  EXPECT_EQ(int8["times_us"].size(), 3u);
}

TEST(AllReduce, ARealLinkIsSlowerThanItsModelledTime) {
  const Finished finished = run_program("allreduce --json -c none -b 125000 -e 125000 --ranks 2 --link 100mbit:100us -n 1 -w 0");
  ASSERT_EQ(finished.code, 0) << finished.err;
  // 2·100 us + 125000 B / 12.5 MB/s = 10.2 ms: an emulated link never finishes earlier.
  EXPECT_GE(strict_json(finished.out)["results"][0]["time_us"].get<double>(), 10200);
}

TEST(AllReduce, ZeroSizesAndOtherLocalesGiveStrictJson) {
  for (const char* environment : {"", "LC_ALL=de_DE.UTF-8", "LC_ALL=C"}) {
    const Finished finished = run_program("allreduce --json -b 0 -e 8 -n 1 -w 0 --ranks 2 --link 1gbit:0us --virtual", environment);
    ASSERT_EQ(finished.code, 0) << finished.err;
    const nlohmann::json json = strict_json(finished.out);
    const nlohmann::json& row = json["results"][0];
    EXPECT_EQ(row["size_bytes"], 0);
    EXPECT_TRUE(row["algbw_gb_s"].is_null()) << "no bytes in no time";
    EXPECT_TRUE(row["ratio"].is_null());
  }
  const Finished table = run_program("allreduce -b 0 -e 0 -n 1 -w 0 --ranks 2 --link 1gbit:0us --virtual", "LC_ALL=de_DE.UTF-8");
  EXPECT_EQ(table.code, 0);
  EXPECT_THAT(table.out, HasSubstr("n/a"));
}

// ---- The reporter and the checker, which turn a wrong value into exit code 1.

TEST(AllReduceReport, WrongValuesFailTheRun) {
  AllReduceReport report(4, DType::f32);
  AllReduceCase measured;
  measured.time_s = {2e-3, 1e-3, 3e-3};
  measured.wire_bytes = 1000;
  const NamedCodec codec = parse_one_codec("-c", "int8");
  EXPECT_THAT(report.add(codec, 1000, measured), HasSubstr("2000"));
  EXPECT_EQ(report.exit_code(), kExitOk);
  EXPECT_THAT(report.footer(), StartsWith("# Out of bounds values : 0 OK\n"));
  measured.wrong = 3;
  (void)report.add(codec, 1000, measured);
  EXPECT_EQ(report.exit_code(), kExitFailed);
  EXPECT_THAT(report.footer(), StartsWith("# Out of bounds values : 3 FAILED\n"));
  EXPECT_EQ(report.summary()["out_of_bounds"], 3);
  EXPECT_EQ(report.results()[0]["time_us"], 2000.0);
  EXPECT_EQ(report.results()[0]["time_min_us"], 1000.0);
  EXPECT_EQ(report.results()[0]["ratio"], 4.0);
}

TEST(AllReduceReport, Gives1GiBIn10MsAsNcclTestsDoes) {
  AllReduceReport report(8, DType::f32);
  AllReduceCase measured;
  measured.time_s = {10e-3};
  measured.wire_bytes = size_t{1} << 30;
  (void)report.add(parse_one_codec("-c", "none"), (size_t{1} << 30) / 4, measured);
  EXPECT_NEAR(report.results()[0]["algbw_gb_s"].get<double>(), 107.374, 5e-4);
  EXPECT_NEAR(report.results()[0]["busbw_gb_s"].get<double>(), 187.905, 5e-4);
  EXPECT_THAT(report.footer(), HasSubstr("187.9 GB/s"));
}

// What `ranks` ranks hold after an exchange. All machines are driven in one thread: every collective is a copy.
std::vector<std::vector<std::byte>> exchange(const NamedCodec& codec, DType dtype, size_t count, int ranks) {
  const size_t n = static_cast<size_t>(ranks);
  std::vector<std::vector<std::byte>> gradients(n), workspaces(n);
  std::vector<std::vector<float>> residuals(n);
  std::vector<ExchangeMachine> machines(n);
  std::vector<CollectiveCall> calls(n);
  for (size_t r = 0; r < n; ++r) {
    const ExchangeShape shape{.candidate = default_candidate(codec.spec), .count = count, .dtype = dtype, .rank = static_cast<int>(r), .ranks = ranks};
    gradients[r].resize(count * dtype_bytes(dtype));
    fill_exact(static_cast<int>(r), ranks, 0, {gradients[r].data(), count, dtype});
    residuals[r].resize(codec.spec.feedback ? count : 0);
    workspaces[r].resize(exchange_workspace_bytes(shape));
    const ExchangeArgs args{.shape = shape,
                            .gradient = {gradients[r].data(), count, dtype},
                            .residual = codec.spec.feedback ? residuals[r].data() : nullptr,
                            .feedback = codec.spec.feedback ? Feedback::apply : Feedback::none,
                            .workspace = workspaces[r],
                            .seed = {},
                            .executor = {}};
    EXPECT_TRUE(machines[r].begin(args).ok());
    EXPECT_TRUE(machines[r].next(&calls[r]).ok());
  }
  while (calls[0].kind != Collective::none) {
    const size_t bytes = calls[0].count * dtype_bytes(calls[0].dtype);
    if (calls[0].kind == Collective::all_reduce) {
      std::vector<const void*> sources;
      std::vector<void*> dests;
      for (const CollectiveCall& call : calls) sources.push_back(call.send), dests.push_back(call.recv);
      comm::sum_over_ranks(sources, 0, dests, 0, calls[0].count, calls[0].dtype);
    }
    for (size_t to = 0; to < n && calls[0].kind != Collective::all_reduce; ++to) {
      for (size_t from = 0; from < n; ++from) {
        const auto* send = static_cast<const std::byte*>(calls[from].send) + (calls[from].kind == Collective::all_to_all ? to * bytes : 0);
        std::memmove(static_cast<std::byte*>(calls[to].recv) + from * bytes, send, bytes);
      }
    }
    for (size_t r = 0; r < n; ++r) EXPECT_TRUE(machines[r].next(&calls[r]).ok());
  }
  return gradients;
}

AllReduceCheck check(const NamedCodec& codec, DType dtype, size_t count, const std::vector<std::vector<std::byte>>& outputs) {
  std::vector<const std::byte*> pointers;
  for (const auto& output : outputs) pointers.push_back(output.data());
  return check_all_reduce(codec, dtype, count, pointers);
}

class Checks : public ::testing::TestWithParam<const char*> {};
TEST_P(Checks, AcceptsTheExchangeAndCountsEveryWrongElement) {
  const NamedCodec codec = parse_one_codec("-c", GetParam());
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    if (!codec_takes(codec.spec, dtype)) continue;
    const size_t count = 5000;
    std::vector<std::vector<std::byte>> outputs = exchange(codec, dtype, count, 3);
    EXPECT_EQ(check(codec, dtype, count, outputs).wrong, 0u) << dtype_name(dtype);
    EXPECT_GT(check(codec, dtype, count, outputs).max_error, 0) << "three ranks: 1/3 is not exact";

    // The last bit of one element, on all ranks alike: only the reference can see it.
    for (auto& output : outputs) output[1234 * dtype_bytes(dtype)] ^= std::byte{1};
    EXPECT_EQ(check(codec, dtype, count, outputs).wrong, 1u) << dtype_name(dtype);
    // One more on one rank only.
    outputs[2][4999 * dtype_bytes(dtype)] ^= std::byte{1};
    EXPECT_EQ(check(codec, dtype, count, outputs).wrong, 2u) << dtype_name(dtype);
  }
}
INSTANTIATE_TEST_SUITE_P(Codecs, Checks, ::testing::Values("bf16", "fp16", "int8", "int8:ef", "int8:sr", "fp8", "int4", "int4:hadamard:sr", "onebit", "chunk-topk:8/1024", "chunk-topk:4/64:bf16:noef", "chunk-topk:4/64:int8", "randk:0.01"));

TEST(LargeCheck, BoundsHoldBetweenTheWindowsOfTheReference) {
  // 3 Mi elements on two ranks: the reference sees the ends of each shard; in the middle the codec's bound must do.
  const NamedCodec codec = parse_one_codec("-c", "bf16");
  const size_t count = size_t{3} << 20, middle = count / 4;
  std::vector<std::vector<std::byte>> outputs = exchange(codec, DType::f32, count, 2);
  EXPECT_EQ(check(codec, DType::f32, count, outputs).wrong, 0u);
  for (auto& output : outputs) {
    float value = 0;
    std::memcpy(&value, output.data() + middle * 4, 4);
    value = value == 0 ? 1.0f : value * 1.03f;  // two roundings to bf16 are at most 0.8 % of the sum of magnitudes
    std::memcpy(output.data() + middle * 4, &value, 4);
  }
  EXPECT_EQ(check(codec, DType::f32, count, outputs).wrong, 1u);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (auto& output : outputs) std::memcpy(output.data() + (middle + 1) * 4, &nan, 4);
  const AllReduceCheck poisoned = check(codec, DType::f32, count, outputs);
  EXPECT_EQ(poisoned.wrong, 2u);
  EXPECT_TRUE(std::isnan(poisoned.max_error));
}

TEST(AllReduce, WithoutADeviceEveryCommandSaysSoAndFails) {
  for (const char* command : {"allreduce -c int8", "bench int8", "demo", "calibrate", "doctor --params 1M --step 100ms"}) {
    const std::string arguments = std::string(command) + " --device cuda";
    for (const char* without : {"GRADGATE_CUDA_LIBRARY=/nowhere/libgradgate_cuda.so", "CUDA_VISIBLE_DEVICES="}) {
      const Finished run = run_program(arguments, without);
      EXPECT_EQ(run.code, 1) << without << " " << command;
      EXPECT_EQ(run.out, "") << without << " " << command;
      EXPECT_THAT(run.err, HasSubstr("gradgate: --device cuda: no CUDA device: ")) << without << " " << command;
    }
  }
  const Finished named = run_program("bench int8 --device cuda", "GRADGATE_CUDA_LIBRARY=/nowhere/libgradgate_cuda.so");
  EXPECT_THAT(named.err, HasSubstr("GRADGATE_CUDA_LIBRARY: /nowhere/libgradgate_cuda.so"));
}

}  // namespace
}  // namespace gradgate::cli
