#include "tests/cli/run_program.h"

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <iterator>

namespace gradgate::cli {

Finished run_program(const std::string& arguments, const std::string& environment) {
  return run_command(environment + " '" GRADGATE_PROGRAM "' " + arguments);
}

Finished run_command(const std::string& command) {
  const std::string errors = test_folder() + "/stderr";
  Finished finished;
  std::FILE* pipe = popen((command + " 2>'" + errors + "' </dev/null").c_str(), "r");
  if (pipe == nullptr) return finished;
  std::array<char, 4096> block;
  size_t got = 0;
  while ((got = std::fread(block.data(), 1, block.size(), pipe)) > 0) finished.out.append(block.data(), got);
  const int status = pclose(pipe);
  finished.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  std::ifstream file(errors, std::ios::binary);
  finished.err.assign(std::istreambuf_iterator<char>(file), {});
  return finished;
}

nlohmann::json strict_json(const std::string& text) { return nlohmann::json::parse(text); }

}  // namespace gradgate::cli
