#include "integration/cli/link.h"

#include <algorithm>

#include "gate/interconnects.h"
#include "integration/cli/error.h"
#include "integration/cli/json_fields.h"
#include "integration/cli/quantity.h"
#include "integration/cli/table.h"

namespace gradgate::cli {
namespace {

constexpr const char *kTableFormat = "gradgate-interconnects", *kNominal = "nominal", *kEffective = "effective";

const LinkEntry* find(const LinkTable& table, std::string_view name) {
  const auto found = std::find_if(table.begin(), table.end(), [&](const LinkEntry& e) { return e.name == name; });
  return found == table.end() ? nullptr : &*found;
}

gate::Link parse_numbers(const std::string& path, const std::string& where, JsonFields fields) {
  const std::string name = path + ": " + where;
  const gate::Link link{parse_time(name + ".alpha", fields.text("alpha")),
                        parse_bandwidth(name + ".beta", fields.text("beta"))};
  fields.done();
  return link;
}

Json numbers_json(gate::Link link) { return {{"alpha_s", link.alpha_s}, {"beta_bytes_per_s", link.beta_Bps}}; }

}  // namespace

const LinkTable& builtin_links() {
  static const LinkTable table = [] {
    LinkTable list;
    for (const gate::Interconnect& e : gate::kInterconnects) {
      list.push_back({e.name, e.nominal, e.effective, e.role, e.source, e.effective_source});
    }
    return list;
  }();
  return table;
}

LinkTable parse_link_table(const std::string& path, const std::string& text) {
  const Json json = parse_config(path, text);
  JsonFields fields(path, "", json);
  if (fields.text("format") != kTableFormat) {
    fields.refuse("format", json["format"].dump() + " is not \"" + kTableFormat + "\"");
  }
  (void)fields.count("version", 1, 1);
  LinkTable table = builtin_links();
  std::vector<JsonFields> list = fields.list("interconnects");
  for (size_t i = 0; i < list.size(); ++i) {
    JsonFields& entry = list[i];
    const std::string where = "interconnects[" + std::to_string(i) + "].";
    LinkEntry link;
    link.name = entry.text("name");
    const bool plain = link.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-_") == std::string::npos;
    if (!plain || link.name[0] < 'a') {
      entry.refuse("name", "'" + link.name + "' is not a name: a small letter, then small letters, digits, - and _");
    }
    if (find(table, link.name) != nullptr) entry.refuse("name", "'" + link.name + "' is taken");
    link.nominal = parse_numbers(path, where + kNominal, entry.object(kNominal));
    link.role = entry.text("role");
    link.source = entry.text("source");
    link.effective = link.nominal;
    link.effective_source = link.source;
    if (entry.has(kEffective)) {
      link.effective = parse_numbers(path, where + kEffective, entry.object(kEffective));
      link.effective_source = entry.text("effective_source");
    }
    entry.done();
    table.push_back(link);
  }
  fields.done();
  return table;
}

std::string link_grammar(const LinkTable& table) {
  std::string text = "bandwidth[:latency], e.g. 1gbit:50us or 10gbit (latency " + format_time(kDefaultAlphaS) +
                     " unless given), or name[:nominal|:effective][:latency] with one of the names";
  for (const LinkEntry& entry : table) text += " " + entry.name;
  return text;
}

NamedLink parse_link(std::string_view option, std::string_view text, const LinkTable& table) {
  NamedLink result;
  result.text = std::string(text);
  size_t colon = text.find(':');
  const std::string_view rate = text.substr(0, colon);
  if (const LinkEntry* known = find(table, rate)) {
    gate::Link link = known->nominal;
    if (colon != std::string_view::npos) {
      const size_t next = text.find(':', colon + 1);
      const size_t end = next == std::string_view::npos ? text.size() : next;
      const std::string_view word = text.substr(colon + 1, end - colon - 1);
      if (word == kNominal || word == kEffective) {
        if (word == kEffective) link = known->effective;
        colon = next;
      }
    }
    result.link = {link.alpha_s, link.beta_Bps};
  } else {
    try {
      result.link = {kDefaultAlphaS, parse_bandwidth(option, rate)};
    } catch (const UsageError&) {
      throw UsageError(std::string(option) + ": '" + std::string(text) + "' is not a link; expected " +
                       link_grammar(table));
    }
  }
  if (colon != std::string_view::npos) result.link.alpha_s = parse_time(option, text.substr(colon + 1));
  return result;
}

std::string describe_rates(const NamedLink& link) {
  return link.text + " = " + format_link_rate(link.link.beta_bytes_per_s) + ", " + format_time(link.link.alpha_s) +
         " per message";
}

std::string describe_link(const NamedLink& link) { return describe_rates(link) + " (emulated)"; }

std::string link_table_text(const LinkTable& table) {
  const Table columns({{"name", "", 12, true},
                       {"nominal", "", 14},
                       {"alpha", "", 8},
                       {"effective", "", 14},
                       {"alpha", "", 8},
                       {"found", "", 14, true},
                       {"source: nominal; effective", "", 0, true}});
  std::string text =
      comment("bandwidth of one rank in one direction, start-up latency of one message") + columns.header();
  for (const LinkEntry& e : table) {
    text += columns.row({e.name, format_link_rate(e.nominal.beta_Bps), format_time(e.nominal.alpha_s),
                         format_link_rate(e.effective.beta_Bps), format_time(e.effective.alpha_s), e.role,
                         e.source + "; effective: " + e.effective_source});
  }
  return text;
}

Json link_table_json(const LinkTable& table) {
  Json json = Json::array();
  for (const LinkEntry& e : table) {
    json.push_back({{"name", e.name},
                    {"role", e.role},
                    {"nominal", numbers_json(e.nominal)},
                    {"effective", numbers_json(e.effective)},
                    {"source", e.source},
                    {"effective_source", e.effective_source}});
  }
  return json;
}

}  // namespace gradgate::cli
