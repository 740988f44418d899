// gradgate under mpirun: one table, one error message, and an end with a message when a rank dies or hangs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/cli/run_program.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kEnvironment =
    "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 ";

/// `before` is shell text that replaces itself with the program: "" or "sh -c '… exec \"$@\"' sh".
Finished mpirun(int ranks, const std::string& arguments, const std::string& before = "") {
  return run_command(kEnvironment + std::string("'" GRADGATE_MPIEXEC "' -n ") + std::to_string(ranks) + " " + before +
                     " '" GRADGATE_PROGRAM "' " + arguments);
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++found;
  return found;
}

TEST(Mpirun, PrintsOneVerifiedTable) {
  for (const int ranks : {2, 3, 4}) {
    const Finished finished =
        mpirun(ranks, "allreduce -c none,bf16,int8,chunk-topk:8/1024 -b 4K -e 1M -f 16 -n 2 -w 1");
    EXPECT_EQ(finished.code, 0) << finished.err << finished.out;
    EXPECT_THAT(finished.out, HasSubstr(std::to_string(ranks) + " MPI ranks"));
    EXPECT_EQ(count(finished.out, "# Out of bounds values : 0 OK"), 1u) << finished.out;
    EXPECT_EQ(count(finished.out, "\n "), 3u * 4u) << "3 sizes of 4 codecs: " << finished.out;
  }
}

TEST(Mpirun, WritesOneStrictJsonWithTheRanksOfTheJob) {
  const std::string path = test_folder() + "/result.json";
  const Finished finished = mpirun(3, "allreduce -c none,int8 -b 64K -e 64K -n 3 --json -J " + path);
  EXPECT_EQ(finished.code, 0) << finished.err;
  const nlohmann::json json = strict_json(finished.out);
  EXPECT_EQ(json["results"].size(), 2u);
  EXPECT_EQ(json["results"][0]["ranks"], 3);
  EXPECT_EQ(json["summary"]["out_of_bounds"], 0);
  std::ifstream file(path);
  EXPECT_EQ(nlohmann::json::parse(file), json);
}

TEST(Mpirun, AnEmulatedLinkWorksOverProcessesToo) {
  const std::string arguments =
      "allreduce --json -c none,int8 -b 1000000 -e 1000000 --link 1gbit:50us --virtual -n 2 -w 0";
  const nlohmann::json processes = strict_json(mpirun(4, arguments).out),
                       threads = strict_json(run_program(arguments + " --ranks 4").out);
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(processes["results"][i]["times_us"], threads["results"][i]["times_us"]);
}

TEST(Mpirun, CalibratesAndWritesOneProfile) {
  const std::string path = test_folder() + "/profile.json";
  const Finished finished =
      mpirun(3, "calibrate --link 1gbit:50us --virtual -e 1M -n 2 -c bf16 --buckets 64K -o " + path);
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(count(finished.out, "# all_reduce: alpha 50 us, beta 0.125 GB/s"), 1u) << finished.out;
  std::ifstream file(path);
  const nlohmann::json profile = nlohmann::json::parse(file);
  EXPECT_EQ(profile["key"]["backend"], "mpi");
  EXPECT_EQ(profile["key"]["world_size"], 3);
}

TEST(Mpirun, TheDoctorGivesOneVerdict) {
  const Finished finished = mpirun(3, "doctor --params 2M --step 20ms --buckets 1MiB -n 2 --link 20mbit:1ms");
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_EQ(count(finished.out, "gradgate: use int8"), 1u) << finished.out;
  EXPECT_THAT(finished.out, HasSubstr("3 MPI ranks"));
}

TEST(Mpirun, OneRankIsARunOfOne) {
  const Finished finished = mpirun(1, "allreduce -c none,int8 -b 4K -e 4K -n 1");
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.out, HasSubstr("1 MPI rank,"));
}

TEST(Mpirun, AMistakeIsSaidOnce) {
  const Finished ranks = mpirun(2, "allreduce --ranks 3");
  EXPECT_EQ(ranks.code, 2) << ranks.err;
  EXPECT_EQ(count(ranks.err, "gradgate: -t/--ranks: 3, but the MPI launcher started 2"), 1u) << ranks.err;
  const Finished alone = mpirun(2, "demo --quick");
  EXPECT_EQ(alone.code, 2) << alone.err;
  EXPECT_EQ(count(alone.err, "gradgate: demo "), 1u) << alone.err;
  EXPECT_THAT(alone.err, HasSubstr("allreduce"));
}

// The rank that writes 'marker' kills or stops itself some way into the run.
std::string with_rank_one(const std::string& action) {
  return "sh -c 'if [ \"$OMPI_COMM_WORLD_RANK\" = 1 ]; then (sleep 1; " + action + " $$) & fi; exec \"$@\"' sh";
}
constexpr const char* kLong = "allreduce -c none,int8 -b 64K -e 64K -n 1000000 --timeout 1s";

TEST(Mpirun, AKilledRankEndsTheJob) {
  const Finished finished = mpirun(3, kLong, with_rank_one("kill -9"));
  EXPECT_NE(finished.code, 0);
  EXPECT_THAT(finished.err, AllOf(HasSubstr("rank 1"), HasSubstr("signal 9"))) << "mpirun says which rank";
}

TEST(Mpirun, AStoppedRankEndsTheJobAfterTheDeadlineByName) {
  const Finished finished = mpirun(3, kLong, with_rank_one("kill -STOP"));
  EXPECT_NE(finished.code, 0);
  EXPECT_THAT(finished.err, AllOf(HasSubstr("gradgate: "), HasSubstr("timeout after 1."))) << finished.err;
}

}  // namespace
}  // namespace gradgate::cli
