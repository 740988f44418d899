// What the subcommands share: how one registers itself, and how it hands out results.
#pragma once

#include <CLI/CLI.hpp>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "integration/cli/options.h"

namespace gradgate::cli {

/// One subcommand: add_<name>() appends it. run() returns an ExitCode and may throw UsageError or RunError.
struct Command {
  CLI::App* app = nullptr;
  std::unique_ptr<OptionSet> options;
  std::function<int()> run;
  bool under_mpi = false;  ///< runs over the processes of an MPI job; the others refuse to be started more than once
};

struct Context {
  std::vector<std::string> argv;
  std::deque<Command> commands;

  /// A subcommand with the common layout of its help.
  Command& add(CLI::App& program, const std::string& name, const std::string& summary, const std::string& examples);
};

// One file per subcommand.
void add_demo(CLI::App& program, Context& context);
void add_bench(CLI::App& program, Context& context);
void add_allreduce(CLI::App& program, Context& context);
void add_doctor(CLI::App& program, Context& context);
void add_calibrate(CLI::App& program, Context& context);
void add_roundtrip(CLI::App& program, Context& context);
void add_model(CLI::App& program, Context& context);
void add_plan(CLI::App& program, Context& context);
void add_report(CLI::App& program, Context& context);

}  // namespace gradgate::cli
