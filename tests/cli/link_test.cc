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
    EXPECT_EQ(link.link.alpha_s, known.nominal.alpha_s) << known.name;
    EXPECT_THAT(link_grammar(), HasSubstr(known.name));
    EXPECT_THAT(describe_link(link), HasSubstr("(emulated)"));
  }
  EXPECT_EQ(parse_link("--link", "ib-ndr").link.beta_bytes_per_s, 50e9);
  EXPECT_EQ(parse_link("--link", "ib-ndr:2us").link.alpha_s, 2e-6);
}

TEST(Link, NominalAndEffectiveNumbersAreSelected) {
  for (const gate::Interconnect& known : gate::kInterconnects) {
    const std::string name = known.name;
    EXPECT_EQ(parse_link("--link", name + ":nominal").link.beta_bytes_per_s, known.nominal.beta_Bps);
    EXPECT_EQ(parse_link("--link", name + ":effective").link.beta_bytes_per_s, known.effective.beta_Bps);
    EXPECT_EQ(parse_link("--link", name + ":effective").link.alpha_s, known.effective.alpha_s);
    EXPECT_EQ(parse_link("--link", name + ":effective:3us").link.alpha_s, 3e-6);
  }
}

TEST(Link, AFileExtendsTheTable) {
  const std::string good = R"({"format": "gradgate-interconnects", "version": 1, "interconnects": [
      {"name": "our-net", "nominal": {"alpha": "8us", "beta": "200gbit"}, "role": "between nodes", "source": "data sheet",
       "effective": {"alpha": "12us", "beta": "21GB/s"}, "effective_source": "measured in May"},
      {"name": "lan2", "nominal": {"alpha": "1.7e-05s", "beta": "50000000.0B/s"}, "role": "LAN", "source": "guess"}]})";
  const LinkTable table = parse_link_table("n.json", good);
  EXPECT_EQ(table.size(), gate::kInterconnectCount + 2);
  EXPECT_EQ(parse_link("--link", "our-net", table).link.beta_bytes_per_s, 25e9);
  EXPECT_EQ(parse_link("--link", "our-net:effective", table).link.alpha_s, 12e-6);
  EXPECT_EQ(parse_link("--link", "lan2:effective", table).link.beta_bytes_per_s, 50e6) << "nominal where nothing is said";
  EXPECT_EQ(parse_link("--link", "ib-ndr", table).link.beta_bytes_per_s, 50e9);
  EXPECT_THAT(link_table_text(table), AllOf(HasSubstr("our-net"), HasSubstr("measured in May"), HasSubstr("nvlink4")));
  EXPECT_EQ(link_table_json(table).size(), table.size());
  EXPECT_THROW((void)parse_link("--link", "our-net"), UsageError);

  const auto refusal = [&](const std::string& from, const std::string& to) -> std::string {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    try {
      (void)parse_link_table("n.json", text);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  };
  const struct {
    const char *from, *to, *key;
  } bad[] = {{"\"our-net\"", "\"ib-ndr\"", "interconnects[0].name: 'ib-ndr' is taken"},
             {"\"our-net\"", "\"Our Net\"", "interconnects[0].name"},
             {"\"our-net\"", "\"1gbit\"", "interconnects[0].name"},
             {"\"lan2\"", "\"our-net\"", "interconnects[1].name: 'our-net' is taken"},
             {"8us", "8", "n.json: interconnects[0].nominal.alpha: '8' has no unit"},
             {"200gbit", "0gbit", "interconnects[0].nominal.beta"},
             {"\"role\": \"LAN\"", "\"rule\": \"LAN\"", "interconnects[1].role: is missing"},
             {"\"role\": \"LAN\"", "\"role\": \"LAN\", \"x\": 1", "interconnects[1].x: is an unknown key"},
             {", \"effective_source\": \"measured in May\"", "", "interconnects[0].effective_source"},
             {"\"version\": 1", "\"version\": 2", "version"},
             {"gradgate-interconnects", "gradgate-profile", "format"}};
  for (const auto& [from, to, key] : bad) EXPECT_THAT(refusal(from, to), AllOf(HasSubstr("n.json: "), HasSubstr(key)));
}

TEST(Link, AnythingElseIsRefusedByName) {
  for (const char* bad : {"", ":", "1gbit:", ":50us", "1gbit:50", "1gbit:50us:1", "gbit", "fast", "ib-ndr ", "0gbit", "1gbit,50us", "IB-NDR", "1gbit:-1us", "ib-ndr:typical", "ib-ndr:effective:", "ib-ndr:effective:1us:2us", "1gbit:effective"}) {
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
