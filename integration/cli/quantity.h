// Quantities on the command line, in the environment and in configuration files: one parser for all of them. A quantity is a decimal number
// (fraction and exponent allowed, no sign, no blanks) and a unit; the whole text must match. Sizes are computed exactly, in integers. Nothing
// here depends on the locale.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gradgate::cli {

/// The grammars, as error messages and help texts print them.
inline constexpr const char* kSizeGrammar =
    "a size: a number and B, kB, MB, GB (powers of 1000), KiB, MiB, GiB or K, M, G (powers of 1024), or a plain number of bytes; e.g. 64K, 1.5MiB, 1MB";
inline constexpr const char* kTimeGrammar = "a time: a number and ns, us, ms or s; e.g. 50us, 1.5ms";
inline constexpr const char* kBandwidthGrammar =
    "a bandwidth: a number and B/s, kB/s, MB/s, GB/s (powers of 1000), Mbit/s, Gbit/s, mbit or gbit; e.g. 10gbit, 1.25GB/s";
inline constexpr const char* kCountGrammar = "a whole number, e.g. 4, 1000 or 1e6";
inline constexpr const char* kNumberGrammar = "a number, e.g. 64, 3.94 or 1e3";
inline constexpr const char* kShareGrammar = "a share above 0 and up to 1, or a percentage: 0.1 or 10%";
inline constexpr const char* kParametersGrammar = "a number of parameters: a number and k, M or B (powers of 1000), or a plain number; e.g. 350M, 1.5B";

/// Bytes. Throws UsageError naming `option`, the text and the grammar for anything that is not a whole number of bytes below 2^63.
uint64_t parse_size(std::string_view option, std::string_view text);
/// A whole number without a unit, below 2^63.
uint64_t parse_count(std::string_view option, std::string_view text);
/// Seconds, finite and ≥ 0.
double parse_time(std::string_view option, std::string_view text);
/// Bytes per second, finite and > 0.
double parse_bandwidth(std::string_view option, std::string_view text);

/// A decimal number without a unit, finite and ≥ 0.
double parse_number(std::string_view option, std::string_view text);
/// "0.1" or "10%": above 0 and at most 1.
double parse_share(std::string_view option, std::string_view text);
/// "350M", "1.5B", "7e9": a whole number below 2^63; k, M and B are 10^3, 10^6 and 10^9, as models are spoken of.
uint64_t parse_parameters(std::string_view option, std::string_view text);
/// The values of "8..1024" (both ends, and in between times `factor`), of "8..1024*4" (times 4), and of the list "8,12,64" (ascending). Each value goes
/// through `parse`, one of the parsers above; at most 64 values.
std::vector<uint64_t> parse_range(const std::string& option, const std::string& text, uint64_t factor,
                                  uint64_t (*parse)(std::string_view option, std::string_view text));

/// Throws UsageError unless low ≤ value ≤ high; the message names option, text and range.
void check_range(std::string_view option, std::string_view text, uint64_t value, uint64_t low, uint64_t high);

/// Text for people: "64 KiB", "25.0 MiB", "1000 B".
std::string format_size(uint64_t bytes);
/// "250 kB", "1 GB", "15.63 MB": powers of 1000, as links are spoken of; any finite value.
std::string format_decimal_size(double bytes);
/// "42.4 ms", "320.1 ms", "-38.6 ms", "5.0 us": one decimal.
std::string format_tenths(double seconds);
/// "50 us", "1.25 ms", "3 s"; "0 s".
std::string format_time(double seconds);
/// "1 Gbit/s", "125 Mbit/s": links are spoken of in bits.
std::string format_link_rate(double bytes_per_s);
/// "12.3 GB/s".
std::string format_bandwidth(double bytes_per_s);
/// `digits` significant digits, never an exponent for everyday magnitudes, always with a decimal point '.', "n/a" when not finite.
std::string format_number(double value, int digits);

}  // namespace gradgate::cli
