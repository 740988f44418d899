// Links as the user writes them: a bandwidth with an optional latency, or the name of an interconnect. Subcommands that
// move bytes only ever emulate a link (make_shaped), and say so wherever they print one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "gate/models/point_to_point.h"
#include "gradgate/communicator.h"
#include "integration/cli/options.h"

namespace gradgate::cli {

/// Latency of one message where only a bandwidth is given: that of TCP on Ethernet.
inline constexpr double kDefaultAlphaS = 50e-6;

struct NamedLink {
  LinkSpec link;
  std::string text;  ///< as the user wrote it
};

/// One row of the table of interconnects: a built-in one, or one of the user's file.
struct LinkEntry {
  std::string name;
  gate::Link nominal, effective;
  std::string role, source, effective_source;
};
using LinkTable = std::vector<LinkEntry>;

/// The interconnects of gate/interconnects.h.
const LinkTable& builtin_links();

/// The table extended by a JSON file (docs/program.md gives its format). Throws UsageError naming file and key: an
/// unknown or missing key, a value out of range, a name that is already taken.
LinkTable parse_link_table(const std::string& path, const std::string& text);

/// `bandwidth[:latency]` ("1gbit:50us", "10gbit", "1.25GB/s:5us"), or a name of the table, `name[:nominal|:effective]
/// [:latency]` ("ib-ndr", "ib-ndr:effective", "ib-ndr:2us"); nominal unless said. Throws UsageError naming `option`.
NamedLink parse_link(std::string_view option, std::string_view text, const LinkTable& table = builtin_links());

/// "1gbit:50us = 1 Gbit/s, 50 us per message".
std::string describe_rates(const NamedLink& link);
/// The same and "(emulated)".
std::string describe_link(const NamedLink& link);

/// The grammar with all names, for help texts and errors.
std::string link_grammar(const LinkTable& table = builtin_links());

/// The table for people, and as JSON.
std::string link_table_text(const LinkTable& table);
Json link_table_json(const LinkTable& table);

}  // namespace gradgate::cli
