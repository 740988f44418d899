// Tables, strict JSON, and the bandwidth definitions.
#include "integration/cli/report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "integration/cli/bandwidth.h"
#include "integration/cli/table.h"

namespace gradgate::cli {
namespace {

TEST(Rates, FollowNcclTests) {
  const uint64_t gib = uint64_t{1} << 30;
  const Rates reduce = rates(RateOf::all_reduce, gib, 8, 10e-3);
  EXPECT_NEAR(reduce.algbw_gb_s, 107.374, 5e-4) << "GB is 1e9: 1 GiB in 10 ms is 107.374 GB/s, not 100";
  EXPECT_NEAR(reduce.busbw_gb_s, 187.905, 5e-4) << "times 2·7/8";
  EXPECT_NEAR(rates(RateOf::all_gather, gib, 8, 10e-3).busbw_gb_s, 93.952, 5e-4) << "times 7/8";
  EXPECT_NEAR(rates(RateOf::reduce_scatter, gib, 8, 10e-3).busbw_gb_s, 93.952, 5e-4);
  EXPECT_EQ(rates(RateOf::all_reduce, gib, 1, 10e-3).busbw_gb_s, 0);
  EXPECT_EQ(rates(RateOf::all_reduce, 0, 8, 10e-3).algbw_gb_s, 0);
}

TEST(Rates, AreUndefinedWithoutTime) {
  for (const double seconds : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    const Rates none = rates(RateOf::all_reduce, 1024, 4, seconds);
    EXPECT_TRUE(std::isnan(none.algbw_gb_s) && std::isnan(none.busbw_gb_s)) << seconds;
    EXPECT_TRUE(number(none.algbw_gb_s).is_null());
  }
}

TEST(BreakEven, SolvesTheInequality) {
  // 4 ranks, 64 MB against 16 MB, 36 ms of codec: 1.5 · 48e6 / 0.036 = 2e9 B/s = 16 Gbit/s.
  const double beta = break_even_bandwidth(64000000, 16000000, 4, 0.036);
  EXPECT_NEAR(beta, 2e9, 1);
  // On that link both exchanges take the same time.
  const auto ring = [&](double bytes) { return 1.5 * bytes / beta; };
  EXPECT_NEAR(0.036, ring(64e6) - ring(16e6), 1e-12);
  EXPECT_EQ(break_even_bandwidth(100, 100, 4, 1.0), 0);
  EXPECT_EQ(break_even_bandwidth(100, 200, 4, 1.0), 0);
  EXPECT_EQ(break_even_bandwidth(100, 50, 1, 1.0), 0) << "one rank sends nothing";
  EXPECT_EQ(break_even_bandwidth(100, 50, 4, std::numeric_limits<double>::quiet_NaN()), 0);
  EXPECT_TRUE(std::isinf(break_even_bandwidth(100, 50, 4, 0)));
}

TEST(Table, AlignsAndComments) {
  const Table table({{"size", "B", 8}, {"codec", "", 6, true}, {"time", "us", 6}});
  EXPECT_EQ(table.header(),
            "#     size codec    time\n"
            "#      (B)          (us)\n");
  EXPECT_EQ(table.row({"65536", "int8", "12.3"}), "     65536 int8     12.3\n");
  EXPECT_EQ(table.row({"123456789", "none"}), "  123456789 none\n") << "a long cell is printed whole";
  EXPECT_EQ(comment("one\n\ntwo"), "# one\n#\n# two\n");
  EXPECT_EQ(comment(""), "#\n");
}

TEST(Report, IsStrictJson) {
  const Json json = {{"nan", number(std::nan(""))}, {"inf", number(1.0 / 0.0)}, {"raw", std::nan("")}, {"half", number(0.5)}, {"name", "\xff\xfe"}};
  const Json back = Json::parse(dump(json));  // throws on nan, inf and bad UTF-8
  EXPECT_TRUE(back["nan"].is_null() && back["inf"].is_null() && back["raw"].is_null());
  EXPECT_EQ(back["half"], 0.5);
}

TEST(Report, NamesTheMachineAndTheBuild) {
  const Json machine = machine_json();
  EXPECT_GE(machine["cores"].get<int>(), 1);
  EXPECT_FALSE(machine["cpu"].get<std::string>().empty());
  EXPECT_NE(version_text().find("gradgate "), std::string::npos);
  EXPECT_NE(version_text().find("sanitizers"), std::string::npos);
}

}  // namespace
}  // namespace gradgate::cli
