// Options of one subcommand with their sources: a flag wins over the environment (GRADGATE_<OPTION>), that over the configuration file, that
// over the default. Every value is a text that goes through one parser wherever it comes from, so a bad one is refused the same way.
#pragma once

#include <CLI/CLI.hpp>
#include <deque>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace gradgate::cli {

using Json = nlohmann::ordered_json;

class OptionSet {
 public:
  /// Parses and stores a value; throws UsageError. `option` is how the user named it: "-b/--minbytes", "GRADGATE_MINBYTES", "file.json: minbytes".
  using Setter = std::function<void(const std::string& option, const std::string& text)>;

  /// `app` is the subcommand; its name is the section of the configuration file. Adds --config and --print-config.
  explicit OptionSet(CLI::App* app);

  /// An option with a value. `names` as in CLI11 ("-b,--minbytes"); a bare name is a positional list, joined with commas. An empty default means
  /// "not set": the setter is not called; what then holds stands in `help` in brackets, "smallest vector [64K]", and is what --print-config shows.
  CLI::Option* add(const std::string& names, const std::string& fallback, const std::string& type, const std::string& help, Setter set);
  /// A switch: given on the command line, or true/false/1/0 elsewhere.
  void flag(const std::string& names, const std::string& help, bool* value);

  /// Gives every option its effective value. Reads the configuration file once. Throws UsageError: bad value (naming its source), unknown section
  /// or key. `known` are the option sets of all subcommands, so that a section of another one is checked too.
  void resolve(const std::vector<const OptionSet*>& known);

  bool print_config() const { return print_config_; }
  /// "minbytes = 64K   (flag)" a line.
  std::string config_text() const;
  /// {"minbytes": {"value": "64K", "source": "flag"}, …}.
  Json config_json() const;

  std::string section() const { return app_->get_name(); }
  bool knows(const std::string& key) const;

 private:
  struct Entry {
    std::string key;       ///< long name: configuration key, and the environment variable in capitals
    std::string shown;     ///< "-b/--minbytes"
    std::string value, source;
    std::string unset = "(not set)";       ///< shown for an empty value
    std::string given;                     ///< storage for CLI11, by kind: value, list, switch
    std::vector<std::string> given_list;
    bool flag_given = false;
    bool is_flag = false;
    CLI::Option* option = nullptr;
    Setter set;
  };
  Entry& append(const std::string& names);
  void read_file(const std::string& path, const std::vector<const OptionSet*>& known, Json* section) const;

  CLI::App* app_;
  std::deque<Entry> entries_;  // CLI11 keeps addresses of its storage
  std::string config_path_;
  bool print_config_ = false;
};

/// "min-bytes" → "GRADGATE_MIN_BYTES".
std::string environment_name(const std::string& key);
/// Parses a configuration file's text: strict JSON, no key twice. Throws UsageError naming `path`.
Json parse_config(const std::string& path, const std::string& text);
/// Splits at commas; an empty part is an error naming `option`.
std::vector<std::string> split_list(const std::string& option, const std::string& text);

}  // namespace gradgate::cli
