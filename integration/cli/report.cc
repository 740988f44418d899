#include "integration/cli/report.h"

#include <sched.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>

#include "gradgate/version.h"
#include "integration/cli/error.h"

namespace gradgate::cli {
namespace {

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    const size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

}  // namespace

std::string machine_text() { return cpu_model() + ", " + std::to_string(usable_cores()) + " cores, " + kCompiler; }

Json machine_json() { return {{"cpu", cpu_model()}, {"cores", usable_cores()}, {"compiler", kCompiler}, {"build", GRADGATE_BUILD_OPTIONS}}; }

std::string version_text() { return std::string("gradgate ") + GRADGATE_VERSION + "\n" + GRADGATE_BUILD_OPTIONS + "\ncompiler " + kCompiler; }

Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json report_header(const std::string& name, const Context& context, const OptionSet& options) {
  return {{"schema", "gradgate." + name + "/1"},
          {"version", GRADGATE_VERSION},
          {"machine", machine_json()},
          {"argv", context.argv},
          {"config", options.config_json()}};
}

std::string dump(const Json& json) { return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"; }

void OutputOptions::add_to(OptionSet& options) {
  options.flag("--json", "print one JSON object instead of the table", &json);
  options.add("-J,--json-file", "", "FILE", "also write the JSON object to FILE", [this](const std::string&, const std::string& text) { json_file = text; });
}

void OutputOptions::print(const std::string& text) const {
  if (json || silent) return;
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void OutputOptions::finish(const Json& result) const {
  if (silent) return;
  const std::string text = dump(result);
  if (json) std::fwrite(text.data(), 1, text.size(), stdout);
  if (json_file.empty()) return;
  std::FILE* file = std::fopen(json_file.c_str(), "wb");
  const bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file == nullptr || std::fclose(file) != 0 || !written) throw RunError("-J/--json-file: '" + json_file + "' cannot be written");
}

Progress::Progress() : enabled_(isatty(STDERR_FILENO) != 0) {}
Progress::~Progress() { clear(); }

void Progress::show(const std::string& text) {
  if (!enabled_) return;
  std::fprintf(stderr, "\r\033[K%s", text.c_str());
  std::fflush(stderr);
  shown_ = true;
}

void Progress::clear() {
  if (!shown_) return;
  std::fprintf(stderr, "\r\033[K");
  std::fflush(stderr);
  shown_ = false;
}

}  // namespace gradgate::cli
