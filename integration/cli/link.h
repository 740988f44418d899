// Links as the user writes them: a bandwidth with an optional latency, or the name of an interconnect. The program only ever emulates
// a link (make_shaped), and says so wherever it prints one.
#pragma once

#include <string>
#include <string_view>

#include "gradgate/communicator.h"

namespace gradgate::cli {

/// Latency of one message where only a bandwidth is given: that of TCP on Ethernet.
inline constexpr double kDefaultAlphaS = 50e-6;

struct NamedLink {
  LinkSpec link;
  std::string text;  ///< as the user wrote it
};

/// `bandwidth[:latency]` ("1gbit:50us", "10gbit", "1.25GB/s:5us") or a name from gate/interconnects.h ("ib-ndr"), also with a latency of its own
/// ("ib-ndr:2us"). Throws UsageError naming `option`.
NamedLink parse_link(std::string_view option, std::string_view text);

/// "1gbit:50us = 1 Gbit/s, 50 us per message (emulated)".
std::string describe_link(const NamedLink& link);

/// The grammar with all names, for help texts and errors.
std::string link_grammar();

}  // namespace gradgate::cli
