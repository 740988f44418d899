// gradgate doctor: the advice as a function of numbers, and the program on links that are given or measured.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "gate/cost.h"
#include "integration/cli/doctor/advise.h"
#include "tests/cli/run_program.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

CodecSpec spec(const char* text) {
  CodecSpec parsed;
  EXPECT_TRUE(parse_codec(text, &parsed, nullptr).ok());
  return parsed;
}

/// 100 M f32 parameters in 4 buckets of 100 MB, 1 Gbit/s and 4 ranks: 1.2 s a dense bucket; a codec 4 times smaller.
DoctorNumbers slow_link() {
  DoctorNumbers n;
  n.parameters = 1e8, n.gradient_bytes = 4e8, n.bucket_bytes = 1e8, n.step_s = 0.3, n.backward_share = 0.5, n.ranks = 4;
  n.dense_s = gate::ring_allreduce(50e-6, 1.25e8, 4, 1e8);
  CodecWork int8{default_candidate(spec("int8")), "int8", 0.02, 0.01, 0.029, 0.032, 0, 2.5e7, 2};
  int8.transfer_s = 2 * gate::ring_pass(50e-6, 1.25e8, 4, 2.5e7);
  n.codecs = {int8};
  return n;
}

TEST(Doctor, TurnsACodecOnWhereItSavesForSure) {
  const Advice advice = advise(slow_link());
  EXPECT_EQ(advice.chosen, 1);
  EXPECT_EQ(advice.buckets, 4u);
  // The wire is never idle from the first bucket on, ready when a quarter of the backward pass is done.
  EXPECT_NEAR(advice.step_dense_s, 0.15 + 0.15 / 4 + 4 * 1.2003, 1e-9);
  // Encoding delays what follows on the compute stream: the first bucket by its own.
  EXPECT_NEAR(advice.step_chosen_s, 0.15 + 0.15 / 4 + 0.02 + 4 * (0.3003 + 0.01), 1e-9);
  EXPECT_NEAR(advice.saving_s, advice.step_dense_s - advice.step_chosen_s, 1e-12);
  EXPECT_LE(advice.saving_low_s, advice.saving_s);
  EXPECT_GE(advice.saving_high_s, advice.saving_s);
  EXPECT_NEAR(advice.serial_saving_s, 4 * (1.2003 - 0.03 - 0.3003), 1e-9);
  EXPECT_NEAR(advice.inflation, advice.step_dense_s / advice.step_chosen_s - 1, 1e-12);
  EXPECT_EQ(advice.residual_bytes, 0);
  EXPECT_THAT(advice.verdict, AllOf(HasSubstr("use int8 (two_shot) on all 4 buckets"), HasSubstr("more steps"),
                                    HasSubstr("no residuals")));
  EXPECT_THAT(advice.reasons[0],
              HasSubstr("T_enc 20.0 + T_dec 10.0 = 30.0 ms < T(M) 1200 - T_two_shot(M/4.00) 300 = 900 ms"));
}

TEST(Doctor, CountsResidualsOfCodecsWithFeedback) {
  DoctorNumbers n = slow_link();
  n.codecs[0].candidate = default_candidate(spec("int8:ef"));
  EXPECT_EQ(advise(n).residual_bytes, 4e8);
  EXPECT_THAT(advise(n).verdict, HasSubstr("381.5 MiB of residuals"));
}

TEST(Doctor, LeavesItOffAndSaysWhy) {
  DoctorNumbers n = slow_link();
  n.codecs[0].encode_s = 1;
  EXPECT_EQ(advise(n).chosen, 0);
  EXPECT_THAT(advise(n).verdict, AllOf(HasSubstr("leave it off: int8 costs 1010 ms"), HasSubstr("900 ms")));

  n = slow_link();  // a step so long that 4.8 s of communication hide behind it, but for the last bucket
  n.step_s = 1000, n.backward_share = 0.9;
  EXPECT_EQ(advise(n).chosen, 0);
  EXPECT_THAT(advise(n).verdict, HasSubstr("hides behind the backward pass"));

  n = slow_link();  // the saving is there in the median, and not at the slow end of the codec
  n.codecs[0].encode_s = 0.6, n.codecs[0].codec_low_s = 0.5, n.codecs[0].codec_high_s = 1.5;
  EXPECT_EQ(advise(n).chosen, 0);
  EXPECT_THAT(advise(n).verdict, HasSubstr("not certain"));

  n = slow_link();
  n.codecs[0].wire_bytes = 2e8;
  EXPECT_EQ(advise(n).chosen, 0);
  EXPECT_THAT(advise(n).verdict, HasSubstr("leave it off"));
  n.codecs.clear();
  EXPECT_THAT(advise(n).verdict, HasSubstr("leave it off"));
  n = slow_link();
  n.ranks = 1, n.dense_s = 0, n.codecs[0].transfer_s = 0;
  EXPECT_THAT(advise(n).verdict, HasSubstr("one rank has nothing to send"));
  n = slow_link();
  n.dense_s = std::nan("");
  EXPECT_EQ(advise(n).chosen, 0);
}

TEST(Doctor, AdvisesForAGivenLink) {
  const std::string slow = "doctor --params 2M --step 20ms --buckets 2MiB -n 2 --ranks 2 --link ";
  const Finished on = run_program(slow + "20mbit:1ms");
  EXPECT_EQ(on.code, 0) << on.err;
  EXPECT_THAT(on.out, AllOf(HasSubstr("gradgate: use int8"), HasSubstr("link as given"), HasSubstr("T(M)")));
  const Finished json = run_program(slow + "20mbit:1ms --json");
  const nlohmann::json advice = strict_json(json.out)["advice"];
  EXPECT_EQ(advice["chosen"], "int8");
  EXPECT_EQ(advice["buckets"], 4);
  EXPECT_GT(advice["saving_s"].get<double>(), 0);
  EXPECT_LE(advice["saving_low_s"].get<double>(), advice["saving_s"].get<double>());
  const Finished gathered = run_program(slow + "20mbit:1ms --json -c int8@all_gather");
  EXPECT_EQ(strict_json(gathered.out)["advice"]["candidates"][0]["exchange"], "all_gather");
  const Finished off = run_program(slow + "100000gbit:0us");
  EXPECT_EQ(off.code, 0) << off.err;
  EXPECT_THAT(off.out, HasSubstr("gradgate: leave it off"));
}

TEST(Doctor, MeasuresTheRanksAndFeedbackNeedsMemory) {
  const Finished measured =
      run_program("doctor --params 500k --dtype bf16 --step 5ms --buckets 256K -n 2 --ranks 2 --json");
  EXPECT_EQ(measured.code, 0) << measured.err;
  EXPECT_TRUE(strict_json(measured.out)["advice"].contains("verdict")) << "whatever this machine is: an answer";
  const Finished sparse = run_program(
      "doctor --params 2M --step 20ms --buckets 2MiB -n 2 --ranks 4 --link 20mbit:1ms -c chunk-topk:8/1024");
  EXPECT_THAT(sparse.out, HasSubstr("7.629 MiB of residuals on each rank"));
}

TEST(Doctor, AForeignProfileIsIgnoredWithOneLine) {
  const std::string path = test_folder() + "/p.json";
  ASSERT_EQ(run_program("calibrate --link 1gbit:50us --virtual -c none -e 1M -n 2 --ranks 4 -o " + path).code, 0);
  const Finished finished =
      run_program("doctor --params 100k --step 5ms --buckets 256K -n 2 --ranks 2 --profile " + path);
  EXPECT_EQ(finished.code, 0) << finished.err;
  EXPECT_THAT(finished.err, AllOf(HasSubstr("world_size is '4' in the profile and '2' here"), HasSubstr("ignored")));
}

TEST(Doctor, BadUsageNamesTheOption) {
  const auto refused = [](const std::string& arguments, const std::string& environment = "") {
    const Finished finished = run_program("doctor " + arguments, environment);
    EXPECT_EQ(finished.code, 2) << arguments;
    return finished.err;
  };
  EXPECT_THAT(refused("--step 1s"), HasSubstr("--params"));
  EXPECT_THAT(refused("--params 1M"), HasSubstr("--step"));
  EXPECT_THAT(refused("--params 0 --step 1s"), HasSubstr("--params"));
  EXPECT_THAT(refused("--params 1M --step 0s"), HasSubstr("--step"));
  EXPECT_THAT(refused("--params 1M --step 1s --backward 150%"), HasSubstr("--backward"));
  EXPECT_THAT(refused("--params 1M --step 1s --buckets 1K"), HasSubstr("--buckets"));
  EXPECT_THAT(refused("--params 1M --step 1s --link 1gbit --profile p.json"), HasSubstr("exclude"));
  EXPECT_THAT(refused("--params 1M --step 1s -c int8@hierarchical"),
              AllOf(HasSubstr("int8@hierarchical"), HasSubstr("two_shot")));
  const std::string torchrun = "RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1";
  EXPECT_THAT(refused("--params 1M --step 1s", torchrun),
              AllOf(HasSubstr("torchrun ... -m gradgate doctor"), HasSubstr("mpirun -n 4")));
}

}  // namespace
}  // namespace gradgate::cli
