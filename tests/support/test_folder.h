// Files of a test: every test has a folder of its own, since ctest runs them at the same time.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

namespace gradgate::test {

/// The running test's folder, empty when the test first asks for it.
inline std::string test_folder() {
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

}  // namespace gradgate::test
