// The profile file: what is written is read back; anything else is refused by file and key.
#include "integration/cli/profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "integration/cli/error.h"
#include "integration/cli/report.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Profile sample() {
  Profile profile;
  profile.key = {"Some CPU", "thread", 4, 2, "0.1.0", "2 nodes of 2 ranks"};
  profile.all_reduce = {1.7e-5, 1.0 / 3.0 * 1e10, 0.998, {}, {{4096, -0.01}, {65536, 0.25}}};
  profile.all_reduce.pieces = {{32768, 1e-5, 1e9}, {std::numeric_limits<double>::infinity(), 3e-5, 5e9}};
  profile.all_gather = {0, 1e9, 1, {}, {}};
  profile.all_to_all = {2e-5, 2e9, 0, {}, {}};
  profile.codecs = {{"int8", "f32", 1048576, 1e-4, 2e-4}};
  return profile;
}

std::string refusal(const std::function<void(Json&)>& change) {
  Json json = profile_json(sample());
  change(json);
  try {
    (void)parse_profile("p.json", dump(json));
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Profile, IsReadBackExactly) {
  const Profile written = sample();
  const Profile read = parse_profile("p.json", dump(profile_json(written)));
  EXPECT_EQ(read.key, written.key);
  EXPECT_EQ(read.all_reduce.alpha_s, written.all_reduce.alpha_s);
  EXPECT_EQ(read.all_reduce.beta_bytes_per_s, written.all_reduce.beta_bytes_per_s);
  ASSERT_EQ(read.all_reduce.pieces.size(), 2u);
  EXPECT_EQ(read.all_reduce.pieces[0].up_to_bytes, 32768);
  EXPECT_TRUE(std::isinf(read.all_reduce.pieces[1].up_to_bytes));
  EXPECT_EQ(read.all_reduce.pieces[1].beta_bytes_per_s, 5e9);
  ASSERT_EQ(read.all_reduce.errors.size(), 2u);
  EXPECT_EQ(read.all_reduce.errors[1].relative, 0.25);
  EXPECT_EQ(read.all_to_all.beta_bytes_per_s, 2e9);
  ASSERT_EQ(read.codecs.size(), 1u);
  EXPECT_EQ(read.codecs[0].codec, "int8");
  EXPECT_EQ(read.codecs[0].decode_s, 2e-4);
  EXPECT_EQ(profile_json(read), profile_json(written));
  EXPECT_TRUE(looks_like_profile(dump(profile_json(written))));
  for (const char* other : {"", "{", "[]", "{}", R"({"format": "gradgate-interconnects"})", "null"}) {
    EXPECT_FALSE(looks_like_profile(other)) << other;
  }
}

TEST(Profile, IsRefusedByFileAndKey) {
  EXPECT_EQ(refusal([](Json&) {}), "accepted");
  const auto expect = [](const std::function<void(Json&)>& change, const char* key, const char* why) {
    EXPECT_THAT(refusal(change), AllOf(HasSubstr("p.json: "), HasSubstr(key), HasSubstr(why)));
  };
  expect([](Json& j) { j["format"] = "other"; }, "format", kProfileFormat);
  expect([](Json& j) { j["version"] = 2; }, "version", "1 ... 1");
  expect([](Json& j) { j.erase("key"); }, "key", "missing");
  expect([](Json& j) { j["colectives"] = 1; }, "colectives", "unknown key");
  expect([](Json& j) { j["key"]["world_size"] = 1; }, "key.world_size", "2 ...");
  expect([](Json& j) { j["key"]["world_size"] = 4.5; }, "key.world_size", "whole");
  expect([](Json& j) { j["key"]["ranks_per_node"] = 8; }, "key.ranks_per_node", "1 ... 4");
  expect([](Json& j) { j["key"]["device"] = ""; }, "key.device", "text");
  Json::json_pointer alpha("/collectives/all_reduce/alpha_s"), beta("/collectives/all_gather/beta_bytes_per_s");
  expect([&](Json& j) { j[alpha] = -1e-9; }, "collectives.all_reduce.alpha_s", "outside");
  expect([&](Json& j) { j[alpha] = nullptr; }, "collectives.all_reduce.alpha_s", "not a number");
  expect([&](Json& j) { j[beta] = 0; }, "collectives.all_gather.beta_bytes_per_s", "outside");
  expect([&](Json& j) { j[beta] = "1GB/s"; }, "collectives.all_gather.beta_bytes_per_s", "not a number");
  expect([](Json& j) { j["collectives"]["all_to_all"]["gamma"] = 0; }, "collectives.all_to_all.gamma", "unknown key");
  expect([](Json& j) { j["collectives"]["all_to_all"]["confidence"] = 1.5; }, "confidence", "outside");
  Json::json_pointer first("/collectives/all_reduce/pieces/0/up_to_bytes");
  Json::json_pointer last("/collectives/all_reduce/pieces/1/up_to_bytes");
  expect([&](Json& j) { j[first] = nullptr; }, "collectives.all_reduce.pieces[0].up_to_bytes", "last piece");
  expect([&](Json& j) { j[last] = 4096; }, "collectives.all_reduce.pieces[1].up_to_bytes", "last piece");
  expect([&](Json& j) { j[first] = 0; }, "collectives.all_reduce.pieces[0].up_to_bytes", "not greater");
  expect([](Json& j) { j["collectives"]["all_reduce"]["errors"][0]["relative"] = "x"; }, "errors[0].relative",
         "number");
  expect([](Json& j) { j["codecs"][0]["encode_s"] = -1; }, "codecs[0].encode_s", "outside");
  for (const char* damaged : {"", "{", "[1]", "{\"format\": NaN}", "{\"format\": \"a\", \"format\": \"a\"}"}) {
    EXPECT_THROW((void)parse_profile("p.json", damaged), UsageError) << damaged;
  }
  EXPECT_THROW((void)read_profile("--link", "/absent/p.json"), UsageError);
}

}  // namespace
}  // namespace gradgate::cli
