// gradgate doctor: measures the link between these ranks and the codecs on them, and says what to do about a given
// training.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "integration/cli/buffer.h"
#include "integration/cli/calibrate/measure.h"
#include "integration/cli/calibrate/profile_store.h"
#include "integration/cli/context.h"
#include "integration/cli/doctor/advise.h"
#include "integration/cli/error.h"
#include "integration/cli/mpi_world.h"
#include "integration/cli/quantity.h"
#include "integration/cli/statistics.h"
#include "integration/cli/table.h"
#include "integration/cli/test_data.h"

namespace gradgate::cli {
namespace {

using gate::ProbeCollective;

constexpr uint64_t kLargestBucket = uint64_t{1} << 32;
constexpr uint64_t kSmallestProbe = 4096;

struct Arguments {
  std::string parameters, step;
  DType dtype = DType::f32;
  uint64_t bucket_bytes = 25 << 20, rounds = 5;
  int ranks = 0;
  CodecList codecs;
  std::optional<NamedLink> link;
  std::string profile_path;
  double timeout_s = 60, backward_share = 0.67;
  Device device = Device::cpu;
  OutputOptions output;
};

// The link between the ranks as the advice needs it.
struct LinkTimes {
  std::function<double(ProbeCollective, double)> seconds;
  double error = 0;
  std::string source;
  std::string refusal;  ///< not empty: the link cannot be judged
};

double exchange_seconds(const LinkTimes& link, Exchange exchange, double bytes, int ranks) {
  if (ranks == 1) return 0;
  switch (exchange) {
    case Exchange::all_reduce:
      return link.seconds(ProbeCollective::all_reduce, bytes);
    case Exchange::two_shot:
      return link.seconds(ProbeCollective::all_to_all, bytes) + link.seconds(ProbeCollective::all_gather, bytes);
    case Exchange::all_gather:
      return link.seconds(ProbeCollective::all_gather, ranks * bytes);
    case Exchange::hierarchical:
      break;  // refused before
  }
  return std::numeric_limits<double>::quiet_NaN();
}

LinkTimes given_link(const NamedLink& named, int ranks) {
  const LinkSpec link = named.link;
  return {
      [link, ranks](ProbeCollective collective, double bytes) {
        return gate::ring_line(collective, {link.alpha_s, link.beta_bytes_per_s}, static_cast<uint32_t>(ranks))(bytes);
      },
      0,
      "link as given, " + describe_rates(named),
      {}};
}

LinkTimes profiled_link(const Profile& profile, const std::string& path, int ranks) {
  double error = 0;
  for (const ProfileCollective* fitted : {&profile.all_reduce, &profile.all_gather, &profile.all_to_all}) {
    std::vector<double> errors;
    for (const ProfileError& e : fitted->errors) errors.push_back(std::fabs(e.relative));
    if (!errors.empty()) error = std::max(error, quantile(errors, 0.75));
  }
  return {[profile, ranks](ProbeCollective collective, double bytes) {
            const ProfileCollective& fitted = collective == ProbeCollective::all_reduce   ? profile.all_reduce
                                              : collective == ProbeCollective::all_gather ? profile.all_gather
                                                                                          : profile.all_to_all;
            gate::Link link{fitted.alpha_s, fitted.beta_bytes_per_s};
            for (const ProfilePiece& piece : fitted.pieces) {
              link = {piece.alpha_s, piece.beta_bytes_per_s};
              if (bytes <= piece.up_to_bytes) break;
            }
            return gate::ring_line(collective, link, static_cast<uint32_t>(ranks))(bytes);
          },
          error,
          "link from profile " + path,
          {}};
}

// Measured here and now: a sweep up to the bucket's size.
LinkTimes measured_link(Ranks& ranks, const Arguments& arguments, Progress& progress) {
  SweepSetup setup;
  for (uint64_t size = kSmallestProbe; size < arguments.bucket_bytes; size *= 4) setup.sizes.push_back(size);
  setup.sizes.push_back(arguments.bucket_bytes);
  setup.rounds = arguments.rounds;
  setup.seconds_per_size = 1;
  setup.timeout_s = arguments.timeout_s;
  const Sweep sweep = measure_sweep(ranks, setup, progress);
  auto curves = std::make_shared<std::vector<gate::Curve>>();
  LinkTimes link;
  std::vector<double> spreads;
  for (int c = 0; c < gate::kProbeCollectives; ++c) {
    std::vector<gate::FitPoint> points;
    for (const SweepPoint& point : sweep.collectives[c]) {
      points.push_back({point.bytes, point.seconds});
      if (point.rounds.size() > 1) spreads.push_back(relative_spread(point.rounds));
    }
    const CollectiveFit fit = fit_collective(static_cast<ProbeCollective>(c), points);
    if (!fit.refusal.empty()) {
      link.refusal = std::string(collective_text(fit.collective)) + ": " + fit.refusal;
      return link;
    }
    curves->push_back(fit.curve);
    std::vector<double> errors;
    for (const gate::FitPoint& point : fit.points)
      errors.push_back(std::fabs(fit.curve(point.bytes) / point.seconds - 1));
    link.error = std::max(link.error, quantile(errors, 0.75));
  }
  link.error = std::max(link.error, median(spreads));
  link.seconds = [curves](ProbeCollective collective, double bytes) {
    return (*curves)[static_cast<size_t>(collective)](bytes);
  };
  const gate::Link ring =
      gate::ring_link(ProbeCollective::all_reduce, curves->front().overall, static_cast<uint32_t>(ranks.size()));
  link.source =
      "link measured: all_reduce alpha " + format_time(ring.alpha_s) + ", beta " + format_bandwidth(ring.beta_Bps);
  return link;
}

// A bucket in device memory, on which exchanges are shadowed.
class DeviceBucket {
 public:
  DeviceBucket(const Buffer& gradient, size_t count)
      : gradient_(gradient.size()), residual_(count * sizeof(float)), record_(sizeof(ExchangeRecord)) {
    const auto& cuda = require_cuda();
    void* const stream = clock_.stream().handle;
    require_cuda_ok(cuda.copy(gradient_.data(), gradient.data(), gradient.size(), stream), "a copy");
    require_cuda_ok(cuda.fill(residual_.data(), 0, residual_.size(), stream), "a fill");
    require_cuda_ok(cuda.fill(record_.data(), 0, record_.size(), stream), "a fill");
  }
  Status shadow(ExchangeArgs args, const DeviceMemory& scratch, ExchangeTimes* times) {
    const DevicePlace place{clock_.stream(), record_.as<ExchangeRecord>(), nullptr};
    args.gradient.data = gradient_.data();
    if (args.residual != nullptr) args.residual = residual_.as<float>();
    args.device = &place;
    GRADGATE_TRY(enqueue_shadow(args, {scratch.data(), scratch.size()}, &clock_.marks()));
    *times = clock_.parts();
    return {};
  }

 private:
  DeviceClock clock_;
  DeviceMemory gradient_, residual_, record_;
};

// Encoding and decoding of one rank in an exchange of the bucket: the slowest rank's, all at work at once.
std::vector<CodecWork> measure_codec_work(Ranks& ranks, const Arguments& arguments, const CodecList& codecs,
                                          Progress& progress) {
  std::vector<CodecWork> result;
  const size_t count = arguments.bucket_bytes / dtype_bytes(arguments.dtype);
  ranks.run({}, [&](Communicator& carrier, Communicator& comm) {
    std::vector<CodecWork> list;
    Buffer gradient(count * dtype_bytes(arguments.dtype)), residual(count * sizeof(float));
    GradientLike().fill(static_cast<uint64_t>(comm.rank()), 0, {gradient.data(), count, arguments.dtype});
    std::optional<DeviceBucket> device;
    if (carrier.on_device()) device.emplace(gradient, count);
    for (const NamedCodec& codec : codecs.codecs) {
      if (comm.rank() == 0) progress.show(codec.text + " ...");
      CodecWork work;
      work.candidate = codec.candidate();
      work.name = codec.text;
      work.fidelity = codec_fidelity(codec.spec);
      const ExchangeShape shape{.candidate = work.candidate,
                                .count = count,
                                .dtype = arguments.dtype,
                                .rank = comm.rank(),
                                .ranks = comm.size(),
                                .width = 1,
                                .device = device.has_value()};
      work.wire_bytes = static_cast<double>(exchange_wire_bytes(shape));
      const Buffer scratch(device ? 0 : exchange_shadow_bytes(shape));
      const DeviceMemory device_scratch(device ? device_shadow_bytes(shape) : 0);
      const ExchangeArgs args{.shape = shape,
                              .gradient = {gradient.data(), count, arguments.dtype},
                              .residual = codec.spec.feedback ? residual.as<float>() : nullptr,
                              .feedback = codec.spec.feedback ? Feedback::apply : Feedback::none,
                              .workspace = {},
                              .seed = {},
                              .executor = {}};
      std::vector<double> encodes, decodes, sums;
      require(comm.barrier({}, Deadline::after(arguments.timeout_s)), comm, "barrier");
      for (uint64_t round = 0; round <= arguments.rounds; ++round) {
        ExchangeTimes times;
        const Status status = device ? device->shadow(args, device_scratch, &times)
                                     : shadow_exchange(comm, args, scratch.bytes(), {}, &times);
        if (!status.ok())
          throw RunError("rank " + std::to_string(comm.rank()) + ": " + codec.text + ": " + status.message());
        if (round == 0) continue;  // touches the memory for the first time
        encodes.push_back(times.encode_s);
        decodes.push_back(times.decode_s);
        sums.push_back(times.encode_s + times.decode_s);
      }
      const double mine[] = {median(encodes), median(decodes), quantile(sums, 0.25), quantile(sums, 0.75)};
      std::vector<double> all(std::size(mine) * static_cast<size_t>(comm.size()));
      require(comm.all_gather(mine, all.data(), std::size(mine), DType::f64, {}, Deadline::after(arguments.timeout_s)),
              comm, "gathering times");
      double* const slowest[] = {&work.encode_s, &work.decode_s, &work.codec_low_s, &work.codec_high_s};
      for (size_t i = 0; i < all.size(); ++i)
        *slowest[i % std::size(mine)] = std::max(*slowest[i % std::size(mine)], all[i]);
      list.push_back(work);
    }
    if (comm.rank() == ranks.first_local()) result = std::move(list);
  });
  progress.clear();
  return result;
}

// torchrun's environment: a process group this program cannot join.
void refuse_torchrun(const Arguments& arguments) {
  const char *world = std::getenv("WORLD_SIZE"), *rank = std::getenv("RANK");
  if (mpi_launch() || world == nullptr || rank == nullptr || std::getenv("MASTER_ADDR") == nullptr ||
      std::atoi(world) < 2)
    return;
  if (arguments.link || !arguments.profile_path.empty()) return;
  throw UsageError(
      "started by torchrun (RANK, WORLD_SIZE and MASTER_ADDR are set), whose process group this program cannot join: "
      "torchrun "
      "... -m gradgate doctor probes it. Or start this program on the same hosts with mpirun -n " +
      std::string(world) + ", or say what the link is: --link 25gbit:30us --ranks " + world);
}

std::string table_text(const DoctorNumbers& numbers, const Advice& advice) {
  const Table table({{"candidate", "", 20, true},
                     {"exchange", "", 10, true},
                     {"encode", "ms", 9},
                     {"decode", "ms", 9},
                     {"transfer", "ms", 9},
                     {"total", "ms", 9},
                     {"wire", "B", 11},
                     {"", "", 0, true}});
  const auto ms = [](double seconds) { return format_number(1e3 * seconds, 3); };
  std::string text =
      table.header() +
      table.row({"none (dense)", "all_reduce", "", "", ms(numbers.dense_s), ms(numbers.dense_s),
                 std::to_string(static_cast<uint64_t>(numbers.bucket_bytes)), advice.chosen == 0 ? "<-" : ""});
  for (size_t i = 0; i < numbers.codecs.size(); ++i) {
    const CodecWork& work = numbers.codecs[i];
    text += table.row({work.name, exchange_name(work.candidate.exchange), ms(work.encode_s), ms(work.decode_s),
                       ms(work.transfer_s), ms(work.encode_s + work.decode_s + work.transfer_s),
                       std::to_string(static_cast<uint64_t>(work.wire_bytes)),
                       advice.chosen == static_cast<int>(i) + 1 ? "<-" : ""});
  }
  return text;
}

Json advice_json(const DoctorNumbers& numbers, const Advice& advice) {
  Json candidates = Json::array();
  for (const CodecWork& work : numbers.codecs) {
    candidates.push_back({{"codec", work.name},
                          {"exchange", exchange_name(work.candidate.exchange)},
                          {"encode_s", number(work.encode_s)},
                          {"decode_s", number(work.decode_s)},
                          {"transfer_s", number(work.transfer_s)},
                          {"wire_bytes", work.wire_bytes}});
  }
  return {{"chosen",
           advice.chosen == 0 ? Json(nullptr) : Json(numbers.codecs[static_cast<size_t>(advice.chosen) - 1].name)},
          {"verdict", advice.verdict},
          {"why", gate::why_name(advice.decision.why)},
          {"buckets", advice.buckets},
          {"bucket_bytes", numbers.bucket_bytes},
          {"dense_s", number(numbers.dense_s)},
          {"link_error", number(numbers.link_error)},
          {"step_dense_s", number(advice.step_dense_s)},
          {"step_chosen_s", number(advice.step_chosen_s)},
          {"saving_s", number(advice.saving_s)},
          {"saving_low_s", number(advice.saving_low_s)},
          {"saving_high_s", number(advice.saving_high_s)},
          {"serial_saving_s", number(advice.serial_saving_s)},
          {"tolerable_inflation", number(advice.inflation)},
          {"residual_bytes", advice.residual_bytes},
          {"reasons", advice.reasons},
          {"candidates", candidates}};
}

int run(Arguments& arguments, const Context& context, const OptionSet& options) {
  if (arguments.parameters.empty())
    throw UsageError("--params: how many parameters the model has is needed, e.g. --params 350M");
  if (arguments.step.empty())
    throw UsageError("--step: the time of a step without communication is needed, e.g. --step 420ms");
  if (arguments.link && !arguments.profile_path.empty()) throw UsageError("--link and --profile exclude each other");
  DoctorNumbers numbers;
  numbers.parameters = static_cast<double>(parse_parameters("--params", arguments.parameters));
  numbers.step_s = parse_time("--step", arguments.step);
  numbers.backward_share = arguments.backward_share;
  if (numbers.parameters < 1) throw UsageError("--params: '" + arguments.parameters + "' is not above zero");
  if (numbers.step_s == 0) throw UsageError("--step: '" + arguments.step + "' is not above zero");
  CodecList codecs = arguments.codecs;
  std::erase_if(codecs.codecs, [&](const NamedCodec& codec) {
    return codec.spec.id == CodecId::none || (codec.spec.id == CodecId::bf16 && arguments.dtype == DType::bf16);
  });
  codecs.restrict_to(arguments.dtype);
  codecs.restrict_to_one_link();
  refuse_torchrun(arguments);

  const size_t element = dtype_bytes(arguments.dtype);
  numbers.gradient_bytes = numbers.parameters * static_cast<double>(element);
  arguments.bucket_bytes =
      std::min<uint64_t>(arguments.bucket_bytes, static_cast<uint64_t>(numbers.gradient_bytes)) / element * element;
  numbers.bucket_bytes = static_cast<double>(arguments.bucket_bytes);
  const std::unique_ptr<Ranks> ranks = Ranks::open("-t/--ranks", arguments.ranks, arguments.device);
  if (arguments.device == Device::cuda) codecs.restrict_to_device(arguments.dtype, true);
  arguments.output.silent = !ranks->prints();
  numbers.ranks = ranks->size();
  arguments.output.print(comment("gradgate doctor: " + arguments.parameters + " parameters, " +
                                 dtype_name(arguments.dtype) + " gradients in buckets of " +
                                 format_size(arguments.bucket_bytes) + ", " + arguments.step +
                                 " a step without communication\n" + machine_text() + "\n" + ranks->description({})));
  Progress progress;
  LinkTimes link;
  if (arguments.link) {
    link = given_link(*arguments.link, numbers.ranks);
  } else if (numbers.ranks > 1) {
    if (!arguments.profile_path.empty()) {
      std::string why;
      const auto profile = load_profile(arguments.profile_path, profile_key(*ranks, {}, arguments.timeout_s), &why);
      if (!profile && ranks->prints()) std::fprintf(stderr, "gradgate: %s\n", why.c_str());
      // Every rank looks at its own file; all must have the same, or all measure.
      bool all_have = profile.has_value();
      ranks->run({}, [&](Communicator&, Communicator& plain) {
        const double mine = profile ? 1 : 0;
        std::vector<double> all(static_cast<size_t>(plain.size()));
        require(plain.all_gather(&mine, all.data(), 1, DType::f64, {}, Deadline::after(arguments.timeout_s)), plain,
                "comparing profiles");
        if (plain.rank() == ranks->first_local()) all_have = *std::min_element(all.begin(), all.end()) == 1;
      });
      if (all_have) link = profiled_link(*profile, arguments.profile_path, numbers.ranks);
    }
    if (!link.seconds) link = measured_link(*ranks, arguments, progress);
  }
  if (!link.refusal.empty()) {
    const std::string verdict = "leave it off: the link between these ranks cannot be judged; " + link.refusal;
    arguments.output.print("gradgate: " + verdict + "\n");
    Json json = report_header("doctor", context, options);
    json["advice"] = {{"chosen", nullptr}, {"verdict", verdict}};
    arguments.output.finish(json);
    return kExitOk;
  }
  numbers.link_error = link.error;
  numbers.codecs = measure_codec_work(*ranks, arguments, codecs, progress);
  numbers.dense_s = exchange_seconds(link, Exchange::all_reduce, numbers.bucket_bytes, numbers.ranks);
  for (CodecWork& work : numbers.codecs)
    work.transfer_s = exchange_seconds(link, work.candidate.exchange, work.wire_bytes, numbers.ranks);

  const Advice advice = advise(numbers);
  std::string text = table_text(numbers, advice);
  if (!link.source.empty())
    text +=
        comment(link.source + (link.error > 0 ? ", times within " + format_number(100 * link.error, 2) + " %" : ""));
  for (const std::string& reason : advice.reasons) text += comment(reason);
  arguments.output.print(text + "gradgate: " + advice.verdict + "\n");
  Json json = report_header("doctor", context, options);
  json["ranks"] = ranks->description({});
  json["link"] = link.source;
  json["advice"] = advice_json(numbers, advice);
  arguments.output.finish(json);
  return kExitOk;
}

}  // namespace

void add_doctor(CLI::App& program, Context& context) {
  Command& command = context.add(
      program, "doctor", "measure link and codecs here, and advise: leave it off, or which codec and what it saves",
      "Examples:\n"
      "  mpirun -n 4 gradgate doctor --params 350M --dtype bf16 --step 420ms\n"
      "  gradgate doctor --params 350M --step 420ms --link 10gbit:30us --ranks 8 -c int8,chunk-topk:8/1024\n"
      "  gradgate doctor --params 7M --step 50ms --profile profile.json");
  auto arguments = std::make_shared<Arguments>();
  OptionSet& options = *command.options;
  options.add("--params", "", "N", "parameters of the model: a number and k, M or B",
              [arguments](const std::string&, const std::string& text) { arguments->parameters = text; });
  options.add("--step", "", "TIME", "a training step without communication",
              [arguments](const std::string&, const std::string& text) { arguments->step = text; });
  options.add("--backward", "67%", "SHARE", "the backward pass as a share of the step, at its end",
              [arguments](const std::string& option, const std::string& text) {
                arguments->backward_share = parse_share(option, text);
              });
  options.add("-d,--dtype", "float", "TYPE", "of the gradients: float, bfloat16 or half",
              [arguments](const std::string& option, const std::string& text) {
                arguments->dtype = parse_dtype(option, text);
              });
  options.add("--buckets", "25MiB", "SIZE", "bucket size, as DDP's bucket_cap_mb",
              [arguments](const std::string& option, const std::string& text) {
                arguments->bucket_bytes = parse_size(option, text);
                check_range(option, text, arguments->bucket_bytes, kSmallestProbe * 16, kLargestBucket);
              });
  options.add("-c,--codec", "bf16,int8", "LIST", "candidates beside dense; lossier ones take part only when listed",
              [arguments](const std::string& option, const std::string& text) {
                arguments->codecs = parse_codecs(option, text);
              });
  options.add("-t,--ranks", "", "N", "ranks, as threads of this process [4]; under mpirun its processes are the ranks",
              [arguments](const std::string& option, const std::string& text) {
                const uint64_t count = parse_count(option, text);
                check_range(option, text, count, 1, 1024);
                arguments->ranks = static_cast<int>(count);
              });
  options.add(
      "--link", "", "LINK", "take this link instead of measuring the one between these ranks: " + link_grammar(),
      [arguments](const std::string& option, const std::string& text) { arguments->link = parse_link(option, text); });
  options.add("--profile", "", "FILE",
              "take the link from a profile of gradgate calibrate; ignored with one line where it is not for here",
              [arguments](const std::string&, const std::string& text) { arguments->profile_path = text; });
  options.add("-n,--rounds", "5", "N", "rounds of each measurement",
              [arguments](const std::string& option, const std::string& text) {
                arguments->rounds = parse_count(option, text);
                check_range(option, text, arguments->rounds, 2, 1000);
              });
  options.add("--timeout", "60s", "TIME", "how long a rank waits for another",
              [arguments](const std::string& option, const std::string& text) {
                arguments->timeout_s = parse_time(option, text);
                if (arguments->timeout_s == 0) throw UsageError(option + ": '" + text + "' is not above zero");
              });
  add_device_option(options, &arguments->device);
  arguments->output.add_to(options);
  command.under_mpi = true;
  command.run = [arguments, &context, &options] { return run(*arguments, context, options); };
}

}  // namespace gradgate::cli
