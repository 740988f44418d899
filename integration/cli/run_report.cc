// gradgate report: a decision log as one page that needs nothing else.
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>

#include "integration/cli/context.h"
#include "integration/cli/error.h"
#include "integration/cli/file.h"

namespace gradgate::cli {

extern const unsigned char kReportTemplate[];
extern const std::size_t kReportTemplateBytes;

namespace {

constexpr std::string_view kPlace = "GRADGATE_RECORDS";

struct Arguments {
  std::string input, output;
};

// The records as one JSON array in which "<" is escaped, so that none of them can end the script element around it.
std::string read_records(const std::string& path, size_t* count) {
  std::ifstream file(path);
  if (!file) throw UsageError("input: " + path + ": cannot be read");
  std::string records = "[", line;
  for (size_t number = 1; std::getline(file, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const auto record = nlohmann::json::parse(line, nullptr, false);
    if (!record.is_object() || record.value("v", nlohmann::json()) != 1 || !record.contains("event")) {
      throw UsageError("input: " + path + " line " + std::to_string(number) +
                       ": not a record of a decision log (one JSON object a line, with v 1 and event)");
    }
    records += *count == 0 ? "\n" : ",\n";
    for (const char c : record.dump()) c == '<' ? records += "\\u003c" : records += c;
    ++*count;
  }
  if (*count == 0) throw UsageError("input: " + path + " holds no records");
  return records + "\n]";
}

int run(const Arguments& arguments) {
  size_t count = 0;
  const std::string records = read_records(arguments.input, &count);
  const std::string_view page(reinterpret_cast<const char*>(kReportTemplate), kReportTemplateBytes);
  const size_t place = page.find(kPlace);
  write_whole(arguments.output, {page.substr(0, place), records, page.substr(place + kPlace.size())});
  std::printf("%s: %zu records\n", arguments.output.c_str(), count);
  return kExitOk;
}

}  // namespace

void add_report(CLI::App& program, Context& context) {
  Command& command =
      context.add(program, "report", "a decision log as an HTML page: decisions, inequality, saving, error",
                  "The page is self-contained: it loads nothing. The log is what a session writes (docs/gate.md).\n\n"
                  "Examples:\n"
                  "  gradgate report run.jsonl -o report.html");
  auto arguments = std::make_shared<Arguments>();
  OptionSet& options = *command.options;
  command.app->add_option("input", arguments->input, "the decision log, JSON lines")->required()->type_name("FILE");
  options.add("-o,--output", "report.html", "FILE", "the page",
              [arguments](const std::string&, const std::string& text) { arguments->output = text; });
  command.run = [arguments] { return run(*arguments); };
}

}  // namespace gradgate::cli
