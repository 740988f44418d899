// gradgate roundtrip: literal ratios and errors on tiny files, and refusals.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "gradgate/codec.h"
#include "integration/cli/error_metrics.h"
#include "integration/cli/npy.h"
#include "tests/cli/run_program.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ErrorMetrics, AreLiteral) {
  const std::vector<float> a = {3, 4, 0}, b = {3, 0, 0}, zero = {0, 0, 0};
  const ErrorMetrics metrics = compare(a, b);
  EXPECT_EQ(metrics.max_error, 4);
  EXPECT_DOUBLE_EQ(metrics.relative_l2, 0.8);
  EXPECT_DOUBLE_EQ(metrics.cosine_error, 1 - 0.6);
  EXPECT_EQ(metrics.norm, 5);
  const ErrorMetrics same = compare(a, a);
  EXPECT_TRUE(same.max_error == 0 && same.relative_l2 == 0 && same.cosine_error == 0);
  const ErrorMetrics nothing = compare(zero, zero);
  EXPECT_TRUE(nothing.relative_l2 == 0 && nothing.cosine_error == 0);
  EXPECT_TRUE(std::isnan(compare(zero, a).relative_l2) && std::isnan(compare(zero, a).cosine_error));
  const float inf = INFINITY;
  const std::vector<float> spoilt = {3, inf, 1}, poisoned = {3, inf, NAN};
  EXPECT_EQ(compare(spoilt, poisoned).non_finite, 1u);
  EXPECT_EQ(compare(spoilt, poisoned).poisoned, 1u);
  EXPECT_EQ(compare(spoilt, poisoned).max_error, 0);
}

TEST(RoundTrip, TopkKeepsTheGreatestAndTheShape) {
  const std::string in = test_folder() + "/in.npy", out = test_folder() + "/out.npy";
  std::vector<float> values(64, 0.125f);
  values[3] = -2.0f;
  values[40] = 1.0f;
  write_array(in, {8, 8}, values);
  const Finished finished = run_program("roundtrip '" + in + "' --codec chunk-topk:1/32 -o '" + out + "' --json");
  ASSERT_EQ(finished.code, 0) << finished.err;
  const ArrayFile decoded = read_array(out);
  EXPECT_THAT(decoded.shape, ElementsAre(8, 8));
  std::vector<float> expected(64, 0.0f);
  expected[3] = -2.0f;
  expected[40] = 1.0f;
  EXPECT_EQ(decoded.values, expected);
  const nlohmann::json json = strict_json(finished.out);
  EXPECT_EQ(json["schema"], "gradgate.roundtrip/1");
  EXPECT_EQ(json["input"]["shape"], nlohmann::json({8, 8}));
  const nlohmann::json& row = json["results"][0];
  EXPECT_EQ(row["payload_bytes"], 64) << "header 32, two f32 and two u16 in a section of 16 each";
  EXPECT_EQ(row["ratio"], 4.0) << "256 bytes over those of the payload, header included";
  EXPECT_EQ(row["max_error"], 0.125);
  const double lost = 62 * 0.125 * 0.125, kept = 5;
  EXPECT_NEAR(row["relative_l2"].get<double>(), std::sqrt(lost / (lost + kept)), 1e-12);
  EXPECT_NEAR(row["cosine_error"].get<double>(), 1 - std::sqrt(kept / (lost + kept)), 1e-12);
  EXPECT_EQ(row["correct"], true);
}

TEST(RoundTrip, EveryCodecOnRawFilesOfEverySize) {
  for (const size_t count : {size_t{0}, size_t{1}, size_t{255}, size_t{256}, size_t{257}, size_t{5000}}) {
    const std::string in = test_folder() + "/in.f32";
    std::vector<float> values(count);
    std::iota(values.begin(), values.end(), -100.0f);
    write_array(in, {count}, values);
    const Finished finished = run_program("roundtrip '" + in + "' --json", "LC_ALL=de_DE.UTF-8");
    ASSERT_EQ(finished.code, 0) << count << finished.err;
    const nlohmann::json results = strict_json(finished.out)["results"];
    ASSERT_EQ(results.size(), codec_infos().size());
    for (const nlohmann::json& row : results) {
      EXPECT_EQ(row["correct"], true) << count << row.dump();
      if (row["codec"] == "none") {
        EXPECT_EQ(row["max_error"], 0.0);
      }
      if (row["codec"] == "int8" && count > 0) {
        const double largest = std::max(100.0, count - 101.0);
        EXPECT_LE(row["max_error"].get<double>(), largest / 254 * 1.0001);
      }
    }
  }
}

TEST(RoundTrip, NonFiniteValuesAreReportedNotHidden) {
  const std::string in = test_folder() + "/in.npy";
  std::vector<float> values(600, 0.5f);
  values[10] = INFINITY;
  write_array(in, {600}, values);
  const Finished finished = run_program("roundtrip '" + in + "' --codec int8");
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.out, AllOf(HasSubstr("1 inputs are Inf or NaN"), HasSubstr("255 finite inputs")));
}

TEST(RoundTrip, DoublesAreRoundedAndSaidSo) {
  const std::string in = test_folder() + "/in.npy";
  std::string header = format_npy_header({1});
  header.replace(header.find("<f4"), 3, "<f8");
  const double value = 1.0 / 3;
  std::ofstream(in, std::ios::binary) << header << std::string(reinterpret_cast<const char*>(&value), 8);
  const Finished finished = run_program("roundtrip '" + in + "' --codec none");
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.out, AllOf(HasSubstr("rounded from f64"), HasSubstr("shape (1,)")));
}

TEST(RoundTrip, UnusableInputsAreRefused) {
  const std::string in = test_folder() + "/in.npy", out = test_folder() + "/out.npy";
  write_array(in, {2, 3}, std::vector<float>(6, 1.0f));
  EXPECT_EQ(run_program("roundtrip '" + in + "' --codec int8,bf16 -o '" + out + "'").code, 2) << "one output, one codec";
  EXPECT_FALSE(std::filesystem::exists(out));
  std::ifstream file(in, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto refused = [&](std::string from, const std::string& to, const char* names) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    std::ofstream(in, std::ios::binary) << changed;
    const Finished finished = run_program("roundtrip '" + in + "' --codec int8 -o '" + out + "'");
    EXPECT_EQ(finished.code, 2) << finished.out;
    EXPECT_THAT(finished.err, AllOf(HasSubstr("in.npy"), HasSubstr(names)));
    EXPECT_FALSE(std::filesystem::exists(out)) << "nothing half-written";
  };
  refused("False", "True ", "fortran_order");
  refused("<f4", "<i4", "'<f4' and '<f8'");
  refused("(2, 3)", "(2, 4)", "truncated");
  EXPECT_EQ(run_program("roundtrip '" + test_folder() + "/absent.f32'").code, 2);
}

}  // namespace
}  // namespace gradgate::cli
