// What a gate may do: the one setting that users, sessions and the gate itself share.
#pragma once

#include <cstdint>

namespace gradgate {

enum class Mode : uint8_t {
  automatic = 0,  ///< compress a bucket while it pays ("auto"): measure, predict, agree, verify, hold
  on = 1,         ///< always the first listed codec; no measuring, no agreement
  off = 2,        ///< always dense; no measuring, no agreement
  observe = 3     ///< dense, bit-identical to no gradgate; measures in shadow and gives a verdict after 100 steps
};

/// "auto", "on", "off", "observe"; "?" for a value outside the enumeration.
constexpr const char* mode_name(Mode mode) noexcept {
  switch (mode) {
    case Mode::automatic:
      return "auto";
    case Mode::on:
      return "on";
    case Mode::off:
      return "off";
    case Mode::observe:
      return "observe";
  }
  return "?";
}

}  // namespace gradgate
