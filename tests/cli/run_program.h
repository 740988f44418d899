// Runs the gradgate program as a shell would.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/test_folder.h"

namespace gradgate::cli {

struct Finished {
  int code = -1;         ///< exit code; 128 + signal when it was killed
  std::string out, err;  ///< standard output and standard error
};

/// `arguments` is shell text: quote what needs it. `environment` is put before the command ("GRADGATE_RANKS=3").
Finished run_program(const std::string& arguments, const std::string& environment = "");

/// Any shell text, its standard error kept apart.
Finished run_command(const std::string& command);

/// Parses strict JSON; throws on NaN, Inf, trailing text.
nlohmann::json strict_json(const std::string& text);

using test::test_folder;

}  // namespace gradgate::cli
