// gradgate calibrate: measures the link between the ranks and the codecs on them, fits cost models, and writes a
// profile.
#include <algorithm>
#include <cmath>

#include "integration/cli/calibrate/measure.h"
#include "integration/cli/calibrate/nccl_import.h"
#include "integration/cli/calibrate/profile_store.h"
#include "integration/cli/context.h"
#include "integration/cli/error.h"
#include "integration/cli/json_fields.h"
#include "integration/cli/quantity.h"
#include "integration/cli/table.h"

namespace gradgate::cli {
namespace {

constexpr uint64_t kLargestSize = uint64_t{1} << 36;

struct Arguments {
  SweepSetup sweep;
  int ranks = 0;
  uint64_t min_bytes = 4096, max_bytes = 16 << 20, step_factor = 2, rounds_of_codecs = 5;
  CodecList codecs;
  std::vector<uint64_t> codec_bytes;
  std::string output_path;
  std::vector<std::string> imports;
  Device device = Device::cpu;
  OutputOptions output;
};

std::vector<uint64_t> sizes(const Arguments& arguments) {
  if (arguments.min_bytes > arguments.max_bytes) {
    throw UsageError("-b/--minbytes: " + std::to_string(arguments.min_bytes) +
                     " B is greater than -e/--maxbytes: " + std::to_string(arguments.max_bytes) + " B");
  }
  std::vector<uint64_t> list;
  for (uint64_t size = arguments.min_bytes; size <= arguments.max_bytes; size *= arguments.step_factor)
    list.push_back(size);
  if (list.size() < 4)
    throw UsageError("-f/--stepfactor: " + std::to_string(list.size()) +
                     " sizes from -b to -e, a fit needs at least 4");
  if (list.size() > gate::kMostCurvePoints)
    throw UsageError("-f/--stepfactor: more than " + std::to_string(gate::kMostCurvePoints) + " sizes");
  return list;
}

// To a tenth of a percent: less is noise.
std::string percent(double share) { return format_number(std::round(1000 * share) / 10, 2); }

// "alpha 51.2 us, beta 0.124 GB/s up to 64 KiB; …".
std::string link_text(const ProfileCollective& fitted) {
  const auto one = [](double alpha_s, double beta) {
    return "alpha " + format_time(alpha_s) + ", beta " + format_bandwidth(beta);
  };
  if (fitted.pieces.empty()) return one(fitted.alpha_s, fitted.beta_bytes_per_s);
  std::string text;
  for (const ProfilePiece& piece : fitted.pieces) {
    text += (text.empty() ? "" : "; ") + one(piece.alpha_s, piece.beta_bytes_per_s) +
            (std::isfinite(piece.up_to_bytes) ? " up to " + format_size(static_cast<uint64_t>(piece.up_to_bytes))
                                              : " above");
  }
  return text + " (one line: " + one(fitted.alpha_s, fitted.beta_bytes_per_s) + ")";
}

Table sweep_table() {
  return Table({{"size", "B", 11},
                {"collective", "", 10, true},
                {"time", "us", 10},
                {"fit", "us", 10},
                {"error", "%", 7},
                {"", "", 0, true}});
}

std::string sweep_rows(const Table& table, const CollectiveFit& fit) {
  std::string text;
  for (size_t i = 0; i < fit.points.size(); ++i) {
    const gate::FitPoint& point = fit.points[i];
    const bool fitted = fit.refusal.empty();
    const double predicted = fitted ? fit.curve(point.bytes) : std::nan("");
    text +=
        table.row({std::to_string(static_cast<uint64_t>(point.bytes)), collective_text(fit.collective),
                   format_number(point.seconds * 1e6, 4), format_number(predicted * 1e6, 4),
                   percent(predicted / point.seconds - 1), fitted && (fit.curve.outliers >> i & 1) ? "left out" : ""});
  }
  return text;
}

Json points_json(const CollectiveFit& fit, const Sweep& sweep) {
  Json list = Json::array();
  for (const SweepPoint& point : sweep.collectives[static_cast<int>(fit.collective)]) {
    Json rounds = Json::array();
    for (const double seconds : point.rounds) rounds.push_back(number(seconds * 1e6));
    const auto at =
        std::find_if(fit.points.begin(), fit.points.end(), [&](const auto& p) { return p.bytes == point.bytes; });
    const bool fitted = fit.refusal.empty() && at != fit.points.end();
    list.push_back({{"collective", collective_text(fit.collective)},
                    {"size_bytes", point.bytes},
                    {"time_us", number(point.seconds * 1e6)},
                    {"fit_us", fitted ? number(fit.curve(point.bytes) * 1e6) : Json(nullptr)},
                    {"left_out", fitted && (fit.curve.outliers >> (at - fit.points.begin()) & 1)},
                    {"times_us", rounds}});
  }
  return list;
}

int run_import(const Arguments& arguments, const Context& context, const OptionSet& options) {
  std::vector<NcclResults> files;
  for (const std::string& path : arguments.imports)
    files.push_back(parse_nccl_results(path, read_text("--import", path)));
  const Profile profile = import_nccl(files, arguments.imports);
  std::string text = "gradgate calibrate: from results of nccl-tests, " + std::to_string(profile.key.world_size) +
                     " ranks of " + profile.key.device + ", " + profile.key.topology;
  const std::pair<const char*, const ProfileCollective*> fitted[] = {
      {"all_reduce", &profile.all_reduce}, {"all_gather", &profile.all_gather}, {"all_to_all", &profile.all_to_all}};
  for (const auto& [name, collective] : fitted) text += std::string("\n") + name + ": " + link_text(*collective);
  if (!arguments.output_path.empty()) store_profile(arguments.output_path, profile);
  arguments.output.print(comment(text));
  Json json = report_header("calibrate", context, options);
  json["profile"] = profile_json(profile);
  arguments.output.finish(json);
  return kExitOk;
}

int run(Arguments& arguments, const Context& context, const OptionSet& options) {
  if (!arguments.imports.empty()) return run_import(arguments, context, options);
  SweepSetup& setup = arguments.sweep;
  if (setup.shaping.virtual_clock && !setup.shaping.link)
    throw UsageError("--virtual: needs --link, whose time it models");
  setup.sizes = sizes(arguments);
  CodecList codecs = arguments.codecs;
  codecs.restrict_to(DType::f32);
  std::erase_if(codecs.codecs, [](const NamedCodec& codec) { return codec.spec.id == CodecId::none; });

  const std::unique_ptr<Ranks> ranks = Ranks::open("-t/--ranks", arguments.ranks, arguments.device);
  if (arguments.device == Device::cuda) codecs.restrict_to_device(DType::f32, false);
  if (ranks->size() < 2) throw UsageError("-t/--ranks: 1 rank has no link to measure; 2 or more");
  arguments.output.silent = !ranks->prints();
  const std::string where = ranks->description(setup.shaping);
  arguments.output.print(
      comment("gradgate calibrate: median over rounds of the slowest rank, less the spread of an empty barrier\n" +
              machine_text() + "\n" + where));
  Profile profile;
  profile.key = profile_key(*ranks, setup.shaping, setup.timeout_s);
  Progress progress;
  const Sweep sweep = measure_sweep(*ranks, setup, progress);

  const Table table = sweep_table();
  std::string text = table.header(), summary, refused;
  Json results = Json::array();
  ProfileCollective* const places[] = {&profile.all_reduce, &profile.all_gather, &profile.all_to_all};
  for (int c = 0; c < gate::kProbeCollectives; ++c) {
    std::vector<gate::FitPoint> points;
    for (const SweepPoint& point : sweep.collectives[c]) points.push_back({point.bytes, point.seconds});
    const CollectiveFit fit = fit_collective(static_cast<gate::ProbeCollective>(c), points);
    text += sweep_rows(table, fit);
    for (Json& row : points_json(fit, sweep)) results.push_back(std::move(row));
    const std::string name = collective_text(fit.collective);
    if (fit.refusal.empty()) {
      *places[c] = profile_collective(fit, profile.key.world_size);
      summary += name + ": " + link_text(*places[c]) + ", largest error " + percent(fit.curve.max_error) +
                 " %, confidence " + format_number(fit.curve.confidence, 3) + "\n";
    } else {
      summary += name + ": REFUSED, " + fit.refusal + "\n";
      refused += (refused.empty() ? "" : ", ") + name;
    }
  }
  arguments.output.print(text + comment(summary.substr(0, summary.size() - 1)));

  if (!codecs.codecs.empty()) {
    profile.codecs = measure_codecs(*ranks, codecs.codecs, DType::f32, arguments.codec_bytes,
                                    arguments.rounds_of_codecs, setup.timeout_s, progress);
    const Table columns({{"size", "B", 11}, {"codec", "", 18, true}, {"encode", "us", 10}, {"decode", "us", 10}});
    std::string rows = columns.header();
    for (const ProfileCodec& codec : profile.codecs) {
      rows += columns.row({std::to_string(static_cast<uint64_t>(codec.bytes)), codec.codec,
                           format_number(codec.encode_s * 1e6, 4), format_number(codec.decode_s * 1e6, 4)});
    }
    arguments.output.print(rows);
  }

  Json json = report_header("calibrate", context, options);
  json["ranks"] = where;
  json["barrier_spread_us"] = number(sweep.barrier_spread_s * 1e6);
  json["results"] = results;
  json["profile"] = refused.empty() ? profile_json(profile) : Json(nullptr);
  arguments.output.finish(json);
  if (!refused.empty()) {
    if (ranks->prints()) {
      std::fprintf(
          stderr,
          "gradgate: no profile: the fit of %s was refused; a gate without one probes for itself or stays dense\n",
          refused.c_str());
    }
    return kExitFailed;
  }
  if (!arguments.output_path.empty() && ranks->prints()) {
    store_profile(arguments.output_path, profile);
    arguments.output.print(comment("profile written to " + arguments.output_path));
  }
  return kExitOk;
}

}  // namespace

void add_calibrate(CLI::App& program, Context& context) {
  Command& command = context.add(program, "calibrate", "measure link and codecs, fit cost models, write a profile",
                                 "Examples:\n"
                                 "  gradgate calibrate -o profile.json\n"
                                 "  mpirun -n 4 gradgate calibrate -o profile.json -e 64M\n"
                                 "  gradgate calibrate --link 1gbit:50us --virtual -c int8\n"
                                 "  gradgate calibrate --import all_reduce.json,all_gather.json -o nccl.json");
  auto arguments = std::make_shared<Arguments>();
  OptionSet& options = *command.options;
  SweepSetup& sweep = arguments->sweep;
  const auto size_into = [](uint64_t* value) {
    return [value](const std::string& option, const std::string& text) {
      *value = parse_size(option, text);
      check_range(option, text, *value, 64, kLargestSize);
    };
  };
  const auto count_into = [](auto* value, uint64_t low, uint64_t high) {
    return [value, low, high](const std::string& option, const std::string& text) {
      const uint64_t count = parse_count(option, text);
      check_range(option, text, count, low, high);
      *value = static_cast<std::remove_pointer_t<decltype(value)>>(count);
    };
  };
  options.add("-o,--output", "", "FILE", "write the profile to FILE; it appears whole or not at all",
              [arguments](const std::string&, const std::string& text) { arguments->output_path = text; });
  options.add("-b,--minbytes", "4K", "SIZE", "smallest vector", size_into(&arguments->min_bytes));
  options.add("-e,--maxbytes", "16M", "SIZE", "largest vector", size_into(&arguments->max_bytes));
  options.add("-f,--stepfactor", "2", "N", "factor between sizes", count_into(&arguments->step_factor, 2, 1024));
  options.add("-n,--rounds", "9", "N", "timed rounds of each size", count_into(&sweep.rounds, 1, 10000));
  options.add("-w,--warmup-iters", "2", "N", "operations before them, 1 or more", count_into(&sweep.warmup, 1, 10000));
  options.add("--per-size", "2s", "TIME", "a size whose rounds would take longer is measured in fewer, at least 3",
              [arguments](const std::string& option, const std::string& text) {
                arguments->sweep.seconds_per_size = parse_time(option, text);
              });
  options.add("-c,--codec", "bf16,int8", "LIST", "codecs to time on the ranks (none: no codec)",
              [arguments](const std::string& option, const std::string& text) {
                arguments->codecs = parse_codecs(option, text);
              });
  options.add("--buckets", "1MiB,4MiB,25MiB", "SIZE,...", "gradients to time codecs on",
              [arguments](const std::string& option, const std::string& text) {
                arguments->codec_bytes.clear();
                for (const std::string& part : split_list(option, text)) {
                  arguments->codec_bytes.push_back(parse_size(option, part));
                  check_range(option, part, arguments->codec_bytes.back(), 4, kLargestSize);
                }
              });
  options.add("-t,--ranks", "", "N",
              "ranks, as threads of this process, 2 ... 1024 [4]; under mpirun its processes are the ranks",
              count_into(&arguments->ranks, 1, 1024));
  options.add("--link", "", "LINK", "emulate a link between ranks: " + link_grammar(),
              [arguments](const std::string& option, const std::string& text) {
                arguments->sweep.shaping.link = parse_link(option, text);
              });
  options.flag("--virtual", "with --link: model time instead of waiting", &sweep.shaping.virtual_clock);
  options.add("--import", "", "FILE,...", "measure nothing: take results of nccl-tests (-J), one file per collective",
              [arguments](const std::string& option, const std::string& text) {
                arguments->imports = split_list(option, text);
              });
  options.add("--timeout", "60s", "TIME", "how long a rank waits for another",
              [arguments](const std::string& option, const std::string& text) {
                arguments->sweep.timeout_s = parse_time(option, text);
                if (arguments->sweep.timeout_s == 0) throw UsageError(option + ": '" + text + "' is not above zero");
              });
  add_device_option(options, &arguments->device);
  arguments->output.add_to(options);
  command.under_mpi = true;
  command.run = [arguments, &context, &options] { return run(*arguments, context, options); };
}

}  // namespace gradgate::cli
