// Where a value comes from: flag over environment over file over default, and unknown keys are refused.
#include "integration/cli/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "integration/cli/error.h"
#include "tests/support/test_folder.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class Options : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"GRADGATE_NUM_RANKS", "GRADGATE_CODEC", "GRADGATE_JSON", "GRADGATE_CONFIG"}) unsetenv(name);
    std::filesystem::remove(path_);
  }
  void config(const std::string& json_text) { std::ofstream(path_, std::ios::binary) << json_text; }

  // Parses as `gradgate reduce <arguments>`; values land in the members below.
  void parse(std::vector<std::string> arguments) {
    CLI::App program{"test"};
    CLI::App* reduce = program.add_subcommand("reduce", "");
    CLI::App* other = program.add_subcommand("other", "");
    OptionSet options(reduce), others(other);
    ranks = codec = "unset";
    json = false;
    options.add("-t,--num-ranks", "4", "N", "ranks", [&](const std::string& option, const std::string& value) {
      if (value == "bad") throw UsageError(option + ": '" + value + "'");
      ranks = value;
    });
    options.add("codec", "", "CODEC", "codecs", [&](const std::string&, const std::string& value) { codec = value; });
    options.flag("--json", "json", &json);
    others.add("--speed", "1", "N", "", [](const std::string&, const std::string&) {});
    arguments.insert(arguments.begin(), "reduce");
    std::reverse(arguments.begin(), arguments.end());
    program.parse(arguments);
    options.resolve({&options, &others});
    shown = options.config_text();
    config_json = options.config_json();
  }
  std::string refusal(const std::vector<std::string>& arguments) {
    try {
      parse(arguments);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  }

  std::string path_ = test::test_folder() + "/options.json";
  std::string ranks, codec, shown;
  Json config_json;
  bool json = false;
};

TEST_F(Options, PrecedenceIsFlagEnvironmentFileDefault) {
  parse({});
  EXPECT_EQ(ranks, "4");
  EXPECT_EQ(codec, "unset");
  EXPECT_EQ(config_json["num-ranks"]["source"], "default");
  EXPECT_TRUE(config_json["codec"]["value"].is_null());

  config(R"({"reduce": {"num-ranks": 5, "codec": ["int8", "none"], "json": true}, "other": {"speed": "2"}})");
  parse({"--config", path_});
  EXPECT_EQ(ranks, "5");
  EXPECT_EQ(codec, "int8,none");
  EXPECT_TRUE(json);
  EXPECT_EQ(config_json["num-ranks"]["source"], "file " + path_);

  setenv("GRADGATE_NUM_RANKS", "6", 1);
  parse({"--config", path_});
  EXPECT_EQ(ranks, "6");
  EXPECT_EQ(config_json["num-ranks"]["source"], "environment GRADGATE_NUM_RANKS");

  parse({"--config", path_, "-t", "7", "bf16"});
  EXPECT_EQ(ranks, "7");
  EXPECT_EQ(codec, "bf16");
  EXPECT_EQ(config_json["num-ranks"]["source"], "flag");
  EXPECT_THAT(shown, HasSubstr("num-ranks = 7  (flag)"));

  setenv("GRADGATE_CONFIG", path_.c_str(), 1);
  setenv("GRADGATE_NUM_RANKS", "", 1);
  parse({});
  EXPECT_EQ(ranks, "5") << "an empty variable is not set";
}

TEST_F(Options, BadValuesNameTheirSource) {
  EXPECT_THAT(refusal({"-t", "bad"}), HasSubstr("-t/--num-ranks: 'bad'"));
  setenv("GRADGATE_NUM_RANKS", "bad", 1);
  EXPECT_THAT(refusal({}), HasSubstr("GRADGATE_NUM_RANKS: 'bad'"));
  EXPECT_EQ(refusal({"-t", "3"}), "accepted") << "a value that is not used is not judged";
  unsetenv("GRADGATE_NUM_RANKS");
  config(R"({"reduce": {"num-ranks": "bad"}})");
  EXPECT_THAT(refusal({"--config", path_}), HasSubstr(path_ + ": num-ranks: 'bad'"));
  setenv("GRADGATE_JSON", "yes", 1);
  EXPECT_THAT(refusal({}), AllOf(HasSubstr("GRADGATE_JSON"), HasSubstr("true, false")));
}

TEST_F(Options, UnknownKeysAndDamagedFilesAreRefused) {
  const auto with = [&](const std::string& file) {
    config(file);
    return refusal({"--config", path_});
  };
  EXPECT_THAT(with(R"({"reduce": {"ranks": 4}})"), AllOf(HasSubstr("unknown key 'ranks'"), HasSubstr("num-ranks")));
  EXPECT_THAT(with(R"({"other": {"sped": 4}})"), HasSubstr("unknown key 'sped'")) << "sections of other subcommands are checked too";
  EXPECT_THAT(with(R"({"redcue": {}})"), AllOf(HasSubstr("unknown section 'redcue'"), HasSubstr("reduce")));
  EXPECT_THAT(with(R"({"reduce": {"num-ranks": 4, "num-ranks": 5}})"), HasSubstr("'num-ranks' occurs twice"));
  EXPECT_THAT(with(R"({"reduce": {"num-ranks": null}})"), HasSubstr("num-ranks"));
  EXPECT_THAT(with(R"({"reduce": {"num-ranks": NaN}})"), HasSubstr("not a JSON file"));
  EXPECT_THAT(with(R"({"reduce": 4})"), HasSubstr("'reduce'"));
  EXPECT_THAT(with("[]"), HasSubstr("expected an object"));
  EXPECT_THAT(with(""), HasSubstr("not a JSON file"));
  EXPECT_THAT(refusal({"--config", path_ + ".absent"}), HasSubstr("cannot be read"));
}

TEST_F(Options, ListsHaveNoEmptyEntries) {
  EXPECT_THAT(split_list("-c", "int8,none"), ::testing::ElementsAre("int8", "none"));
  for (const char* bad : {"", ",", "int8,", ",int8", "int8,,none"}) EXPECT_THROW((void)split_list("-c", bad), UsageError) << bad;
  EXPECT_EQ(environment_name("min-bytes"), "GRADGATE_MIN_BYTES");
}

}  // namespace
}  // namespace gradgate::cli
