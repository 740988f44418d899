#include "integration/cli/quantity.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <span>
#include <system_error>
#include <utility>

#include "integration/cli/error.h"

namespace gradgate::cli {
namespace {

// The number at the start of a quantity, as written and as mantissa · 10^exponent with at most 19 significant digits, which fit in 64 bits.
struct Decimal {
  std::string_view text;
  uint64_t mantissa = 0;
  int exponent = 0;
  bool exact = true;  // false: more digits than a 64-bit integer holds
};

constexpr uint64_t kLargest = uint64_t{1} << 63;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// digits [ "." digits ] [ ("e"|"E") [ "+"|"-" ] digits ]. False when the text does not start with one. `rest` is the unit.
bool read_decimal(std::string_view text, Decimal* number, std::string_view* rest) {
  size_t i = 0;
  int significant = 0, dropped = 0, fraction = 0;
  uint64_t mantissa = 0;
  bool exact = true;
  const auto take = [&](char c) {
    if (significant == 0 && c == '0') return true;  // leading zeros carry no information
    if (significant == 19) {
      if (c != '0') exact = false;
      return false;
    }
    mantissa = mantissa * 10 + static_cast<uint64_t>(c - '0');
    ++significant;
    return true;
  };
  while (i < text.size() && is_digit(text[i])) {
    if (!take(text[i])) ++dropped;
    ++i;
  }
  if (i == 0) return false;
  if (i + 1 < text.size() && text[i] == '.' && is_digit(text[i + 1])) {
    for (++i; i < text.size() && is_digit(text[i]); ++i) {
      if (take(text[i])) ++fraction;
    }
  }
  int exponent = 0;
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    size_t j = i + 1;
    const bool negative = j < text.size() && text[j] == '-';
    if (j < text.size() && (text[j] == '-' || text[j] == '+')) ++j;
    if (j < text.size() && is_digit(text[j])) {
      for (; j < text.size() && is_digit(text[j]); ++j) {
        if (exponent < 100000) exponent = exponent * 10 + (text[j] - '0');
      }
      if (negative) exponent = -exponent;
      i = j;
    }
  }
  number->text = text.substr(0, i);
  number->mantissa = mantissa;
  number->exponent = exponent + dropped - fraction;
  number->exact = exact;
  *rest = text.substr(i);
  return true;
}

[[noreturn]] void fail(std::string_view option, std::string_view text, const std::string& why, const char* grammar) {
  throw UsageError(std::string(option) + ": '" + std::string(text) + "' " + why + "; expected " + grammar);
}

// mantissa · 10^exponent · unit as an integer, or why not.
const char* whole_number(const Decimal& number, uint64_t unit, uint64_t* value) {
  using Wide = unsigned __int128;
  if (number.mantissa == 0) {
    *value = 0;
    return nullptr;
  }
  if (!number.exact) return number.exponent >= 0 ? "is too large" : "has too many digits";
  Wide product = static_cast<Wide>(number.mantissa) * unit;  // < 10^19 · 2^30, fits
  for (int i = 0; i < number.exponent; ++i) {
    product *= 10;
    if (product >= kLargest) return "is too large";
  }
  for (int i = 0; i < -number.exponent; ++i) {
    if (product % 10 != 0) return "is not a whole number";
    product /= 10;
  }
  if (product >= kLargest) return "is too large";
  *value = static_cast<uint64_t>(product);
  return nullptr;
}

struct Unit {
  std::string_view name;
  double factor;       // the value in base units is number · factor …
  double divisor = 1;  // … / divisor: powers of ten below one are exact only as divisors
};

constexpr Unit kTimeUnits[] = {{"ns", 1, 1e9}, {"us", 1, 1e6}, {"ms", 1, 1e3}, {"s", 1}};
constexpr Unit kBandwidthUnits[] = {{"B/s", 1},          {"kB/s", 1e3},       {"MB/s", 1e6},     {"GB/s", 1e9},
                                    {"Mbit/s", 1e6, 8}, {"Gbit/s", 1e9, 8}, {"mbit", 1e6, 8}, {"gbit", 1e9, 8}};

double parse_real(std::string_view option, std::string_view text, std::span<const Unit> units, const char* grammar) {
  Decimal number;
  std::string_view rest;
  if (!read_decimal(text, &number, &rest)) fail(option, text, text.empty() ? "is empty" : "does not start with a number", grammar);
  for (const Unit& unit : units) {
    if (unit.name != rest) continue;
    double value = 0;
    const auto [end, error] = std::from_chars(number.text.data(), number.text.data() + number.text.size(), value);
    if (error != std::errc{} || end != number.text.data() + number.text.size()) fail(option, text, "is out of range", grammar);
    value = value * unit.factor / unit.divisor;
    if (!std::isfinite(value)) fail(option, text, "is out of range", grammar);
    return value;
  }
  fail(option, text, rest.empty() ? "has no unit" : "has the unknown unit '" + std::string(rest) + "'", grammar);
}

struct WholeUnit {
  std::string_view name;
  uint64_t factor;
};

uint64_t parse_whole(std::string_view option, std::string_view text, std::span<const WholeUnit> units, const char* grammar) {
  Decimal number;
  std::string_view rest;
  if (!read_decimal(text, &number, &rest)) fail(option, text, text.empty() ? "is empty" : "does not start with a number", grammar);
  for (const WholeUnit& unit : units) {
    if (unit.name != rest) continue;
    uint64_t value = 0;
    if (const char* why = whole_number(number, unit.factor, &value)) fail(option, text, why, grammar);
    return value;
  }
  fail(option, text, "has the unknown unit '" + std::string(rest) + "'", grammar);
}

constexpr size_t kMostValues = 64;

std::string with_unit(double value, int digits, const char* unit) { return format_number(value, digits) + " " + unit; }

}  // namespace

uint64_t parse_size(std::string_view option, std::string_view text) {
  static constexpr WholeUnit kUnits[] = {{"", 1},
                                         {"B", 1},
                                         {"kB", 1000},
                                         {"MB", 1000000},
                                         {"GB", 1000000000},
                                         {"KiB", 1u << 10},
                                         {"MiB", 1u << 20},
                                         {"GiB", 1u << 30},
                                         {"K", 1u << 10},
                                         {"M", 1u << 20},
                                         {"G", 1u << 30}};
  return parse_whole(option, text, kUnits, kSizeGrammar);
}

uint64_t parse_parameters(std::string_view option, std::string_view text) {
  static constexpr WholeUnit kUnits[] = {{"", 1}, {"k", 1000}, {"M", 1000000}, {"B", 1000000000}};
  return parse_whole(option, text, kUnits, kParametersGrammar);
}

uint64_t parse_count(std::string_view option, std::string_view text) {
  Decimal number;
  std::string_view rest;
  if (!read_decimal(text, &number, &rest)) fail(option, text, text.empty() ? "is empty" : "does not start with a number", kCountGrammar);
  if (!rest.empty()) fail(option, text, "has '" + std::string(rest) + "' after the number", kCountGrammar);
  uint64_t value = 0;
  if (const char* why = whole_number(number, 1, &value)) fail(option, text, why, kCountGrammar);
  return value;
}

double parse_time(std::string_view option, std::string_view text) { return parse_real(option, text, kTimeUnits, kTimeGrammar); }

double parse_bandwidth(std::string_view option, std::string_view text) {
  const double value = parse_real(option, text, kBandwidthUnits, kBandwidthGrammar);
  if (value <= 0) fail(option, text, "is not above zero", kBandwidthGrammar);
  return value;
}

double parse_number(std::string_view option, std::string_view text) {
  static constexpr Unit kNone[] = {{"", 1}};
  return parse_real(option, text, kNone, kNumberGrammar);
}

double parse_share(std::string_view option, std::string_view text) {
  static constexpr Unit kUnits[] = {{"", 1}, {"%", 1, 100}};
  const double value = parse_real(option, text, kUnits, kShareGrammar);
  if (!(value > 0 && value <= 1)) fail(option, text, "is outside", kShareGrammar);
  return value;
}

std::vector<uint64_t> parse_range(const std::string& option, const std::string& text, uint64_t factor,
                                  uint64_t (*parse)(std::string_view option, std::string_view text)) {
  constexpr const char* kGrammar = "one value, a list (8,12,64), or a range low..high or low..high*factor";
  std::vector<uint64_t> values;
  const size_t dots = text.find("..");
  if (dots != std::string::npos) {
    const size_t star = text.find('*', dots);
    const size_t end = star == std::string::npos ? text.size() : star;
    const uint64_t low = parse(option, text.substr(0, dots)), high = parse(option, text.substr(dots + 2, end - dots - 2));
    if (star != std::string::npos) {
      factor = parse_count(option, text.substr(star + 1));
      if (factor < 2) fail(option, text, "has a factor below 2", kGrammar);
    }
    if (low > high || low == 0) fail(option, text, low == 0 ? "begins at 0" : "ends before it begins", kGrammar);
    for (uint64_t value = low; value < high && values.size() <= kMostValues; value = value > high / factor ? high : value * factor) {
      values.push_back(value);
    }
    values.push_back(high);
  } else {
    for (size_t begin = 0; begin <= text.size();) {
      const size_t end = std::min(text.find(',', begin), text.size());
      values.push_back(parse(option, text.substr(begin, end - begin)));
      if (values.size() > 1 && values.back() <= values[values.size() - 2]) fail(option, text, "is not ascending", kGrammar);
      begin = end + 1;
    }
  }
  if (values.size() > kMostValues) fail(option, text, "has more than 64 values", kGrammar);
  return values;
}

void check_range(std::string_view option, std::string_view text, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return;
  throw UsageError(std::string(option) + ": '" + std::string(text) + "' is outside " + std::to_string(low) + " ... " + std::to_string(high));
}

std::string format_number(double value, int digits) {
  if (!std::isfinite(value)) return "n/a";
  char buffer[64];
  const double magnitude = std::fabs(value);
  std::to_chars_result result{};
  if (magnitude != 0 && (magnitude < 1e-4 || magnitude >= 1e12)) {
    result = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific, digits - 1);
  } else {
    // Digits after the point such that `digits` are significant.
    const int whole = magnitude < 1 ? (magnitude == 0 ? 1 : static_cast<int>(std::floor(std::log10(magnitude))) + 1)
                                    : static_cast<int>(std::floor(std::log10(magnitude))) + 1;
    const int places = digits - whole < 0 ? 0 : digits - whole;
    result = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed, places);
  }
  return std::string(buffer, result.ptr);
}

namespace {
// Without zeros at the end of the fraction: "50", "1.25".
std::string trimmed(double value) {
  std::string text = format_number(value, 4);
  if (text.find('.') != std::string::npos && text.find('e') == std::string::npos) {
    while (text.back() == '0') text.pop_back();
    if (text.back() == '.') text.pop_back();
  }
  return text;
}
}  // namespace

std::string format_size(uint64_t bytes) {
  static constexpr struct {
    const char* name;
    double bytes;
  } kUnits[] = {{"GiB", 1073741824.0}, {"MiB", 1048576.0}, {"KiB", 1024.0}};
  const double value = static_cast<double>(bytes);
  for (const auto& unit : kUnits) {
    if (value >= unit.bytes) return trimmed(value / unit.bytes) + " " + unit.name;
  }
  return std::to_string(bytes) + " B";
}

std::string format_decimal_size(double bytes) {
  if (!std::isfinite(bytes)) return "n/a";
  static constexpr struct {
    const char* name;
    double bytes;
  } kUnits[] = {{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3}};
  for (const auto& unit : kUnits) {
    if (std::fabs(bytes) >= unit.bytes) return trimmed(bytes / unit.bytes) + " " + unit.name;
  }
  return trimmed(bytes) + " B";
}

std::string format_tenths(double seconds) {
  if (!std::isfinite(seconds)) return "n/a";
  const double magnitude = std::fabs(seconds);
  const auto [factor, unit] = magnitude >= 1      ? std::pair{1.0, "s"}
                              : magnitude >= 1e-3 ? std::pair{1e3, "ms"}
                              : magnitude >= 1e-6 ? std::pair{1e6, "us"}
                                                  : std::pair{1e9, "ns"};
  char buffer[64];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, magnitude == 0 ? 0 : seconds * factor, std::chars_format::fixed, 1);
  return std::string(buffer, end.ptr) + " " + (magnitude == 0 ? "s" : unit);
}

std::string format_time(double seconds) {
  if (!std::isfinite(seconds)) return "n/a";
  const double magnitude = std::fabs(seconds);
  if (magnitude >= 1 || magnitude == 0) return trimmed(seconds) + " s";
  if (magnitude >= 1e-3) return trimmed(seconds * 1e3) + " ms";
  if (magnitude >= 1e-6) return trimmed(seconds * 1e6) + " us";
  return trimmed(seconds * 1e9) + " ns";
}

std::string format_link_rate(double bytes_per_s) {
  if (!std::isfinite(bytes_per_s)) return "n/a";
  const double bits = bytes_per_s * 8;
  return bits >= 1e9 ? trimmed(bits / 1e9) + " Gbit/s" : trimmed(bits / 1e6) + " Mbit/s";
}

std::string format_bandwidth(double bytes_per_s) { return with_unit(bytes_per_s / 1e9, 3, "GB/s"); }

}  // namespace gradgate::cli
