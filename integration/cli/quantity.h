// Quantities on the command line, in the environment and in configuration files: one parser for all of them. A quantity is a decimal number
// (fraction and exponent allowed, no sign, no blanks) and a unit; the whole text must match. Sizes are computed exactly, in integers. Nothing
// here depends on the locale.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace gradgate::cli {

/// The grammars, as error messages and help texts print them.
inline constexpr const char* kSizeGrammar =
    "a size: a number and B, kB, MB, GB (powers of 1000), KiB, MiB, GiB or K, M, G (powers of 1024), or a plain number of bytes; e.g. 64K, 1.5MiB, 1MB";
inline constexpr const char* kTimeGrammar = "a time: a number and ns, us, ms or s; e.g. 50us, 1.5ms";
inline constexpr const char* kBandwidthGrammar =
    "a bandwidth: a number and B/s, kB/s, MB/s, GB/s (powers of 1000), Mbit/s, Gbit/s, mbit or gbit; e.g. 10gbit, 1.25GB/s";
inline constexpr const char* kCountGrammar = "a whole number, e.g. 4, 1000 or 1e6";

/// Bytes. Throws UsageError naming `option`, the text and the grammar for anything that is not a whole number of bytes below 2^63.
uint64_t parse_size(std::string_view option, std::string_view text);
/// A whole number without a unit, below 2^63.
uint64_t parse_count(std::string_view option, std::string_view text);
/// Seconds, finite and ≥ 0.
double parse_time(std::string_view option, std::string_view text);
/// Bytes per second, finite and > 0.
double parse_bandwidth(std::string_view option, std::string_view text);

/// Throws UsageError unless low ≤ value ≤ high; the message names option, text and range.
void check_range(std::string_view option, std::string_view text, uint64_t value, uint64_t low, uint64_t high);

/// Text for people: "64 KiB", "25.0 MiB", "1000 B".
std::string format_size(uint64_t bytes);
/// "50 us", "1.25 ms", "3 s"; "0 s".
std::string format_time(double seconds);
/// "1 Gbit/s", "125 Mbit/s": links are spoken of in bits.
std::string format_link_rate(double bytes_per_s);
/// "12.3 GB/s".
std::string format_bandwidth(double bytes_per_s);
/// `digits` significant digits, never an exponent for everyday magnitudes, always with a decimal point '.', "n/a" when not finite.
std::string format_number(double value, int digits);

}  // namespace gradgate::cli
