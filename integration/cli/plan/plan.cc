// gradgate plan: where compression pays, over messages and ranks, and what bucket sizes do to an overlapped step.
#include <algorithm>

#include "gate/models/parameters.h"
#include "integration/cli/context.h"
#include "integration/cli/error.h"
#include "integration/cli/file.h"
#include "integration/cli/json_fields.h"
#include "integration/cli/plan/break_even.h"
#include "integration/cli/plan/overlap.h"
#include "integration/cli/plan/page.h"
#include "integration/cli/quantity.h"
#include "integration/cli/report.h"

namespace gradgate::cli {
namespace {

constexpr double kPageSpan = 16;  // a page of one message shows sizes this far around it
constexpr uint64_t kLargestMessage = uint64_t{1} << 40;

// A text that is parsed once all options are known.
struct Given {
  std::string option, text;
  bool given() const { return !option.empty(); }
};

struct Arguments {
  Given link, inside, codecs, parameters, step, buckets, backward, encode_on;
  LinkTable table = builtin_links();
  std::vector<uint64_t> ranks, bytes;
  uint32_t ranks_per_node = 1;
  DType dtype = DType::f32;
  SpeedOptions speeds;
  std::string page;
  bool list_links = false;
  OutputOptions output;
};

// A name, rates, or the file of a profile.
void resolve_link(const Arguments& arguments, PlanNetwork* network) {
  const auto& [option, text] = arguments.link;
  if (text.size() > 5 && text.ends_with(".json")) {
    network->profile = read_profile(option, text);
    network->between.text = text;
    return;
  }
  network->between = parse_link(option, text, arguments.table);
}

void check_link(const std::string& option, const NamedLink& link) {
  Message why;
  if (!gate::check_parameter(gate::Parameter::alpha, link.link.alpha_s, &why).ok() ||
      !gate::check_parameter(gate::Parameter::beta, link.link.beta_bytes_per_s, &why).ok()) {
    throw UsageError(option + ": '" + link.text + "': " + why.text);
  }
}

PlanNetwork make_network(const Arguments& arguments) {
  if (!arguments.link.given())
    throw UsageError("--link: is missing; expected a file of gradgate calibrate (.json) or " +
                     link_grammar(arguments.table));
  PlanNetwork network;
  resolve_link(arguments, &network);
  if (!network.profile) check_link(arguments.link.option, network.between);
  network.ranks_per_node = arguments.ranks_per_node;
  network.inside = parse_link(arguments.inside.option, arguments.inside.text, arguments.table);
  check_link(arguments.inside.option, network.inside);
  for (const uint64_t ranks : arguments.ranks) {
    if (!network.takes(static_cast<uint32_t>(ranks))) {
      throw UsageError("--ranks: " + std::to_string(ranks) + " ranks do not fill nodes of " +
                       std::to_string(arguments.ranks_per_node) + " (--ranks-per-node)");
    }
  }
  return network;
}

// bf16 is always a candidate for f32 gradients: it is the cast that every framework offers.
CodecList make_codecs(const Arguments& arguments) {
  CodecList codecs = parse_codecs(arguments.codecs.option, arguments.codecs.text);
  codecs.restrict_to(arguments.dtype);
  std::erase_if(codecs.codecs, [](const NamedCodec& codec) { return codec.spec.id == CodecId::none; });
  const NamedCodec bf16 = parse_one_codec("bf16", "bf16");
  const auto is_bf16 = [](const NamedCodec& codec) { return codec.spec.id == CodecId::bf16; };
  if (codec_takes(bf16.spec, arguments.dtype) && std::none_of(codecs.codecs.begin(), codecs.codecs.end(), is_bf16))
    codecs.codecs.insert(codecs.codecs.begin(), bf16);
  return codecs;
}

int run_break_even(const Arguments& arguments, const Planner& planner, Json json) {
  std::vector<PlanCell> cells;
  std::vector<Crossover> crossovers;
  std::vector<uint32_t> all_ranks;
  const double low = static_cast<double>(arguments.bytes.front()), high = static_cast<double>(arguments.bytes.back());
  for (const uint64_t ranks : arguments.ranks) {
    all_ranks.push_back(static_cast<uint32_t>(ranks));
    for (const uint64_t bytes : arguments.bytes) {
      PlanCell cell = planner.cell(all_ranks.back(), static_cast<double>(bytes));
      const int considered = cell.decision.considered;
      if (considered > 0)
        cell.most_ranks =
            planner.most_ranks(planner.candidates()[static_cast<size_t>(considered) - 1].codec, cell.bytes);
      cells.push_back(std::move(cell));
    }
    const std::vector<Crossover> found = planner.crossovers(all_ranks.back(), low, high);
    crossovers.insert(crossovers.end(), found.begin(), found.end());
  }
  if (!arguments.page.empty()) {
    const double span = low == high ? kPageSpan : 1;
    write_whole(arguments.page, {plan_page(planner, all_ranks, planner.whole(low / span), high * span)});
  }
  arguments.output.print(break_even_table(planner, cells));
  json.update(break_even_json(planner, cells, crossovers));
  arguments.output.finish(json);
  return kExitOk;
}

int run_overlap(const Arguments& arguments, const Planner& planner, Json json) {
  if (!arguments.step.given())
    throw UsageError("--step: is missing; the time of a step without communication, expected " +
                     std::string(kTimeGrammar));
  if (arguments.ranks.size() != 1) throw UsageError("--ranks: expected one number of ranks together with --params");
  if (!arguments.page.empty()) throw UsageError("-o/--output: goes with the break-even table, not with --params");
  OverlapInput input;
  input.parameters = parse_parameters(arguments.parameters.option, arguments.parameters.text);
  check_range(arguments.parameters.option, arguments.parameters.text, input.parameters, 1, uint64_t{1} << 50);
  input.step_s = parse_time(arguments.step.option, arguments.step.text);
  if (input.step_s <= 0) throw UsageError(arguments.step.option + ": '" + arguments.step.text + "' is not above zero");
  input.backward_share = parse_share(arguments.backward.option, arguments.backward.text);
  const std::string& on = arguments.encode_on.text;
  if (on != "wire" && on != "compute")
    throw UsageError(arguments.encode_on.option + ": '" + on + "' is neither wire nor compute");
  input.encode = on == "compute" ? gate::EncodeOn::compute : gate::EncodeOn::wire;
  input.ranks = static_cast<uint32_t>(arguments.ranks.front());
  std::vector<OverlapRow> rows;
  for (const uint64_t bytes : parse_range(arguments.buckets.option, arguments.buckets.text, 4, parse_size)) {
    check_range(arguments.buckets.option, arguments.buckets.text, bytes, 1024, kLargestMessage);
    rows.push_back(overlap_row(planner, input, planner.whole(static_cast<double>(bytes))));
  }
  arguments.output.print(overlap_table(planner, input, rows));
  json.update(overlap_json(planner, input, rows));
  arguments.output.finish(json);
  return kExitOk;
}

int run(const Arguments& arguments, const Context& context, const OptionSet& options) {
  if (arguments.list_links) {
    arguments.output.print(link_table_text(arguments.table));
    arguments.output.finish({{"interconnects", link_table_json(arguments.table)}});
    return kExitOk;
  }
  const PlanNetwork network = make_network(arguments);
  if (arguments.speeds.decode_Bps && !arguments.speeds.encode_Bps)
    throw UsageError("--encode-rate: is missing; --decode-rate is the other half");
  if (arguments.speeds.encode_Bps && !arguments.speeds.bench_file.empty())
    throw UsageError("--encode-rate and --codec-times exclude each other");
  const CodecList codecs = make_codecs(arguments);
  const Planner planner(network, codec_speeds(codecs, arguments.dtype, arguments.speeds, network.profile),
                        arguments.dtype);
  Json json = report_header("plan", context, options);
  return arguments.parameters.given() ? run_overlap(arguments, planner, std::move(json))
                                      : run_break_even(arguments, planner, std::move(json));
}

}  // namespace

void add_plan(CLI::App& program, Context& context) {
  Command& command = context.add(
      program, "plan",
      "where compression pays: best candidate over message sizes and ranks; or the effect of bucket sizes on a step",
      codec_help() +
          "\nEverything is modelled (docs/cost-models.md); the gate's own formulas and rule choose.\n\n"
          "Examples:\n"
          "  gradgate plan --link ib-ndr --ranks 8..1024 --bytes 1MB..1GB\n"
          "  gradgate plan --link tcp-25:effective --ranks-per-node 8 --ranks 8..256 -o plan.html\n"
          "  gradgate plan --link 10gbit --ranks 8 --params 350M --step 420ms --buckets 1MiB..256MiB\n"
          "  gradgate plan --list-links");
  auto arguments = std::make_shared<Arguments>();
  OptionSet& options = *command.options;
  Arguments& a = *arguments;
  const auto text_into = [](Given* given) {
    return [given](const std::string& option, const std::string& text) { *given = {option, text}; };
  };
  const auto rate_into = [](std::optional<double>* value) {
    return [value](const std::string& option, const std::string& text) { *value = parse_bandwidth(option, text); };
  };
  options.add("--link", "", "LINK",
              "the link between ranks (between nodes, with --ranks-per-node): a profile of gradgate calibrate "
              "(FILE.json), or " +
                  link_grammar(),
              text_into(&a.link));
  options.add("--ranks", "8..1024", "RANGE",
              "ranks: one, a list, or low..high[*factor] (times 2 unless said), 1 ... 4096",
              [arguments](const std::string& option, const std::string& text) {
                arguments->ranks = parse_range(option, text, 2, parse_count);
                for (const uint64_t ranks : arguments->ranks) check_range(option, text, ranks, 1, gate::kMostRanks);
              });
  options.add("--bytes", "1MB..1GB", "RANGE", "gradient bytes of a message, likewise (times 4 unless said)",
              [arguments](const std::string& option, const std::string& text) {
                arguments->bytes = parse_range(option, text, 4, parse_size);
                for (const uint64_t bytes : arguments->bytes) check_range(option, text, bytes, 4, kLargestMessage);
              });
  options.add("-c,--codec", "int8", "LIST", "candidates beside dense; bf16 always is one for f32 gradients",
              text_into(&a.codecs));
  options.add("-d,--dtype", "f32", "TYPE", "gradients: float (f32) or bfloat16 (bf16)",
              [arguments](const std::string& option, const std::string& text) {
                arguments->dtype = parse_dtype(option, text);
              });
  options.add("--ranks-per-node", "1", "G", "ranks of a node; more than 1: two levels, and the hierarchical exchange",
              [arguments](const std::string& option, const std::string& text) {
                const uint64_t count = parse_count(option, text);
                check_range(option, text, count, 1, gate::kMostRanks);
                arguments->ranks_per_node = static_cast<uint32_t>(count);
              });
  options.add("--intra-link", "nvlink4", "LINK", "with --ranks-per-node: the link inside a node", text_into(&a.inside));
  options.add("--interconnects", "", "FILE", "JSON file with more names for links (docs/program.md)",
              [arguments](const std::string& option, const std::string& text) {
                arguments->table = parse_link_table(text, read_text(option, text));
              });
  options.add("--encode-rate", "", "RATE",
              "gradient bytes per second of encoding, for all codecs; else measured here in a second",
              rate_into(&a.speeds.encode_Bps));
  options.add("--decode-rate", "", "RATE", "of decoding [that of encoding]", rate_into(&a.speeds.decode_Bps));
  options.add("--codec-fixed", "", "TIME", "what every compressed exchange costs besides, e.g. kernel launches",
              [arguments](const std::string& option, const std::string& text) {
                arguments->speeds.fixed_s = parse_time(option, text);
              });
  options.add("--codec-times", "", "FILE", "codec speeds from a file of gradgate bench --json",
              [arguments](const std::string& option, const std::string& text) {
                arguments->speeds.bench_option = option;
                arguments->speeds.bench_file = text;
              });
  options.add("--params", "", "N",
              "plan an overlapped step of a model with N parameters instead of the table, e.g. 350M",
              text_into(&a.parameters));
  options.add("--step", "", "TIME", "with --params: a step without communication", text_into(&a.step));
  options.add("--buckets", "1MiB..256MiB", "RANGE", "with --params: bucket sizes", text_into(&a.buckets));
  options.add("--backward", "67%", "SHARE", "with --params: the backward pass as a share of the step, at its end",
              text_into(&a.backward));
  options.add("--encode-on", "wire", "WHERE",
              "with --params: wire (encoding runs beside the backward pass) or compute (it delays it)",
              text_into(&a.encode_on));
  options.add("-o,--output", "", "FILE", "also write a page with charts, one HTML file that loads nothing",
              [arguments](const std::string& option, const std::string& text) {
                if (!text.ends_with(".html") && !text.ends_with(".htm"))
                  throw UsageError(option + ": '" + text + "' does not end in .html");
                arguments->page = text;
              });
  options.flag("--list-links", "print all named interconnects with their numbers and sources", &a.list_links);
  a.output.add_to(options);
  command.run = [arguments, &context, &options] { return run(*arguments, context, options); };
}

}  // namespace gradgate::cli
