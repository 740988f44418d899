// gradgate allreduce: what all_reduce_perf of nccl-tests is to NCCL, with a codec in the place of the data type's full width.
#include <algorithm>
#include <limits>

#include "integration/cli/allreduce_report.h"
#include "integration/cli/allreduce_run.h"
#include "integration/cli/calibrate/profile_store.h"
#include "integration/cli/context.h"
#include "integration/cli/error.h"
#include "integration/cli/quantity.h"

namespace gradgate::cli {
namespace {

constexpr const char* kOption = "-b/--minbytes";
constexpr uint64_t kLargestSize = uint64_t{1} << 40;
constexpr size_t kMostSizes = 10000;

struct Arguments {
  AllReduceSetup setup;
  int ranks = 0;  ///< 0: not given
  CodecList codecs;
  std::optional<uint64_t> min_bytes, max_bytes, step_bytes, step_factor;
  OutputOptions output;
};

// Sizes in bytes, whole elements, ascending.
std::vector<uint64_t> sizes(const Arguments& arguments) {
  const uint64_t low = arguments.min_bytes ? *arguments.min_bytes : std::min<uint64_t>(64 << 10, arguments.max_bytes.value_or(64 << 10));
  const uint64_t high = arguments.max_bytes ? *arguments.max_bytes : std::max<uint64_t>(16 << 20, low);
  if (low > high) {
    throw UsageError(std::string(kOption) + ": " + std::to_string(low) + " B is greater than -e/--maxbytes: " + std::to_string(high) + " B");
  }
  if (arguments.step_bytes && arguments.step_factor) throw UsageError("-i/--stepbytes and -f/--stepfactor exclude each other");
  const size_t element = dtype_bytes(arguments.setup.dtype);
  std::vector<uint64_t> list;
  for (uint64_t size = low; size <= high;) {
    const uint64_t whole = size / element * element;
    if (list.empty() || list.back() != whole) list.push_back(whole);
    if (list.size() > kMostSizes) throw UsageError("-i/--stepbytes: more than " + std::to_string(kMostSizes) + " sizes");
    // Sizes are at most 2^40, steps at most 2^40: no overflow. A size of 0 is followed by one element.
    size = arguments.step_bytes ? size + *arguments.step_bytes : (size == 0 ? element : size * arguments.step_factor.value_or(4));
  }
  return list;
}

// "4GB/s" or "4GB/s:8GB/s".
CodecRates parse_codec_rates(const std::string& option, const std::string& text) {
  const size_t colon = text.find(':');
  const double encode = parse_bandwidth(option, text.substr(0, colon));
  return {encode, colon == std::string::npos ? encode : parse_bandwidth(option, text.substr(colon + 1))};
}

int run(Arguments& arguments, const Context& context, const OptionSet& options) {
  const AllReduceSetup& setup = arguments.setup;
  if (setup.shaping.virtual_clock && !setup.shaping.link) throw UsageError("--virtual: needs --link, whose time it models");
  if (setup.rates.encode_bytes_per_s > 0 && !setup.shaping.virtual_clock) throw UsageError("--codec-rate: needs --virtual; a real clock measures the codec");
  CodecList codecs = arguments.codecs;
  codecs.restrict_to(setup.dtype);
  const std::vector<uint64_t> list = sizes(arguments);

  const std::unique_ptr<Ranks> ranks = Ranks::open("-t/--ranks", arguments.ranks, setup.device);
  if (setup.device == Device::cuda) codecs.restrict_to_device(setup.dtype, true);
  arguments.output.silent = !ranks->prints();
  for (const NamedCodec& codec : codecs.codecs) {
    if (codec.exchange != Exchange::hierarchical) continue;
    int& nodes_of = arguments.setup.ranks_per_node;
    if (nodes_of == 0) nodes_of = launcher_ranks_per_node();
    if (nodes_of == 0) throw UsageError("--ranks-per-node: " + codec.text + " needs it, and no launcher says it (OMPI_COMM_WORLD_LOCAL_SIZE, LOCAL_WORLD_SIZE, MPI_LOCALNRANKS, SLURM_NTASKS_PER_NODE)");
    if (ranks->size() % nodes_of != 0) throw UsageError("--ranks-per-node: " + std::to_string(ranks->size()) + " ranks are not equal nodes of " + std::to_string(nodes_of) + " ranks");
  }
  AllReduceReport report(ranks->size(), setup.dtype);
  const std::string where = ranks->description(setup.shaping);
  arguments.output.print(report.header(machine_text() + "\n" + where));
  Progress progress;
  for (const uint64_t size : list) {
    for (const NamedCodec& codec : codecs.codecs) {
      progress.show(codec.text + " " + format_size(size) + " ...");
      const size_t count = size / dtype_bytes(setup.dtype);
      const AllReduceCase measured = run_all_reduce(*ranks, setup, codec, count);
      progress.clear();
      arguments.output.print(report.add(codec, count, measured));
    }
  }
  arguments.output.print(report.footer());

  Json json = report_header("allreduce", context, options);
  json["ranks"] = where;
  json["results"] = report.results();
  json["summary"] = report.summary();
  arguments.output.finish(json);
  return report.exit_code();
}

}  // namespace

void add_allreduce(CLI::App& program, Context& context) {
  Command& command = context.add(program, "allreduce", "all-reduce of gradients through codecs, over ranks as threads or under mpirun; a table as in nccl-tests",
                                 codec_help() +
                                     "\nExamples:\n"
                                     "  gradgate allreduce -b 64K -e 16M -f 4 --ranks 4\n"
                                     "  gradgate allreduce -c int8,none -b 1M -e 64M --link 1gbit:50us -n 5\n"
                                     "  gradgate allreduce -c int8,bf16,none -b 1M -e 1M --ranks 8 --link ib-ndr --virtual --codec-rate 2GB/s\n"
                                     "  mpirun -n 4 gradgate allreduce -c int8,none\n"
                                     "  gradgate allreduce -c int8,none --device cuda --ranks 8\n\n"
                                     "Note for users of nccl-tests: -c is the codec here; results are always checked.");
  auto arguments = std::make_shared<Arguments>();
  OptionSet& options = *command.options;
  AllReduceSetup& setup = arguments->setup;
  const auto size_into = [](std::optional<uint64_t>* value, uint64_t low) {
    return [value, low](const std::string& option, const std::string& text) {
      const uint64_t size = parse_size(option, text);
      check_range(option, text, size, low, kLargestSize);
      *value = size;
    };
  };
  const auto count_into = [](auto* value, uint64_t low, uint64_t high) {
    return [value, low, high](const std::string& option, const std::string& text) {
      const uint64_t count = parse_count(option, text);
      check_range(option, text, count, low, high);
      *value = static_cast<std::remove_pointer_t<decltype(value)>>(count);
    };
  };
  options.add("-c,--codec", "all", "LIST", "codecs, separated by commas, or all", [arguments](const std::string& option, const std::string& text) {
    arguments->codecs = parse_codecs(option, text);
  });
  options.add("-b,--minbytes", "", "SIZE", "smallest vector [64K]", size_into(&arguments->min_bytes, 0));
  options.add("-e,--maxbytes", "", "SIZE", "largest vector [16M]", size_into(&arguments->max_bytes, 0));
  options.add("-f,--stepfactor", "", "N", "factor between sizes, 2 or more [4]", count_into(&arguments->step_factor, 2, kLargestSize));
  options.add("-i,--stepbytes", "", "SIZE", "increment between sizes, instead of -f", size_into(&arguments->step_bytes, 1));
  options.add("-n,--iters", "10", "N", "timed iterations", count_into(&setup.iterations, 1, 1000000));
  options.add("-w,--warmup-iters", "2", "N", "iterations before them", count_into(&setup.warmup, 0, 1000000));
  options.add("-d,--datatype", "float", "TYPE", "float, bfloat16 or half",
              [arguments](const std::string& option, const std::string& text) { arguments->setup.dtype = parse_dtype(option, text); });
  options.add("-t,--ranks", "", "N", "ranks, as threads of this process, 1 ... 1024 [4]; under mpirun its processes are the ranks", count_into(&arguments->ranks, 1, 1024));
  options.add("--ranks-per-node", "", "N", "ranks of a node, for codecs @hierarchical; --link is then between nodes [what the launcher says]",
              count_into(&setup.ranks_per_node, 1, 1024));
  options.add("--link", "", "LINK", "emulate a link between ranks: " + link_grammar() + "; or the file of a profile (profile.json)",
              [arguments](const std::string& option, const std::string& text) { arguments->setup.shaping.link = parse_link_or_profile(option, text); });
  options.flag("--virtual", "with --link: model time instead of waiting; results do not depend on the machine", &setup.shaping.virtual_clock);
  options.add("--codec-rate", "", "RATE[:RATE]", "with --virtual: gradient bytes per second of encoding and decoding, e.g. 2GB/s:4GB/s; free unless given",
              [arguments](const std::string& option, const std::string& text) { arguments->setup.rates = parse_codec_rates(option, text); });
  options.add("--timeout", "60s", "TIME", "how long a rank waits for another", [arguments](const std::string& option, const std::string& text) {
    arguments->setup.timeout_s = parse_time(option, text);
    if (arguments->setup.timeout_s == 0) throw UsageError(option + ": '" + text + "' is not above zero");
  });
  add_device_option(options, &setup.device);
  arguments->output.add_to(options);
  command.under_mpi = true;
  command.run = [arguments, &context, &options] { return run(*arguments, context, options); };
}

}  // namespace gradgate::cli
