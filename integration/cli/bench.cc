// gradgate bench: what the codecs cost on this machine, and on which links that pays.
#include "integration/cli/bench_device.h"
#include "integration/cli/bench_report.h"
#include "integration/cli/bench_run.h"
#include "integration/cli/context.h"
#include "integration/cli/device.h"
#include "integration/cli/error.h"
#include "integration/cli/quantity.h"

namespace gradgate::cli {
namespace {

constexpr const char* kFloorCodecs = "int8,fp8,int4,onebit,chunk-topk:8/1024,topk:0.01";  // the codecs that have goals

struct Arguments {
  BenchSetup setup;
  std::optional<CodecList> codecs;
  std::optional<uint64_t> bytes;
  bool floors = false;
  Device device = Device::cpu;
  OutputOptions output;
};

int run_on_device(const Arguments& arguments, BenchSetup setup, CodecList codecs, const Context& context, const OptionSet& options) {
  if (arguments.floors) throw UsageError("--floors: measures the CPU, not with --device cuda");
  require_cuda();
  codecs.restrict_to_device(setup.dtype, false);
  setup.codecs = codecs.codecs;
  Progress progress;
  const DeviceBenchResult result = run_device_bench(setup, progress);
  arguments.output.print(device_bench_table(setup, result));
  Json json = report_header("bench-device", context, options);
  json.update(device_bench_json(setup, result));
  arguments.output.finish(json);
  return wrong_values(result) == 0 ? kExitOk : kExitFailed;
}

int run(const Arguments& arguments, const Context& context, const OptionSet& options) {
  BenchSetup setup = arguments.setup;
  if (arguments.floors && setup.dtype != DType::f32) throw UsageError("--floors: its goals are for float gradients (-d float)");
  if (setup.peers && setup.dtype != DType::f32) throw UsageError("--peers: they take float gradients (-d float)");
  CodecList codecs = arguments.codecs ? *arguments.codecs : parse_codecs("codec", arguments.floors ? kFloorCodecs : "all");
  codecs.restrict_to(setup.dtype);
  setup.codecs = codecs.codecs;
  setup.exchange = !arguments.floors;
  setup.floors = arguments.floors;
  const size_t elements = arguments.floors ? size_t{64} << 20 : size_t{16} << 20;
  setup.count = arguments.bytes ? *arguments.bytes / dtype_bytes(setup.dtype) : elements;
  if (arguments.device == Device::cuda) return run_on_device(arguments, setup, codecs, context, options);

  Progress progress;
  const BenchResult result = run_bench(setup, progress);
  arguments.output.print(arguments.floors ? floors_table(setup, result) : bench_table(setup, result));
  Json json = report_header("bench", context, options);
  json.update(bench_json(setup, result));
  arguments.output.finish(json);
  return wrong_values(result) == 0 ? kExitOk : kExitFailed;
}

}  // namespace

void add_bench(CLI::App& program, Context& context) {
  Command& command = context.add(program, "bench", "encode and decode speed, ratio, error, and the link below which each codec pays",
                                 codec_help() +
                                     "\nExamples:\n"
                                     "  gradgate bench                     all codecs on 16 Mi elements\n"
                                     "  gradgate bench int8 chunk-topk:8/1024:bf16 -b 25MiB --threads 2\n"
                                     "  gradgate bench --floors            time over the memory floors, and the goals\n"
                                     "  gradgate bench topk:0.01 --peers   beside std::nth_element, torch.topk and torch's casts\n"
                                     "  gradgate bench --device cuda       kernels, over a copy within the device");
  auto arguments = std::make_shared<Arguments>();
  OptionSet& options = *command.options;
  const auto count_into = [](auto* value, uint64_t low, uint64_t high) {
    return [value, low, high](const std::string& option, const std::string& text) {
      const uint64_t count = parse_count(option, text);
      check_range(option, text, count, low, high);
      *value = static_cast<std::remove_pointer_t<decltype(value)>>(count);
    };
  };
  options.add("codec", "", "CODEC", "codecs to measure [all; with --floors those that have goals]", [arguments](const std::string& option, const std::string& text) {
    arguments->codecs = parse_codecs(option, text);
  });
  options.add("-b,--bytes", "", "SIZE", "size of the gradient [16 Mi elements, 64 Mi with --floors]", [arguments](const std::string& option, const std::string& text) {
    const uint64_t bytes = parse_size(option, text);
    check_range(option, text, bytes, 0, uint64_t{1} << 40);
    arguments->bytes = bytes;
  });
  options.add("-d,--datatype", "float", "TYPE", "float, bfloat16 or half",
              [arguments](const std::string& option, const std::string& text) { arguments->setup.dtype = parse_dtype(option, text); });
  options.add("-n,--rounds", "11", "N", "interleaved rounds; medians are taken over them", count_into(&arguments->setup.rounds, 1, 100000));
  options.add("--threads", "1", "N", "threads of the codec, pinned; thread ranks use 1", count_into(&arguments->setup.threads, 1, 1024));
  options.add("--ranks", "4", "N", "ranks of the exchange that the break-even bandwidth is for", count_into(&arguments->setup.ranks, 1, 1024));
  options.flag("--floors", "print time over the read and axpy floors of the same run, beside the goals", &arguments->floors);
  options.flag("--peers", "also time std::nth_element, and torch.topk and its casts where there is torch; with --device cuda those on the device", &arguments->setup.peers);
  options.add("--python", "python3", "PATH", "Python with torch, for --peers",
              [arguments](const std::string&, const std::string& text) { arguments->setup.python = text; });
  add_device_option(options, &arguments->device);
  arguments->output.add_to(options);
  command.run = [arguments, &context, &options] { return run(*arguments, context, options); };
}

}  // namespace gradgate::cli
