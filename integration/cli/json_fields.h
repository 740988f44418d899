// Strict reading of JSON files that the program takes as input: every key is known or refused, every value is checked,
// and every refusal names the file, the key ("collectives.all_reduce.alpha_s") and what would be accepted.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "integration/cli/options.h"

namespace gradgate::cli {

/// Reads a whole file; throws UsageError naming `option` and `path` where that fails.
std::string read_text(std::string_view option, const std::string& path);

/// One object of a file. Getters throw UsageError; done() refuses the keys that no getter asked for. Keeps a reference
/// to the JSON value.
class JsonFields {
 public:
  /// `where` is the path of keys that led here, empty for the whole file.
  JsonFields(std::string file, std::string where, const Json& object);

  bool has(const std::string& key) const { return object_.contains(key); }
  /// A text that is not empty.
  std::string text(const std::string& key);
  /// A finite number in [low, high].
  double number(const std::string& key, double low, double high);
  /// A whole number in [low, high].
  uint64_t count(const std::string& key, uint64_t low, uint64_t high);
  JsonFields object(const std::string& key);
  /// The objects of a list.
  std::vector<JsonFields> list(const std::string& key);
  /// True where the key's value is null, which then counts as read.
  bool null(const std::string& key);
  /// Refuses what was not read.
  void done() const;
  /// Throws UsageError: "<file>: <where>.<key>: <why>".
  [[noreturn]] void refuse(const std::string& key, const std::string& why) const;

 private:
  const Json& value(const std::string& key);
  std::string name(const std::string& key) const { return where_.empty() ? key : where_ + "." + key; }

  std::string file_, where_;
  const Json& object_;
  std::vector<std::string> read_;
};

}  // namespace gradgate::cli
