// gradgate report: the page holds the records, and lines that are none are named.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "tests/cli/run_program.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string contents(const std::string& path) {
  std::ostringstream all;
  all << std::ifstream(path).rdbuf();
  return all.str();
}

TEST(Report, EmbedsTheRecordsAndNothingElseChanges) {
  const std::string folder = test_folder(), log = folder + "/run.jsonl", page = folder + "/page.html";
  std::ofstream(log) << R"({"v":1,"event":"start","step":0,"epoch":0,"mode":"auto","ranks":2,"buckets":1,)"
                     << R"("candidates":["int8</script>"]})"
                     << "\n\n"
                     << R"({"v":1,"event":"hold","step":42,"epoch":1,"steps":64,"saved_s":1.5})"
                     << "\n";
  const Finished run = run_program("report '" + log + "' -o '" + page + "'");
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("2 records"));
  const std::string html = contents(page);
  EXPECT_THAT(html,
              AllOf(HasSubstr("<!doctype html>"), HasSubstr("\"saved_s\":1.5"), HasSubstr("int8\\u003c/script>")));
  EXPECT_EQ(html.find("GRADGATE_RECORDS"), std::string::npos);
  EXPECT_EQ(html.find("int8</script>"), std::string::npos);
}

TEST(Report, NamesTheLineThatIsNoRecord) {
  const std::string log = test_folder() + "/run.jsonl";
  const std::string good = R"({"v":1,"event":"start","step":0})";
  for (const char* bad : {"{", "[]", "3", R"({"event":"start"})", R"({"v":2,"event":"start"})", R"({"v":1})"}) {
    std::ofstream(log) << good << "\n" << bad << "\n";
    const Finished run = run_program("report '" + log + "' -o '" + log + ".html'");
    EXPECT_EQ(run.code, 2) << bad;
    EXPECT_THAT(run.err, AllOf(HasSubstr("line 2"), HasSubstr("decision log"))) << bad;
  }
  std::ofstream(log) << "";
  EXPECT_THAT(run_program("report '" + log + "'").err, HasSubstr("no records"));
  EXPECT_EQ(run_program("report /nowhere.jsonl").code, 2);
}

}  // namespace
}  // namespace gradgate::cli
