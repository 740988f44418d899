// A session that starts from a calibrated link instead of probing: only where every rank has the same one, for this
// number of ranks.
#include <gmock/gmock.h>

#include "tests/session/session_fixture.h"

namespace gradgate {
namespace {

using namespace test;

LinkProfile gigabit_profile(uint32_t ranks) { return {ranks, kGigabit, kGigabit, kGigabit}; }

/// Creates a session on 3 ranks with profile(rank); returns what rank 0 said, and the virtual seconds of rank 0.
std::pair<Lines, double> create(const std::function<LinkProfile(int)>& profile) {
  std::pair<Lines, double> seen;
  on_ranks(3, &kGigabit, [&](int rank, Communicator& comm) {
    Lines lines;
    const double start = comm.now();
    const auto session = make_session(comm, Mode::automatic, {codec("int8")}, [&](SessionOptions& options) {
      options.profile = profile(rank);
      options.explain = Lines::explain;
      options.explain_context = &lines;
    });
    ASSERT_NE(session, nullptr);
    if (rank == 0) seen = {lines, comm.now() - start};
  });
  return seen;
}

TEST(SessionProfile, ReplacesProbing) {
  const auto [said, seconds] = create([](int) { return gigabit_profile(3); });
  const auto [probed_said, probed] = create([](int) { return LinkProfile{}; });
  EXPECT_LT(seconds, probed / 10) << "no collective is timed";
  EXPECT_TRUE(said.lines.empty()) << said.lines[0];
  EXPECT_TRUE(probed_said.lines.empty()) << probed_said.lines[0];
}

TEST(SessionProfile, IsIgnoredWithOneLineWhereItDoesNotHold) {
  const double probed = create([](int) { return LinkProfile{}; }).second;
  const auto expect_ignored = [&](const std::function<LinkProfile(int)>& profile, const char* why) {
    const auto [said, seconds] = create(profile);
    EXPECT_DOUBLE_EQ(seconds, probed) << "every rank probes: " << why;
    ASSERT_EQ(said.lines.size(), 1u) << why;
    EXPECT_THAT(said.lines[0], testing::HasSubstr(why));
  };
  expect_ignored([](int) { return gigabit_profile(4); }, "4 ranks");
  expect_ignored([](int rank) { return rank == 2 ? LinkProfile{} : gigabit_profile(3); }, "rank 2");
  expect_ignored([](int rank) { return rank == 0 ? LinkProfile{} : gigabit_profile(3); }, "rank 1");
  expect_ignored(
      [](int) {
        LinkProfile profile = gigabit_profile(3);
        profile.all_gather.beta_bytes_per_s = 0;
        return profile;
      },
      "beta");
}

// The same decision as with the link named: a gigabit link and a fast codec.
TEST(SessionProfile, TheGateDecidesByIt) {
  on_ranks(2, &kGigabit, [](int rank, Communicator& comm) {
    const auto session = make_session(comm, Mode::automatic, {codec("int8")},
                                      [](SessionOptions& options) { options.profile = gigabit_profile(2); });
    ASSERT_TRUE(set_simple_layout(*session, {100000}).ok());
    std::vector<float> gradient(100000);
    for (uint64_t step = 0; step < 40; ++step) {
      for (size_t i = 0; i < gradient.size(); ++i) gradient[i] = small_integer(rank, step, i);
      ASSERT_TRUE(session->all_reduce(0, {gradient.data(), gradient.size(), DType::f32}).ok()) << session->last_error();
    }
    EXPECT_EQ(format_codec(session->current(0).codec).text, std::string("int8"));
  });
}

}  // namespace
}  // namespace gradgate
