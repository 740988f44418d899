#include "integration/cli/json_fields.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <utility>

#include "integration/cli/error.h"
#include "integration/cli/quantity.h"

namespace gradgate::cli {

std::string read_text(std::string_view option, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) throw UsageError(std::string(option) + ": '" + path + "' cannot be read");
  return text;
}

JsonFields::JsonFields(std::string file, std::string where, const Json& object)
    : file_(std::move(file)), where_(std::move(where)), object_(object) {
  if (object_.is_object()) return;
  throw UsageError(file_ + ": " + (where_.empty() ? "the file" : where_) + " is not an object");
}

void JsonFields::refuse(const std::string& key, const std::string& why) const {
  throw UsageError(file_ + ": " + name(key) + ": " + why);
}

const Json& JsonFields::value(const std::string& key) {
  read_.push_back(key);
  const auto found = object_.find(key);
  if (found == object_.end()) refuse(key, "is missing");
  return *found;
}

std::string JsonFields::text(const std::string& key) {
  const Json& json = value(key);
  if (!json.is_string() || json.get_ref<const std::string&>().empty()) {
    refuse(key, json.dump() + " is not a text of at least one character");
  }
  return json.get<std::string>();
}

double JsonFields::number(const std::string& key, double low, double high) {
  const Json& json = value(key);
  if (!json.is_number()) refuse(key, json.dump() + " is not a number");
  const double number = json.get<double>();
  if (!(number >= low && number <= high)) {
    refuse(key, json.dump() + " is outside " + format_number(low, 6) + " ... " + format_number(high, 6));
  }
  return number;
}

uint64_t JsonFields::count(const std::string& key, uint64_t low, uint64_t high) {
  const Json& json = value(key);
  const std::string range = std::to_string(low) + " ... " + std::to_string(high);
  if (!json.is_number_unsigned()) refuse(key, json.dump() + " is not a whole number in " + range);
  const uint64_t number = json.get<uint64_t>();
  if (number < low || number > high) refuse(key, json.dump() + " is outside " + range);
  return number;
}

JsonFields JsonFields::object(const std::string& key) { return JsonFields(file_, name(key), value(key)); }

std::vector<JsonFields> JsonFields::list(const std::string& key) {
  const Json& json = value(key);
  if (!json.is_array()) refuse(key, "is not a list");
  std::vector<JsonFields> entries;
  for (size_t i = 0; i < json.size(); ++i) {
    entries.emplace_back(file_, name(key) + "[" + std::to_string(i) + "]", json[i]);
  }
  return entries;
}

bool JsonFields::null(const std::string& key) { return value(key).is_null(); }

void JsonFields::done() const {
  for (const auto& [key, ignored] : object_.items()) {
    if (std::find(read_.begin(), read_.end(), key) != read_.end()) continue;
    std::string known;
    for (const std::string& one : read_) known += " " + one;
    refuse(key, "is an unknown key; known are" + known);
  }
}

}  // namespace gradgate::cli
