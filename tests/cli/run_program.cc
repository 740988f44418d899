#include "tests/cli/run_program.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace gradgate::cli {

std::string test_folder() {
  const ::testing::TestInfo* test = ::testing::UnitTest::GetInstance()->current_test_info();
  std::string name = std::string("gradgate_") + test->test_suite_name() + "_" + test->name();
  for (char& c : name) c = c == '/' ? '_' : c;
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / name;
  static std::string made;
  if (made != folder) {
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    made = folder;
  }
  return folder;
}

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
