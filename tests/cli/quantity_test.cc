// The quantity grammar: what is accepted has one exact value, everything else is refused with the option's name.
#include "integration/cli/quantity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "integration/cli/error.h"

namespace gradgate::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Size, HasOneExactValue) {
  EXPECT_EQ(parse_size("-b", "0"), 0u);
  EXPECT_EQ(parse_size("-b", "8"), 8u);
  EXPECT_EQ(parse_size("-b", "8B"), 8u);
  EXPECT_EQ(parse_size("-b", "1kB"), 1000u);
  EXPECT_EQ(parse_size("-b", "1MB"), 1000000u);
  EXPECT_EQ(parse_size("-b", "1GB"), 1000000000u);
  EXPECT_EQ(parse_size("-b", "1KiB"), 1024u);
  EXPECT_EQ(parse_size("-b", "1MiB"), 1048576u);
  EXPECT_EQ(parse_size("-b", "1GiB"), 1073741824u);
  EXPECT_EQ(parse_size("-b", "64K"), 65536u);
  EXPECT_EQ(parse_size("-b", "100M"), 104857600u);
  EXPECT_EQ(parse_size("-b", "2G"), 2147483648u);
  EXPECT_EQ(parse_size("-b", "1.5M"), 1572864u);
  EXPECT_EQ(parse_size("-b", "1.1MB"), 1100000u) << "exact in decimal: 1.1e6 in binary floating point is not a whole number";
  EXPECT_EQ(parse_size("-b", "0.29GB"), 290000000u);
  EXPECT_EQ(parse_size("-b", "1e3"), 1000u);
  EXPECT_EQ(parse_size("-b", "1.25e2kB"), 125000u);
  EXPECT_EQ(parse_size("-b", "5e-1K"), 512u);
  EXPECT_EQ(parse_size("-b", "0010"), 10u);
  EXPECT_EQ(parse_size("-b", "9007199254740993"), 9007199254740993u) << "above 2^53";
  EXPECT_EQ(parse_size("-b", "9223372036854775807"), 9223372036854775807u);
  EXPECT_EQ(parse_size("-b", "1.0000000000000000000000000000"), 1u);
  EXPECT_EQ(parse_size("-b", "0e999999999999"), 0u);
}

class BadSize : public ::testing::TestWithParam<const char*> {};
TEST_P(BadSize, IsRefusedWithOptionValueAndGrammar) {
  try {
    const uint64_t value = parse_size("-b/--minbytes", GetParam());
    FAIL() << "'" << GetParam() << "' gave " << value;
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("-b/--minbytes"), HasSubstr(std::string("'") + GetParam() + "'"), HasSubstr("KiB")));
  }
}
INSTANTIATE_TEST_SUITE_P(Texts, BadSize,
                         ::testing::Values("", " ", " 8", "8 ", "8 K", "2k-4m", "4kb", "4k", "12junk", "-1", "+1", "1e309", "1e19", "9223372036854775808",
                                           "18446744073709551616", "99999999999999999999999", "1e99999999999G", "8589934592G", "0.1", "1.5", "0.1K", "1e-1", ".5M", "5.M",
                                           "1,5M", "1_000", "0x10", "inf", "nan", "NaN", "1KB", "1mb", "1TiB", "K", "e3", "1e", "1e+", "1.2.3", "1MiBs", "1M\n",
                                           "1\xc2\xb5"));

TEST(Count, IsAWholeNumberWithoutUnit) {
  EXPECT_EQ(parse_count("-n", "0"), 0u);
  EXPECT_EQ(parse_count("-n", "20"), 20u);
  EXPECT_EQ(parse_count("-n", "1e6"), 1000000u);
  EXPECT_EQ(parse_count("-n", "2.5e1"), 25u);
  for (const char* bad : {"", "-1", "true", "1K", "1.5", "1e-3", "4 ", "1e30", "0x4", "four"}) {
    EXPECT_THROW((void)parse_count("-n", bad), UsageError) << bad;
  }
}

TEST(Time, IsSeconds) {
  EXPECT_EQ(parse_time("--t", "50us"), 50e-6);
  EXPECT_EQ(parse_time("--t", "1.5ms"), 1.5e-3);
  EXPECT_EQ(parse_time("--t", "420ms"), 0.42);
  EXPECT_EQ(parse_time("--t", "1e3ns"), 1e-6);
  EXPECT_EQ(parse_time("--t", "2s"), 2.0);
  EXPECT_EQ(parse_time("--t", "0us"), 0.0);
  for (const char* bad : {"", "5", "5 us", "us", "-5us", "5US", "5m", "5min", "1e309s", "1e-400s", "nans", "infs", "0,5ms", "5us "}) {
    EXPECT_THROW((void)parse_time("--t", bad), UsageError) << bad;
  }
}

TEST(Bandwidth, IsBytesPerSecond) {
  EXPECT_EQ(parse_bandwidth("--link", "1gbit"), 125e6);
  EXPECT_EQ(parse_bandwidth("--link", "10Gbit/s"), 1.25e9);
  EXPECT_EQ(parse_bandwidth("--link", "100mbit"), 12.5e6);
  EXPECT_EQ(parse_bandwidth("--link", "8Mbit/s"), 1e6);
  EXPECT_EQ(parse_bandwidth("--link", "50GB/s"), 50e9);
  EXPECT_EQ(parse_bandwidth("--link", "1.25MB/s"), 1.25e6);
  EXPECT_EQ(parse_bandwidth("--link", "3kB/s"), 3e3);
  EXPECT_EQ(parse_bandwidth("--link", "7B/s"), 7.0);
  for (const char* bad : {"", "1", "1gb", "1Gb/s", "1GiB/s", "1Gbit", "0gbit", "-1gbit", "1e308GB/s", "1e400gbit", "gbit", "1gbit ", "1 gbit"}) {
    EXPECT_THROW((void)parse_bandwidth("--link", bad), UsageError) << bad;
  }
}

TEST(Range, NamesOptionValueAndLimits) {
  EXPECT_NO_THROW(check_range("--ranks", "1", 1, 1, 64));
  EXPECT_NO_THROW(check_range("--ranks", "64", 64, 1, 64));
  for (const uint64_t value : {uint64_t{0}, uint64_t{65}}) {
    try {
      check_range("--ranks", std::to_string(value), value, 1, 64);
      FAIL() << value;
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("--ranks"), HasSubstr("'" + std::to_string(value) + "'"), HasSubstr("1 ... 64")));
    }
  }
}

TEST(Number, HasNoUnit) {
  EXPECT_EQ(parse_number("--ratio", "64"), 64.0);
  EXPECT_EQ(parse_number("--ratio", "3.94"), 3.94);
  EXPECT_EQ(parse_number("--ratio", "1e3"), 1000.0);
  for (const char* bad : {"", "64x", "-1", "nan", "inf", "1e309", "1 ", ".5"}) EXPECT_THROW((void)parse_number("--ratio", bad), UsageError) << bad;
  EXPECT_EQ(parse_share("--bubble", "0.1"), 0.1);
  EXPECT_EQ(parse_share("--bubble", "10%"), 0.1);
  EXPECT_EQ(parse_share("--bubble", "100%"), 1.0);
  for (const char* bad : {"", "0", "0%", "101%", "1.5", "10 %", "-5%"}) EXPECT_THROW((void)parse_share("--bubble", bad), UsageError) << bad;
}

TEST(Parameters, ArePowersOfThousand) {
  EXPECT_EQ(parse_parameters("--params", "350M"), 350000000u);
  EXPECT_EQ(parse_parameters("--params", "1.5B"), 1500000000u);
  EXPECT_EQ(parse_parameters("--params", "7e9"), 7000000000u);
  EXPECT_EQ(parse_parameters("--params", "12k"), 12000u);
  for (const char* bad : {"", "350m", "350MB", "1.0001k", "1e30", "-1M", "M"}) EXPECT_THROW((void)parse_parameters("--params", bad), UsageError) << bad;
}

TEST(Range, IsAListOrGrowsByAFactor) {
  using ::testing::ElementsAre;
  const auto counts = [](const char* text) { return parse_range("--ranks", text, 2, parse_count); };
  EXPECT_THAT(counts("8"), ElementsAre(8u));
  EXPECT_THAT(counts("8..64"), ElementsAre(8u, 16u, 32u, 64u));
  EXPECT_THAT(counts("3..20"), ElementsAre(3u, 6u, 12u, 20u)) << "both ends belong to it";
  EXPECT_THAT(counts("1..100*10"), ElementsAre(1u, 10u, 100u));
  EXPECT_THAT(counts("4,6,9"), ElementsAre(4u, 6u, 9u));
  EXPECT_THAT(counts("7..7"), ElementsAre(7u));
  EXPECT_THAT(parse_range("--bytes", "1MB..1GB", 10, parse_size), ElementsAre(1000000u, 10000000u, 100000000u, 1000000000u));
  EXPECT_EQ(parse_range("--bytes", "1..9223372036854775807", 2, parse_size).size(), 64u);
  for (const char* bad : {"", "8..", "..8", "64..8", "0..8", "8..64*1", "8..64*", "8,", ",8", "8,8", "9,8", "8...64", "8..64..2", "1..1000*1.5", "x..8", "-1..8"}) {
    EXPECT_THROW((void)counts(bad), UsageError) << bad;
  }
  EXPECT_THROW((void)parse_range("--ranks", "1..9223372036854775807*2,3", 2, parse_count), UsageError);
}

TEST(Format, ReadsWell) {
  EXPECT_EQ(format_decimal_size(250e3), "250 kB");
  EXPECT_EQ(format_decimal_size(15.625e6), "15.62 MB") << "half to even";
  EXPECT_EQ(format_decimal_size(1e9), "1 GB");
  EXPECT_EQ(format_decimal_size(0), "0 B");
  EXPECT_EQ(format_decimal_size(std::numeric_limits<double>::quiet_NaN()), "n/a");
  EXPECT_EQ(format_tenths(0.04239375), "42.4 ms");
  EXPECT_EQ(format_tenths(0.32008), "320.1 ms");
  EXPECT_EQ(format_tenths(-0.03856875), "-38.6 ms");
  EXPECT_EQ(format_tenths(5e-6), "5.0 us");
  EXPECT_EQ(format_tenths(0), "0.0 s");
  EXPECT_EQ(format_size(0), "0 B");
  EXPECT_EQ(format_size(1023), "1023 B");
  EXPECT_EQ(format_size(65536), "64 KiB");
  EXPECT_EQ(format_size(26214400), "25 MiB");
  EXPECT_EQ(format_size(1610612736), "1.5 GiB");
  EXPECT_EQ(format_time(0), "0 s");
  EXPECT_EQ(format_time(50e-6), "50 us");
  EXPECT_EQ(format_time(1.25e-3), "1.25 ms");
  EXPECT_EQ(format_time(2e-9), "2 ns");
  EXPECT_EQ(format_link_rate(125e6), "1 Gbit/s");
  EXPECT_EQ(format_link_rate(12.5e6), "100 Mbit/s");
  EXPECT_EQ(format_bandwidth(1.25e9), "1.25 GB/s");
  EXPECT_EQ(format_number(1234.5, 3), "1234") << "half to even";
  EXPECT_EQ(format_number(12.345, 3), "12.3");
  EXPECT_EQ(format_number(0.0123, 3), "0.0123");
  EXPECT_EQ(format_number(0.0, 3), "0.00");
  EXPECT_EQ(format_number(1e-9, 3), "1.00e-09");
  EXPECT_EQ(format_number(std::numeric_limits<double>::quiet_NaN(), 3), "n/a");
  EXPECT_EQ(format_number(std::numeric_limits<double>::infinity(), 3), "n/a");
}

}  // namespace
}  // namespace gradgate::cli
