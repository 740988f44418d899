#include "integration/cli/link.h"

#include "gate/interconnects.h"
#include "integration/cli/error.h"
#include "integration/cli/quantity.h"

namespace gradgate::cli {

std::string link_grammar() {
  std::string text = "bandwidth[:latency], e.g. 1gbit:50us or 10gbit (latency " + format_time(kDefaultAlphaS) + " unless given), or one of";
  for (const gate::Interconnect& entry : gate::kInterconnects) text += std::string(" ") + entry.name;
  return text;
}

NamedLink parse_link(std::string_view option, std::string_view text) {
  NamedLink result;
  result.text = std::string(text);
  const size_t colon = text.find(':');
  const std::string_view rate = text.substr(0, colon);
  if (const gate::Interconnect* known = gate::find_interconnect(rate)) {
    result.link = {known->link.alpha_s, known->link.beta_Bps};
  } else {
    try {
      result.link = {kDefaultAlphaS, parse_bandwidth(option, rate)};
    } catch (const UsageError&) {
      throw UsageError(std::string(option) + ": '" + std::string(text) + "' is not a link; expected " + link_grammar());
    }
  }
  if (colon != std::string_view::npos) result.link.alpha_s = parse_time(option, text.substr(colon + 1));
  return result;
}

std::string describe_link(const NamedLink& link) {
  return link.text + " = " + format_link_rate(link.link.beta_bytes_per_s) + ", " + format_time(link.link.alpha_s) + " per message (emulated)";
}

}  // namespace gradgate::cli
