#include "integration/cli/options.h"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>

#include "integration/cli/error.h"

namespace gradgate::cli {
namespace {

bool parse_flag(const std::string& option, const std::string& text) {
  if (text == "true" || text == "1") return true;
  if (text == "false" || text == "0") return false;
  throw UsageError(option + ": '" + text + "' is neither true, false, 1 nor 0");
}

// The text that the option's parser sees. Numbers keep the digits of the file as far as JSON does.
std::string value_text(const std::string& where, const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number() || value.is_boolean()) return value.dump();
  if (value.is_array()) {
    std::string text;
    for (const Json& item : value) {
      if (!item.is_string()) throw UsageError(where + ": a list must hold texts, not " + item.dump());
      text += (text.empty() ? "" : ",") + item.get<std::string>();
    }
    return text;
  }
  throw UsageError(where + ": expected a text, a number, true, false or a list of texts, not " + value.dump());
}

}  // namespace

std::string environment_name(const std::string& key) {
  std::string name = "GRADGATE_";
  for (const char c : key) name += c == '-' ? '_' : (c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c);
  return name;
}

std::vector<std::string> split_list(const std::string& option, const std::string& text) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(',', begin);
    parts.push_back(text.substr(begin, end == std::string::npos ? end : end - begin));
    if (parts.back().empty()) throw UsageError(option + ": '" + text + "' has an empty entry; expected names separated by commas");
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

Json parse_config(const std::string& path, const std::string& text) {
  std::vector<std::set<std::string>> keys;
  std::string twice;
  const Json::parser_callback_t watch = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) twice = parsed.get<std::string>();
    return true;
  };
  Json json;
  try {
    json = Json::parse(text, watch);
  } catch (const Json::exception& error) {
    throw UsageError(path + ": not a JSON file: " + error.what());
  }
  if (!twice.empty()) throw UsageError(path + ": key '" + twice + "' occurs twice");
  if (!json.is_object()) throw UsageError(path + R"(: expected an object by subcommand, e.g. {"allreduce": {"ranks": 4}})");
  return json;
}

OptionSet::OptionSet(CLI::App* app) : app_(app) {
  app_->add_option("--config", config_path_,
                   R"(JSON file with options by subcommand, e.g. {"allreduce": {"ranks": 4, "link": "1gbit:50us"}}; also GRADGATE_CONFIG)")
      ->type_name("FILE");
  app_->add_flag("--print-config", print_config_, "print every option's effective value and where it comes from, then exit");
}

OptionSet::Entry& OptionSet::append(const std::string& names) {
  Entry& entry = entries_.emplace_back();
  size_t begin = 0;
  while (begin < names.size()) {
    const size_t end = std::min(names.find(',', begin), names.size());
    const std::string name = names.substr(begin, end - begin);
    entry.shown += (entry.shown.empty() ? "" : "/") + name;
    entry.key = name.substr(std::min(name.find_first_not_of('-'), name.size()));  // the long name comes last
    begin = end + 1;
  }
  return entry;
}

CLI::Option* OptionSet::add(const std::string& names, const std::string& fallback, const std::string& type, const std::string& help, Setter set) {
  Entry& entry = append(names);
  entry.value = fallback;
  entry.source = "default";
  entry.set = std::move(set);
  const size_t bracket = help.find(" [");
  if (fallback.empty() && bracket != std::string::npos)
    entry.unset = help.substr(bracket + 2, help.find(']', bracket) - bracket - 2);
  const std::string text = fallback.empty() ? help : help + " [" + fallback + "]";
  entry.option = names[0] == '-' ? app_->add_option(names, entry.given, text) : app_->add_option(names, entry.given_list, text);
  return entry.option->type_name(type);
}

void OptionSet::flag(const std::string& names, const std::string& help, bool* value) {
  Entry& entry = append(names);
  entry.is_flag = true;
  entry.value = "false";
  entry.source = "default";
  entry.set = [value](const std::string& option, const std::string& text) { *value = parse_flag(option, text); };
  entry.option = app_->add_flag(names, entry.flag_given, help);
}

bool OptionSet::knows(const std::string& key) const {
  for (const Entry& entry : entries_) {
    if (entry.key == key) return true;
  }
  return false;
}

void OptionSet::read_file(const std::string& path, const std::vector<const OptionSet*>& known, Json* section) const {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) throw UsageError("--config: '" + path + "' cannot be read");
  const Json json = parse_config(path, text);
  for (const auto& [name, options] : json.items()) {
    const OptionSet* owner = nullptr;
    std::string names;
    for (const OptionSet* set : known) {
      if (set->section() == name) owner = set;
      names += " " + set->section();
    }
    if (owner == nullptr) throw UsageError(path + ": unknown section '" + name + "'; sections are the subcommands" + names);
    if (!options.is_object()) throw UsageError(path + ": section '" + name + "' is not an object of options");
    for (const auto& [key, value] : options.items()) {
      if (owner->knows(key)) continue;
      std::string keys;
      for (const Entry& entry : owner->entries_) keys += " " + entry.key;
      throw UsageError(path + ": unknown key '" + key + "' in section '" + name + "'; known are" + keys);
    }
    if (owner == this) *section = options;
  }
}

void OptionSet::resolve(const std::vector<const OptionSet*>& known) {
  Json file = Json::object();
  const char* environment_path = std::getenv("GRADGATE_CONFIG");
  if (config_path_.empty() && environment_path != nullptr) config_path_ = environment_path;
  if (!config_path_.empty()) read_file(config_path_, known, &file);

  for (Entry& entry : entries_) {
    const std::string variable = environment_name(entry.key);
    const char* environment = std::getenv(variable.c_str());
    std::string shown = entry.shown;
    if (entry.option->count() > 0) {
      entry.source = "flag";
      if (entry.is_flag) {
        entry.value = entry.flag_given ? "true" : "false";
      } else {
        entry.value = entry.given;
        for (const std::string& part : entry.given_list) entry.value += (entry.value.empty() ? "" : ",") + part;
      }
    } else if (environment != nullptr && environment[0] != '\0') {
      entry.value = environment;
      entry.source = "environment " + variable;
      shown = variable;
    } else if (file.contains(entry.key)) {
      shown = config_path_ + ": " + entry.key;
      entry.value = value_text(shown, file[entry.key]);
      entry.source = "file " + config_path_;
    } else if (entry.value.empty()) {
      continue;  // no default: not set
    }
    entry.set(shown, entry.value);
  }
}

std::string OptionSet::config_text() const {
  std::string text;
  size_t width = 0;
  for (const Entry& entry : entries_) width = std::max(width, entry.key.size());
  for (const Entry& entry : entries_) {
    text += entry.key + std::string(width - entry.key.size(), ' ') + " = " + (entry.value.empty() ? entry.unset : entry.value) + "  (" + entry.source + ")\n";
  }
  return text;
}

Json OptionSet::config_json() const {
  Json json = Json::object();
  for (const Entry& entry : entries_) {
    json[entry.key] = {{"value", entry.value.empty() ? Json(nullptr) : Json(entry.value)}, {"source", entry.source}};
  }
  return json;
}

}  // namespace gradgate::cli
