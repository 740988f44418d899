// gradgate model from outside. All numbers against exact arithmetic: model_oracle_test.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/cli/run_program.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr const char* kBook = "model --alpha 5us --beta 50GB/s --ranks 256 --bytes 1GB --ratio 64 --codec-time 2ms";

TEST(Model, TheWorkedExampleReadsAsPrinted) {
  const Finished book = run_program(kBook);
  EXPECT_EQ(book.code, 0) << book.err;
  for (const char* printed :
       {"250 kB", "42.4 ms", "320.1 ms", "3.2 ms", "5.2 ms", "8.2x", "39.2 ms", "81.0 ms", "-38.6 ms"}) {
    EXPECT_THAT(book.out, HasSubstr(printed));
  }
  EXPECT_THAT(book.out, AllOf(HasSubstr("LOSES 40.6 ms"), HasSubstr("all_gather"), HasSubstr("exact top-k")));
  const Finished pipeline = run_program(std::string(kBook) + " --pipeline 8,16,4 --bubble 10%");
  EXPECT_THAT(pipeline.out, AllOf(HasSubstr("30.4 %"), HasSubstr("9.9 %"), HasSubstr("micro-batches")));
  EXPECT_THAT(run_program("model --link ib-ndr --ranks 256 --bytes 1GB").out,
              AllOf(HasSubstr("42.4 ms"), Not(HasSubstr("LOSES"))));
}

TEST(Model, JsonHasTheOraclesKeysAndFullPrecision) {
  const nlohmann::json json = strict_json(run_program(std::string(kBook) + " --json").out);
  std::ifstream file(GRADGATE_SOURCE_DIR "/tests/golden/cost_model_golden.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  for (const auto& [key, value] : golden["random_cases"][0].items()) {
    const bool input = key == "alpha" || key == "beta" || key == "N" || key == "M" || key == "r";
    EXPECT_TRUE(input || json.contains(key)) << key;
  }
  EXPECT_EQ(json.size(), 23u);
  EXPECT_DOUBLE_EQ(json["two_shot_exchange"], 0.00317255859375);
  EXPECT_EQ(json["breakeven_ranks_gather"], 123);
  EXPECT_TRUE(json["hierarchical_sharded"].is_null()) << "no nodes were given";
  const nlohmann::json bare =
      strict_json(run_program("model --alpha 5us --beta 50GB/s --ranks 2 --bytes 1GB --json").out);
  EXPECT_EQ(bare.size(), 23u) << "the same keys, whatever was given";
  EXPECT_TRUE(bare["ring_tree_crossover"].is_null());
  EXPECT_TRUE(bare["gather_exchange"].is_null());
  const nlohmann::json one = strict_json(
      run_program("model --alpha 5us --beta 50GB/s --ranks 1 --bytes 1GB --ratio 4 --codec-time 1ms --json").out);
  for (const char* key : {"ring_allreduce", "tree_allreduce", "allgather", "broadcast", "gather_exchange",
                          "two_shot_exchange", "halving_doubling_allreduce_steps"}) {
    EXPECT_EQ(one[key], 0) << key;
  }
  EXPECT_TRUE(one["breakeven_ratio_ring"].is_null());
  const nlohmann::json more =
      strict_json(run_program("model --link ib-ndr --ranks 16 --bytes 1MB --ratio 4 --codec-rate 100GB/s --codec-fixed "
                              "10us --loggp 2us,3us,1us,0.02ns,2us --messages 4 --pipeline 8,16,4 "
                              "--ranks-per-node 8 --intra-link nvlink4 --json")
                      .out);
  for (const char* key : {"breakeven_bytes_ring", "loggp_long", "loggp_train", "bubble", "bubble_interleaved",
                          "hierarchical_sharded", "hierarchical_representative"}) {
    EXPECT_TRUE(more[key].is_number()) << key;
  }
  EXPECT_NEAR(more["loggp_long"].get<double>(), 2e-6 + 3e-6 + 999999 * 2e-11 + 2e-6, 1e-18);
  EXPECT_NEAR(more["bubble"].get<double>(), 7.0 / 23, 1e-15);
}

TEST(Model, QuantitiesInAnyUnitAreTheSame) {
  const std::string want = run_program("model --alpha 17us --beta 50MB/s --ranks 8 --bytes 1MB --json").out;
  EXPECT_EQ(run_program("model --alpha 1.7e-05s --beta 50000000.0B/s --ranks 8 --bytes 1000000.0B --json").out, want);
  EXPECT_EQ(run_program("model --link tcp-10 --alpha 17us --beta 400mbit --ranks 8 --bytes 1e6 --json").out, want)
      << "parts win over the name";
  EXPECT_EQ(
      run_program("model --json", "GRADGATE_ALPHA=17us GRADGATE_BETA=50MB/s GRADGATE_RANKS=8 GRADGATE_BYTES=1MB").out,
      want);
}

TEST(Model, AFileAddsInterconnects) {
  const std::string path = test_folder() + "/links.json";
  std::ofstream(path) << R"({"format": "gradgate-interconnects", "version": 1, "interconnects": [
      {"name": "our-net", "nominal": {"alpha": "5us", "beta": "50GB/s"}, "role": "between nodes", "source": "data sheet"}]})";
  const std::string rest = " --ranks 256 --bytes 1GB --json";
  EXPECT_EQ(run_program("model --link our-net --interconnects '" + path + "'" + rest).out,
            run_program("model --link ib-ndr" + rest).out);
  EXPECT_THAT(run_program("plan --list-links --interconnects '" + path + "'").out,
              AllOf(HasSubstr("our-net"), HasSubstr("nvlink4")));
  std::ofstream(path) << R"({"format": "gradgate-interconnects", "version": 1, "interconnects": [{"nam": "x"}]})";
  const Finished bad = run_program("model --link our-net --interconnects '" + path + "'" + rest);
  EXPECT_EQ(bad.code, 2);
  EXPECT_THAT(bad.err, AllOf(HasSubstr("links.json"), HasSubstr("interconnects[0].name")));
}

TEST(Model, BadUsageNamesOptionValueAndRange) {
  const struct {
    const char *arguments, *names;
  } bad[] = {
      {"--beta 50GB/s --ranks 2 --bytes 1", "--alpha: is missing"},
      {"--alpha 5us --ranks 2 --bytes 1", "--beta: is missing"},
      {"--link ib-ndr --bytes 1", "--ranks: is missing"},
      {"--link ib-ndr --ranks 2", "--bytes: is missing"},
      {"--link fast --ranks 2 --bytes 1", "--link: 'fast'"},
      {"--link ib-ndr --ranks 0 --bytes 1", "--ranks: '0': ranks is 0; expected a whole number, 1 ..."},
      {"--link ib-ndr --ranks 2.5 --bytes 1", "--ranks"},
      {"--link ib-ndr --ranks 1e10 --bytes 1", "1e+09"},
      {"--link ib-ndr --ranks 2 --bytes -1", "--bytes"},
      {"--link ib-ndr --ranks 2 --bytes 1 --alpha -5us", "--alpha: '-5us'"},
      {"--link ib-ndr --ranks 2 --bytes 1 --alpha 1e7s", "alpha is"},
      {"--link ib-ndr --ranks 2 --bytes 1 --beta 0.5B/s", "beta is 0.5 B/s; expected 1 ..."},
      {"--link ib-ndr --ranks 2 --bytes 1 --ratio 0", "ratio is 0"},
      {"--link ib-ndr --ranks 2 --bytes 1 --ratio nan", "--ratio: 'nan'"},
      {"--link ib-ndr --ranks 2 --bytes 1 --codec-time 2", "--codec-time: '2' has no unit"},
      {"--link ib-ndr --ranks 12 --bytes 1 --ranks-per-node 8 --intra-link nvlink4", "a divisor of the 12 ranks"},
      {"--link ib-ndr --ranks 16 --bytes 1 --ranks-per-node 8", "--intra-alpha: is missing"},
      {"--link ib-ndr --ranks 16 --bytes 1 --ranks-per-node 8 --intra-alpha 1us", "--intra-beta: is missing"},
      {"--link ib-ndr --ranks 16 --bytes 1 --intra-link nvlink4", "--ranks-per-node: is missing"},
      {"--link ib-ndr --ranks 2 --bytes 1 --pipeline 8", "--pipeline: '8'"},
      {"--link ib-ndr --ranks 2 --bytes 1 --pipeline 0,16", "stages is 0"},
      {"--link ib-ndr --ranks 2 --bytes 1 --pipeline 8,16,2,1", "--pipeline"},
      {"--link ib-ndr --ranks 2 --bytes 1 --bubble 10%", "--bubble: needs --pipeline"},
      {"--link ib-ndr --ranks 2 --bytes 1 --pipeline 8,16 --bubble 0", "--bubble: '0'"},
      {"--link ib-ndr --ranks 2 --bytes 1 --loggp 1us,2us", "--loggp"},
      {"--link ib-ndr --ranks 2 --bytes 1 --messages 3", "--messages: needs --loggp"},
      {"--link ib-ndr --ranks 2 --bytes 1 --codec-fixed 3us", "--codec-rate: is missing"},
      {"--link ib-ndr --ranks 2 --bytes 1 --interconnects /absent.json", "--interconnects: '/absent.json'"}};
  for (const auto& [arguments, names] : bad) {
    const Finished finished = run_program(std::string("model ") + arguments);
    EXPECT_EQ(finished.code, 2) << arguments << "\n" << finished.out << finished.err;
    EXPECT_THAT(finished.err, HasSubstr(names)) << arguments;
    EXPECT_THAT(finished.out, IsEmpty()) << arguments;
  }
}

}  // namespace
}  // namespace gradgate::cli
