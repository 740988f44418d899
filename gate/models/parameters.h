// The parameters of the cost models: one name, unit and range for each, so that whoever takes them from a user refuses
// the same values with the same words. The formulas themselves check nothing; inside these ranges every one of them is
// finite and not negative.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "gradgate/status.h"
#include "gradgate/types.h"

namespace gradgate::gate {

enum class Parameter : uint8_t {
  alpha,           ///< start-up time of one message, s
  beta,            ///< bandwidth of one rank in one direction, B/s
  ranks,           ///< N
  ranks_per_node,  ///< G; must also divide N
  bytes,           ///< M, of the whole vector, or n of one message
  ratio,           ///< r = dense bytes / payload bytes
  codec_time,      ///< encode + decode, s
  codec_rate,      ///< of a codec, gradient bytes per second
  overhead,        ///< LogGP: o_s, L, g, o_r, s
  gap_per_byte,    ///< LogGP: G, s per byte
  messages,        ///< of a LogGP train
  stages,          ///< p of a pipeline
  micro_batches,   ///< m
  chunks,          ///< V, model chunks per stage of an interleaved pipeline
  bubble           ///< target share of idle time
};

struct ParameterRange {
  const char* name;
  double low, high;
  bool whole;        ///< only whole numbers
  const char* unit;  ///< empty: a number
};

inline constexpr ParameterRange kParameters[] = {
    {"alpha", 0, 1e6, false, "s"},        {"beta", 1, 1e18, false, "B/s"},       {"ranks", 1, 1e9, true, ""},
    {"ranks per node", 1, 1e9, true, ""}, {"bytes", 0, 1e19, false, "B"},        {"ratio", 1e-3, 1e12, false, ""},
    {"codec time", 0, 1e6, false, "s"},   {"codec rate", 1, 1e18, false, "B/s"}, {"overhead", 0, 1e6, false, "s"},
    {"gap per byte", 0, 1, false, "s/B"}, {"messages", 1, 1e12, true, ""},       {"stages", 1, 1e9, true, ""},
    {"micro-batches", 1, 1e9, true, ""},  {"chunks", 1, 1e6, true, ""},          {"bubble", 1e-9, 1, false, ""},
};
static_assert(sizeof(kParameters) / sizeof(kParameters[0]) == static_cast<size_t>(Parameter::bubble) + 1);

constexpr const ParameterRange& range_of(Parameter parameter) noexcept {
  return kParameters[static_cast<size_t>(parameter)];
}

/// invalid_argument, and in `why` the parameter, its value and what is accepted, unless the value is in range.
inline Status check_parameter(Parameter parameter, double value, Message* why) noexcept {
  const ParameterRange& range = range_of(parameter);
  if (value >= range.low && value <= range.high && (!range.whole || value == std::floor(value))) return {};
  const char* space = range.unit[0] == '\0' ? "" : " ";
  std::snprintf(why->text, sizeof(why->text), "%s is %.17g%s%s; expected %s%g ... %g%s%s", range.name, value, space,
                range.unit, range.whole ? "a whole number, " : "", range.low, range.high, space, range.unit);
  return StatusCode::invalid_argument;
}

/// Also checks that the nodes are full: G divides N.
inline Status check_nodes(double ranks, double ranks_per_node, Message* why) noexcept {
  GRADGATE_TRY(check_parameter(Parameter::ranks, ranks, why));
  GRADGATE_TRY(check_parameter(Parameter::ranks_per_node, ranks_per_node, why));
  if (std::fmod(ranks, ranks_per_node) == 0) return {};
  std::snprintf(why->text, sizeof(why->text), "ranks per node is %.17g; expected a divisor of the %.17g ranks",
                ranks_per_node, ranks);
  return StatusCode::invalid_argument;
}

}  // namespace gradgate::gate
