// Machine-readable results: one JSON object with schema, version, machine, command line and results. Strict JSON: a number that is not finite is null.
#pragma once

#include <string>

#include "integration/cli/context.h"

namespace gradgate::cli {

/// {"schema": "gradgate.<name>/1", "version": …, "machine": …, "argv": […], "config": {…}}; the caller adds "results".
Json report_header(const std::string& name, const Context& context, const OptionSet& options);

/// "Intel(R) Xeon(R) …, 2 cores, g++ 12.2.0".
std::string machine_text();
Json machine_json();
/// What --version prints: version and build options.
std::string version_text();

/// A finite number, or null.
Json number(double value);

/// Two spaces of indentation and a newline at the end. Bytes that are not UTF-8 (file names) are replaced.
std::string dump(const Json& json);

/// Where a subcommand's results go: a table on standard output, or with --json one JSON object there, and with -J FILE that object in a file too.
struct OutputOptions {
  bool json = false;
  std::string json_file;
  bool silent = false;  ///< another process of the run prints and writes
  /// Adds --json and -J/--json-file.
  void add_to(OptionSet& options);
  /// Prints the table's text unless JSON was asked for.
  void print(const std::string& text) const;
  /// Prints or writes the JSON as asked.
  void finish(const Json& json) const;
};

/// A line on standard error that overwrites itself while work goes on; silent unless that is a terminal.
class Progress {
 public:
  Progress();
  ~Progress();
  void show(const std::string& text);
  void clear();

 private:
  bool enabled_;
  bool shown_ = false;
};

}  // namespace gradgate::cli
