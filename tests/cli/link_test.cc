// Links as users write them.
#include "integration/cli/link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gate/interconnects.h"
#include "integration/cli/error.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Link, BandwidthAndLatency) {
  const NamedLink link = parse_link("--link", "1gbit:50us");
  EXPECT_EQ(link.link.beta_bytes_per_s, 125e6);
  EXPECT_EQ(link.link.alpha_s, 50e-6);
  EXPECT_EQ(describe_link(link), "1gbit:50us = 1 Gbit/s, 50 us per message (emulated)");
  EXPECT_EQ(parse_link("--link", "10gbit").link.alpha_s, kDefaultAlphaS);
  EXPECT_EQ(parse_link("--link", "1.25GB/s:0us").link.alpha_s, 0.0);
}

TEST(Link, EveryNamedInterconnectIsAccepted) {
  for (const gate::Interconnect& known : gate::kInterconnects) {
    const NamedLink link = parse_link("--link", known.name);
    EXPECT_GT(link.link.beta_bytes_per_s, 0) << known.name;
    EXPECT_EQ(link.link.alpha_s, known.link.alpha_s) << known.name;
    EXPECT_THAT(link_grammar(), HasSubstr(known.name));
    EXPECT_THAT(describe_link(link), HasSubstr("(emulated)"));
  }
  EXPECT_EQ(parse_link("--link", "ib-ndr").link.beta_bytes_per_s, 50e9);
  EXPECT_EQ(parse_link("--link", "ib-ndr:2us").link.alpha_s, 2e-6);
}

TEST(Link, AnythingElseIsRefusedByName) {
  for (const char* bad : {"", ":", "1gbit:", ":50us", "1gbit:50", "1gbit:50us:1", "gbit", "fast", "ib-ndr ", "0gbit", "1gbit,50us", "IB-NDR", "1gbit:-1us"}) {
    try {
      (void)parse_link("--link", bad);
      FAIL() << bad;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("--link")) << bad;
      EXPECT_THAT(error.what(), HasSubstr("expected")) << bad;
    }
  }
}

}  // namespace
}  // namespace gradgate::cli
