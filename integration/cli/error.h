// How the program fails: one exception for what the user can correct, one for a run that went wrong. Both stay inside the program; the
// library below it throws nothing.
#pragma once

#include <stdexcept>
#include <string>

namespace gradgate::cli {

/// Process exit codes (docs/program.md).
enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,  ///< a wrong value was found, or the run failed
  kExitUsage = 2    ///< a bad option, value, configuration or input file
};

/// The text names the option (or file), the value and what would be accepted.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A run that began and could not finish: a timeout, memory, a file that could not be written.
struct RunError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace gradgate::cli
