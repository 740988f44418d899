// The gradgate program: parses the command line, finds the subcommand, and turns failures into one line on standard
// error and an exit code.
#include <chrono>
#include <cstdio>
#include <exception>
#include <new>
#include <thread>

#include "integration/cli/context.h"
#include "integration/cli/device.h"
#include "integration/cli/error.h"
#include "integration/cli/mpi_world.h"
#include "integration/cli/report.h"

namespace gradgate::cli {

Command& Context::add(CLI::App& program, const std::string& name, const std::string& summary,
                      const std::string& examples) {
  Command& command = commands.emplace_back();
  command.app = program.add_subcommand(name, summary);
  command.app->footer("\n" + examples);
  command.options = std::make_unique<OptionSet>(command.app);
  return command;
}

namespace {

constexpr const char* kFooter = R"(
Quantities are a number and a unit: times 50us, 1.5ms; bandwidths 10gbit, 1.25GB/s; sizes 64K, 1MiB (powers of
1024: K M G KiB MiB GiB), 1MB (powers of 1000: kB MB GB). Every option can also be set as GRADGATE_<OPTION> or in a
JSON file (--config); a flag wins over the environment, that over the file.

Examples:
  gradgate demo                              the whole idea in a minute
  gradgate doctor --params 350M --step 420ms     what to do about a training here: leave it off, or which codec
  gradgate bench int8                        how fast, how small, how wrong; on which links it pays here
  gradgate allreduce -b 64K -e 16M -f 4 --ranks 4 --link 1gbit:50us
  mpirun -n 4 gradgate allreduce             the same over MPI
  gradgate roundtrip gradients.npy --codec int8
  gradgate model --link ib-ndr --ranks 256 --bytes 1GB --ratio 64 --codec-time 2ms
  gradgate plan --link tcp-25 --ranks 8..256 --bytes 1MB..1GB -o plan.html

Exit codes: 0 fine, 1 a wrong value or a failed run, 2 bad usage.)";

int run(Context& context) {
  std::vector<const OptionSet*> known;
  for (const Command& command : context.commands) known.push_back(command.options.get());
  for (Command& command : context.commands) {
    if (!command.app->parsed()) continue;
    if (const std::optional<MpiLaunch> launch = mpi_launch(); launch && launch->ranks > 1 && !command.under_mpi) {
      std::string able;
      for (const Command& other : context.commands) able += other.under_mpi ? " " + other.options->section() : "";
      throw UsageError(command.options->section() + " runs in one process; start it without the MPI launcher (" +
                       launch->variable + " is " + std::to_string(launch->ranks) + "). Under it run:" + able);
    }
    command.options->resolve(known);
    if (!command.options->print_config()) return command.run();
    std::fputs(command.options->config_text().c_str(), stdout);
    return kExitOk;
  }
  std::string names;
  for (const OptionSet* set : known) names += " " + set->section();
  throw UsageError("a subcommand is required, one of" + names + " (gradgate --help)");
}

int fail(int code, const std::string& text) {
  const std::optional<MpiLaunch> launch = mpi_launch();
  if (code == kExitUsage && launch && launch->rank != 0) {
    // Every rank found the same mistake and one says so: time for it, as the launcher ends the job with the first rank
    // that leaves.
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    return code;
  }
  std::fprintf(stderr, "gradgate: %s\n", text.c_str());
  leave_mpi(true);
  return code;
}

int main(int argc, char** argv) {
  CLI::App program{"gradgate: compress gradients only when it pays, and prove that it paid", "gradgate"};
  Context context;
  context.argv.assign(argv, argv + argc);
  program.require_subcommand(0,
                             1);  // none is refused by run(): CLI11 would say so even where an unknown word was given
  program.set_version_flag("--version", [] { return version_text() + "\n" + libraries_text(); }, "print the versions of the program and of the libraries it finds");
  program.footer(kFooter);
  program.get_formatter()->column_width(34);
  add_demo(program, context);
  add_bench(program, context);
  add_allreduce(program, context);
  add_doctor(program, context);
  add_calibrate(program, context);
  add_roundtrip(program, context);
  add_model(program, context);
  add_plan(program, context);
  add_report(program, context);

  int code = kExitOk;
  try {
    program.parse(argc, argv);
    code = run(context);
  } catch (const CLI::Success& request) {  // --help, --version
    program.exit(request);
  } catch (const CLI::ParseError& error) {
    return fail(kExitUsage, std::string(error.what()) + " (gradgate --help, gradgate <subcommand> --help)");
  } catch (const UsageError& error) {
    return fail(kExitUsage, error.what());
  } catch (const RunError& error) {
    return fail(kExitFailed, error.what());
  } catch (const std::bad_alloc&) {
    return fail(kExitFailed, "out of memory: try smaller sizes (-e) or fewer ranks");
  } catch (const std::exception& error) {
    return fail(kExitFailed, error.what());
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    return fail(kExitFailed, "standard output cannot be written");
  leave_mpi(false);
  return code;
}

}  // namespace
}  // namespace gradgate::cli

int main(int argc, char** argv) { return gradgate::cli::main(argc, argv); }
