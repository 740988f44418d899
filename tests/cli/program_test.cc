// The program from outside: help, version, bad input, sources of values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <regex>

#include "integration/cli/options.h"
#include "tests/cli/run_program.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr const char* kQuick = "-c none,int8 -b 4K -e 4K -n 1 -w 0 --ranks 2";

TEST(Program, HelpAndVersion) {
  const Finished help = run_program("--help");
  EXPECT_EQ(help.code, 0);
  for (const char* word : {"demo", "bench", "allreduce", "doctor", "calibrate", "roundtrip", "model", "plan", "report", "Examples", "GRADGATE_"}) EXPECT_THAT(help.out, HasSubstr(word));
  for (const char* name : {"demo", "bench", "allreduce", "doctor", "calibrate", "roundtrip", "model", "plan", "report"}) {
    const Finished one = run_program(std::string(name) + " --help");
    EXPECT_EQ(one.code, 0) << name;
    EXPECT_THAT(one.out, AllOf(HasSubstr("Examples"), HasSubstr(std::string("gradgate ") + name), HasSubstr("--print-config"))) << name;
    EXPECT_EQ(one.out.find("--json") != std::string::npos, name != std::string("report")) << name << ": a report is a page";
  }
  EXPECT_THAT(run_program("allreduce --help").out, AllOf(HasSubstr("chunk-topk:c/B"), HasSubstr("--minbytes"), HasSubstr("ib-ndr"), HasSubstr("nccl-tests")));
  const Finished version = run_program("--version");
  EXPECT_EQ(version.code, 0);
  EXPECT_THAT(version.out, AllOf(HasSubstr("gradgate "), HasSubstr("compiler"), HasSubstr("\ndevice: "), HasSubstr("\nNCCL: ")));
  const Finished old = run_program("--version", "GRADGATE_NCCL_LIBRARY=" GRADGATE_OLD_NCCL);
  EXPECT_EQ(old.code, 0);
  EXPECT_THAT(old.out, HasSubstr("\nNCCL: NCCL 2.17.1 is too old, accepted: 2.18 or newer\n"));
}

struct Bad {
  const char* arguments;
  const char* names;  ///< what the message must name
};
void PrintTo(const Bad& bad, std::ostream* os) { *os << bad.arguments; }

class BadUsage : public ::testing::TestWithParam<Bad> {};
TEST_P(BadUsage, ExitsWith2AndNamesTheOption) {
  const Finished finished = run_program(GetParam().arguments);
  EXPECT_EQ(finished.code, 2) << finished.out << finished.err;
  EXPECT_THAT(finished.err, AllOf(HasSubstr("gradgate: "), HasSubstr(GetParam().names)));
  EXPECT_THAT(finished.out, IsEmpty()) << "nothing is measured before all options are good";
}
INSTANTIATE_TEST_SUITE_P(
    Sizes, BadUsage,
    ::testing::Values(Bad{"allreduce -b 2k-4m", "-b/--minbytes: '2k-4m'"}, Bad{"allreduce -b 4kb", "'4kb'"}, Bad{"allreduce -b 12junk", "'12junk'"},
                      Bad{"allreduce -b -1", "-b/--minbytes: '-1'"}, Bad{"allreduce -b ''", "minbytes"}, Bad{"allreduce -b ' 8'", "' 8'"}, Bad{"allreduce -b '8 '", "'8 '"},
                      Bad{"allreduce -b 1e309", "'1e309'"}, Bad{"allreduce -b nan", "'nan'"}, Bad{"allreduce -b 1.5", "'1.5'"}, Bad{"allreduce -b 1e30", "too large"},
                      Bad{"allreduce -b 2e13", "outside"}, Bad{"allreduce -e 2k-4m", "-e/--maxbytes"}, Bad{"allreduce -e -1", "-e/--maxbytes"},
                      Bad{"allreduce -i 0", "-i/--stepbytes: '0'"}, Bad{"allreduce -i 1x", "-i/--stepbytes"}, Bad{"allreduce -b 1M -e 1K", "-b/--minbytes"},
                      Bad{"allreduce -b 32M -e 1MB", "greater than -e/--maxbytes"}, Bad{"allreduce -b 0 -e 1M -i 1", "sizes"}, Bad{"bench -b 2k-4m", "-b/--bytes"},
                      Bad{"bench -b -1", "-b/--bytes"}, Bad{"bench -b 4kb", "-b/--bytes"}, Bad{"bench -b ''", "bytes"}, Bad{"bench -b 1e309", "-b/--bytes"}));
INSTANTIATE_TEST_SUITE_P(
    Numbers, BadUsage,
    ::testing::Values(Bad{"allreduce --ranks 0", "-t/--ranks: '0'"}, Bad{"allreduce --ranks 1025", "1 ... 1024"}, Bad{"allreduce --ranks -3", "-t/--ranks"},
                      Bad{"allreduce --ranks four", "-t/--ranks: 'four'"}, Bad{"allreduce --ranks 2.5", "-t/--ranks"}, Bad{"allreduce -n 0", "-n/--iters: '0'"},
                      Bad{"allreduce -n -1", "-n/--iters"}, Bad{"allreduce -n 1e12", "-n/--iters"}, Bad{"allreduce -w x", "-w/--warmup-iters"}, Bad{"allreduce -f 1", "-f/--stepfactor"},
                      Bad{"allreduce -f 2 -i 4K", "-i/--stepbytes and -f/--stepfactor"}, Bad{"allreduce -d double", "-d/--datatype: 'double'"}, Bad{"allreduce --timeout 5", "--timeout"},
                      Bad{"allreduce --timeout 0s", "--timeout"}, Bad{"bench -n 0", "-n/--rounds"}, Bad{"bench --threads 0", "--threads"}, Bad{"bench --threads 1024 -b 4K", "--threads: '1024' is outside 1 ... "}, Bad{"bench --threads 99999999999999999999", "--threads"},
                      Bad{"bench --ranks 0", "--ranks"}, Bad{"bench --floors -d bfloat16", "--floors"}));
INSTANTIATE_TEST_SUITE_P(
    Codecs, BadUsage,
    ::testing::Values(Bad{"allreduce -c int9", "-c/--codec: 'int9'"}, Bad{"allreduce -c ''", "codec"}, Bad{"allreduce -c int8,", "-c/--codec"}, Bad{"allreduce -c int8,int8", "twice"},
                      Bad{"allreduce -c int8:4", "int8"}, Bad{"allreduce -c none:ef", ":ef"}, Bad{"allreduce -c chunk-topk", "c/B"}, Bad{"allreduce -c chunk-topk:0/64", "c is '0'"},
                      Bad{"allreduce -c chunk-topk:65/64", "1 to B = 64"}, Bad{"allreduce -c chunk-topk:1/0", "B is '0'"}, Bad{"allreduce -c chunk-topk:1/-1", "B is '-1'"},
                      Bad{"allreduce -c chunk-topk:1/1", "32 to 32768"}, Bad{"allreduce -c chunk-topk:1/3", "power of two"}, Bad{"allreduce -c chunk-topk:1/2147483648", "B is"},
                      Bad{"allreduce -c chunk-topk:1/18446744073709551616", "B is"}, Bad{"allreduce -c chunk-topk:0.01/64", "c is '0.01'"}, Bad{"allreduce -c chunk-topk:nan/64", "c is 'nan'"},
                      Bad{"allreduce -c chunk-topk:8/1024:f16", "value type"}, Bad{"allreduce -c bf16 -d bfloat16", "does not take bf16"}, Bad{"bench topk", "codec: 'topk'"},
                      Bad{"bench int8 bits:33", "'bits:33'"}, Bad{"roundtrip x.npy -c int8:ef:ef", "int8"}));
INSTANTIATE_TEST_SUITE_P(
    Links, BadUsage,
    ::testing::Values(Bad{"allreduce --link fast", "--link: 'fast'"}, Bad{"allreduce --link 1gbit:50", "--link"}, Bad{"allreduce --link 0gbit", "--link"},
                      Bad{"allreduce --link 1gbit:-1us", "--link"}, Bad{"allreduce --link 1e400gbit", "--link"}, Bad{"allreduce --virtual", "--virtual"},
                      Bad{"allreduce --link 1gbit --codec-rate 1GB/s", "--codec-rate"}, Bad{"allreduce --link 1gbit --virtual --codec-rate 5", "--codec-rate"}));
INSTANTIATE_TEST_SUITE_P(Shape, BadUsage,
                         ::testing::Values(Bad{"", "subcommand"}, Bad{"frobnicate", "frobnicate"}, Bad{"allreduce --frobnicate", "--frobnicate"}, Bad{"allreduce extra", "extra"},
                                           Bad{"allreduce -b", "minbytes"}, Bad{"allreduce -b 1K -b 2K", "minbytes"}, Bad{"roundtrip", "input"}, Bad{"roundtrip x.txt", "gradgate: input: 'x.txt' ends neither in .npy"},
                                           Bad{"roundtrip absent.npy", "absent.npy"}, Bad{"roundtrip x.npy -o y.txt", "-o/--output"},
                                           Bad{"allreduce --config absent.json", "--config: 'absent.json'"}));

TEST(Program, BadEnvironmentNamesTheVariable) {
  for (const auto& [variable, value] : {std::pair{"GRADGATE_RANKS", "true"}, {"GRADGATE_RANKS", "0"}, {"GRADGATE_MINBYTES", "2k-4m"}, {"GRADGATE_LINK", "fast"}, {"GRADGATE_JSON", "yes"}}) {
    const Finished bad = run_program("allreduce -c none -n 1 -w 0", std::string(variable) + "='" + value + "'");
    EXPECT_EQ(bad.code, 2) << variable;
    EXPECT_THAT(bad.err, AllOf(HasSubstr(variable), HasSubstr(value))) << variable;
  }
}

TEST(Program, ConfigurationFilesAreChecked) {
  const std::string path = test_folder() + "/config.json";
  const auto with = [&](const std::string& text, const std::string& arguments = kQuick) {
    std::ofstream(path) << text;
    return run_program("allreduce --config '" + path + "' " + arguments);
  };
  EXPECT_EQ(with(R"({"allreduce": {"warmup-iters": 1}, "bench": {"rounds": 3}})").code, 0);
  for (const auto& [text, names] : {std::pair{R"({"allreduce": {"rank": 4}})", "'rank'"}, {R"({"bench": {"round": 4}})", "'round'"}, {R"({"alreduce": {}})", "'alreduce'"},
                                    {R"({"allreduce": {"timeout": 5}})", "timeout: '5'"}, {R"({"allreduce": {"timeout": [5]}})", "timeout"}, {"{", "config.json"}}) {
    const Finished finished = with(text);
    EXPECT_EQ(finished.code, 2) << text;
    EXPECT_THAT(finished.err, HasSubstr(names)) << text;
  }
}

TEST(Program, PrintConfigShowsEveryValueAndItsSource) {
  const std::string path = test_folder() + "/config.json";
  std::ofstream(path) << R"({"allreduce": {"ranks": 5, "iters": 7, "link": "1gbit"}})";
  const Finished finished = run_program("allreduce --config '" + path + "' --print-config --link 10gbit:5us", "GRADGATE_ITERS=8 GRADGATE_LINK=ib-ndr");
  EXPECT_EQ(finished.code, 0) << finished.err;
  const std::string shown = "\n" + std::regex_replace(finished.out, std::regex(" +="), " =");  // the names' column is as wide as it must be
  EXPECT_THAT(shown, HasSubstr("\nlink = 10gbit:5us  (flag)"));
  EXPECT_THAT(shown, HasSubstr("\niters = 8  (environment GRADGATE_ITERS)"));
  EXPECT_THAT(shown, HasSubstr("\nranks = 5  (file " + path + ")"));
  EXPECT_THAT(shown, HasSubstr("\nwarmup-iters = 2  (default)"));
  EXPECT_THAT(shown, HasSubstr("\nminbytes = 64K  (default)"));
  EXPECT_THAT(shown, HasSubstr("\nstepbytes = (not set)  (default)"));
  EXPECT_THAT(finished.out, Not(HasSubstr("# size"))) << "nothing runs";
}

// A short one: whether the gate is right is a matter of time, and not of this test; that everything is said is.
TEST(Program, TheDemoSaysPerLinkWhatAStepCostsAndWhy) {
  const std::string path = test_folder() + "/demo.json";
  const Finished finished = run_program("demo --quick --steps 20 --ranks 2 --links none,1gbit -J '" + path + "'");
  ASSERT_EQ(finished.code, 0) << finished.err;
  std::vector<std::string> said = {"UCI, CC BY 4.0", "seed 1", "no link: the thread ranks share", "emulated"};
  for (const char* row : {"dense", "bf16", "int8", "chunk-topk:6/1024", "auto"}) said.push_back(std::string("\n  ") + row);
  for (const char* text : {"gradgate: step ", "auto / best fixed choice (", "start-up: ", "=> "}) said.push_back(std::string("\n# ") + text);
  for (const std::string& text : said) EXPECT_THAT(finished.out, HasSubstr(text));
  std::ifstream file(path);
  const nlohmann::json results = strict_json({std::istreambuf_iterator<char>(file), {}})["results"];
  ASSERT_EQ(results["training"].size(), 4u);
  for (const nlohmann::json& training : results["training"]) {
    EXPECT_EQ(training["replicas_equal"], true);
    EXPECT_GT(training["accuracy"].get<double>(), 0.2) << "better than a guess among ten";
    EXPECT_GE(training["ratio"].get<double>(), 1);
  }
  ASSERT_EQ(results["links"].size(), 2u);
  for (const nlohmann::json& link : results["links"]) {
    ASSERT_EQ(link["fixed"].size(), 4u);
    EXPECT_EQ(link["emulated"], link["link"] != "none");
    for (const nlohmann::json& time : {link["fixed"][0], link["fixed"][3], link["auto"]}) {
      EXPECT_LE(time["p10_s"].get<double>(), time["median_s"].get<double>());
      EXPECT_LE(time["median_s"].get<double>(), time["p90_s"].get<double>());
      EXPECT_EQ(time["samples"], 12);
    }
    EXPECT_GT(link["auto_over_best"].get<double>(), 0);
    EXPECT_GT(link["gate_s"].get<double>(), 0);
    EXPECT_EQ(link["replicas_equal"], true);
  }
  const auto median = [&](size_t codec) { return results["links"][1]["fixed"][codec]["median_s"].get<double>(); };
  EXPECT_GE(median(0), 2 * 50e-6 + 994570 * 4 / 125e6) << "the emulated link takes its time";
}

TEST(Program, JsonGoesToAFileBesideTheTable) {
  const std::string path = test_folder() + "/result.json";
  const Finished finished = run_program(std::string("allreduce ") + kQuick + " -J '" + path + "'");
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.out, HasSubstr("# Out of bounds values : 0 OK"));
  std::ifstream file(path);
  const nlohmann::json json = strict_json({std::istreambuf_iterator<char>(file), {}});
  EXPECT_EQ(json["schema"], "gradgate.allreduce/1");
  EXPECT_EQ(json["results"].size(), 2u);
  EXPECT_TRUE(json["machine"].contains("cpu") && json["machine"].contains("cores") && json["machine"].contains("compiler"));
  EXPECT_EQ(json["config"]["ranks"]["source"], "flag");
  EXPECT_EQ(json["argv"][1], "allreduce");
  EXPECT_EQ(run_program(std::string("allreduce ") + kQuick + " -J /absent/result.json").code, 1);
}

TEST(Program, AFullDiskIsAFailure) {
  for (const char* arguments : {"", " --json"}) {
    const Finished finished = run_program(std::string("allreduce ") + kQuick + arguments + " > /dev/full");
    EXPECT_EQ(finished.code, 1) << arguments;
    EXPECT_THAT(finished.err, HasSubstr("standard output"));
  }
}

TEST(Program, TheReferenceNamesEveryOptionAndVariable) {
  std::ifstream file(GRADGATE_SOURCE_DIR "/docs/program.md");
  const std::string reference{std::istreambuf_iterator<char>(file), {}};
  ASSERT_FALSE(reference.empty());
  for (const char* name : {"demo", "bench", "allreduce", "doctor", "calibrate", "roundtrip", "model", "plan", "report"}) {
    const std::string help = run_program(std::string(name) + " --help").out;
    // A section per subcommand; what all have in common stands before the first.
    const size_t begin = reference.find(std::string("\n## gradgate ") + name), end = reference.find("\n## ", begin + 1);
    ASSERT_NE(begin, std::string::npos) << name;
    const std::string section = reference.substr(0, reference.find("\n## gradgate ")) + reference.substr(begin, end == std::string::npos ? end : end - begin);
    for (size_t at = help.find("--"); at != std::string::npos; at = help.find("--", at)) {
      const size_t stop = help.find_first_not_of("abcdefghijklmnopqrstuvwxyz-", at);
      const std::string option = help.substr(at, stop - at);
      at = stop;
      EXPECT_THAT(section, HasSubstr(option)) << name;
      if (option == "--help" || option == "--print-config") continue;
      EXPECT_THAT(section, HasSubstr(environment_name(option.substr(2)))) << name;
    }
  }
}

}  // namespace
}  // namespace gradgate::cli
