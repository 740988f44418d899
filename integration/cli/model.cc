// gradgate model: the cost models, for one link, one number of ranks and one size.
#include <array>

#include "gate/models/parameters.h"
#include "integration/cli/context.h"
#include "integration/cli/error.h"
#include "integration/cli/json_fields.h"
#include "integration/cli/link.h"
#include "integration/cli/model_numbers.h"
#include "integration/cli/quantity.h"
#include "integration/cli/report.h"

namespace gradgate::cli {
namespace {

using gate::Parameter;

// A text that is parsed once all options are known: names of links may come from a file given later.
struct Given {
  std::string option, text;
  bool given() const { return !option.empty(); }
};

struct Arguments {
  Given link, intra_link;
  std::optional<double> alpha_s, beta_Bps, intra_alpha_s, intra_beta_Bps;
  std::optional<uint32_t> ranks, ranks_per_node;
  std::optional<double> bytes, codec_fixed_s, codec_rate_Bps, bubble, messages;
  std::string pipeline_option;
  std::optional<ModelInput::Pipeline> pipeline;
  LinkTable table = builtin_links();
  ModelInput input;
  OutputOptions output;
};

double checked(const std::string& option, const std::string& text, Parameter parameter, double value) {
  Message why;
  if (gate::check_parameter(parameter, value, &why).ok()) return value;
  throw UsageError(option + ": '" + text + "': " + why.text);
}

// "8,16" or "8,16,4".
ModelInput::Pipeline parse_pipeline(const std::string& option, const std::string& text) {
  const std::vector<std::string> parts = split_list(option, text);
  if (parts.size() < 2 || parts.size() > 3) {
    throw UsageError(option + ": '" + text +
                     "' is not stages,micro-batches or stages,micro-batches,chunks; e.g. 8,16 or 8,16,4");
  }
  const std::array<Parameter, 3> parameters = {Parameter::stages, Parameter::micro_batches, Parameter::chunks};
  std::array<double, 3> values = {1, 1, 1};
  for (size_t i = 0; i < parts.size(); ++i) {
    values[i] = checked(option, text, parameters[i], static_cast<double>(parse_count(option, parts[i])));
  }
  return {values[0], values[1], values[2], {}};
}

// "o_s,L,g,G,o_r" as times.
gate::LogGP parse_loggp(const std::string& option, const std::string& text) {
  const std::vector<std::string> parts = split_list(option, text);
  if (parts.size() != 5)
    throw UsageError(option + ": '" + text + "' is not the five times o_s,L,g,G,o_r; e.g. 2us,3us,1us,0.02ns,2us");
  std::array<double, 5> v{};
  for (size_t i = 0; i < parts.size(); ++i) {
    v[i] = checked(option, text, i == 3 ? Parameter::gap_per_byte : Parameter::overhead, parse_time(option, parts[i]));
  }
  return {v[0], v[1], v[2], v[3], v[4]};
}

// A named link, its parts, or both: a part wins over the name.
gate::Link resolve_link(const Arguments& arguments, const Given& named, std::optional<double> alpha_s,
                        std::optional<double> beta_Bps, const char* prefix) {
  gate::Link link;
  if (named.given()) {
    const LinkSpec spec = parse_link(named.option, named.text, arguments.table).link;
    link = {checked(named.option, named.text, Parameter::alpha, spec.alpha_s),
            checked(named.option, named.text, Parameter::beta, spec.beta_bytes_per_s)};
  } else if (!alpha_s || !beta_Bps) {
    const std::string p = std::string("--") + prefix;
    throw UsageError((alpha_s ? p + "beta" : p + "alpha") + ": is missing; a link is " + p + "link, or " + p +
                     "alpha and " + p + "beta");
  }
  return {alpha_s.value_or(link.alpha_s), beta_Bps.value_or(link.beta_Bps)};
}

int run(Arguments arguments) {
  ModelInput& in = arguments.input;
  in.link = resolve_link(arguments, arguments.link, arguments.alpha_s, arguments.beta_Bps, "");
  if (!arguments.ranks) throw UsageError("--ranks: is missing; expected " + std::string(kCountGrammar));
  if (!arguments.bytes) throw UsageError("--bytes: is missing; expected " + std::string(kSizeGrammar));
  in.ranks = *arguments.ranks;
  in.bytes = *arguments.bytes;
  const bool intra = arguments.intra_link.given() || arguments.intra_alpha_s || arguments.intra_beta_Bps;
  if (intra && !arguments.ranks_per_node)
    throw UsageError("--ranks-per-node: is missing; --intra-... describe a link inside a node");
  if (arguments.ranks_per_node) {
    Message why;
    if (!gate::check_nodes(in.ranks, *arguments.ranks_per_node, &why).ok())
      throw UsageError(std::string("--ranks-per-node: ") + why.text);
    in.nodes = {*arguments.ranks_per_node, resolve_link(arguments, arguments.intra_link, arguments.intra_alpha_s,
                                                        arguments.intra_beta_Bps, "intra-")};
  }
  if (arguments.codec_fixed_s && !arguments.codec_rate_Bps)
    throw UsageError("--codec-rate: is missing; --codec-fixed is the other half of a codec's time");
  if (arguments.codec_rate_Bps) in.codec_rate = {arguments.codec_fixed_s.value_or(0), *arguments.codec_rate_Bps};
  if (arguments.bubble && !arguments.pipeline) throw UsageError("--bubble: needs --pipeline, whose stages it is for");
  if (arguments.messages && !in.loggp) throw UsageError("--messages: needs --loggp, which prices a train of messages");
  if (in.loggp && in.bytes < 1) throw UsageError("--loggp: prices messages of at least 1 byte (--bytes)");
  in.pipeline = arguments.pipeline;
  if (in.pipeline) in.pipeline->target = arguments.bubble;
  in.messages = arguments.messages.value_or(1);

  const std::string link = "alpha " + format_time(in.link.alpha_s) + ", beta " + format_bandwidth(in.link.beta_Bps) +
                           (arguments.link.given() ? " (" + arguments.link.text + ")" : "");
  arguments.output.print(model_text(in, link));
  arguments.output.finish(model_json(in));
  return kExitOk;
}

}  // namespace

void add_model(CLI::App& program, Context& context) {
  Command& command = context.add(
      program, "model", "what collectives, compressed exchanges and pipelines cost, by formula",
      "Every formula, its validity and its source: docs/cost-models.md.\n\n"
      "Examples:\n"
      "  gradgate model --alpha 5us --beta 50GB/s --ranks 256 --bytes 1GB --ratio 64 --codec-time 2ms\n"
      "  gradgate model --link ib-ndr --ranks 256 --bytes 1GB --ranks-per-node 8 --intra-link nvlink4 --json\n"
      "  gradgate model --link tcp-10:effective --ranks 8 --bytes 25MiB --pipeline 8,16,4 --bubble 10%");
  auto arguments = std::make_shared<Arguments>();
  OptionSet& options = *command.options;
  const auto text_into = [](Given* given) {
    return [given](const std::string& option, const std::string& text) { *given = {option, text}; };
  };
  const auto real_into = [](std::optional<double>* value, Parameter parameter,
                            double (*parse)(std::string_view, std::string_view)) {
    return [=](const std::string& option, const std::string& text) {
      *value = checked(option, text, parameter, parse(option, text));
    };
  };
  const auto count_into = [](std::optional<uint32_t>* value, Parameter parameter) {
    return [=](const std::string& option, const std::string& text) {
      *value = static_cast<uint32_t>(checked(option, text, parameter, static_cast<double>(parse_count(option, text))));
    };
  };
  Arguments& a = *arguments;
  options.add("--link", "", "LINK", "the link, between nodes where there are two levels: " + link_grammar(),
              text_into(&a.link));
  options.add("--alpha", "", "TIME", "start-up time of one message, instead of the link's",
              real_into(&a.alpha_s, Parameter::alpha, parse_time));
  options.add("--beta", "", "RATE", "bandwidth of one rank in one direction, instead of the link's",
              real_into(&a.beta_Bps, Parameter::beta, parse_bandwidth));
  options.add("--interconnects", "", "FILE", "JSON file with more names for links (docs/program.md)",
              [arguments](const std::string& option, const std::string& text) {
                arguments->table = parse_link_table(text, read_text(option, text));
              });
  options.add("--ranks", "", "N", "ranks", count_into(&a.ranks, Parameter::ranks));
  options.add("--bytes", "", "SIZE", "bytes of the whole vector, or of the message",
              [arguments](const std::string& option, const std::string& text) {
                arguments->bytes =
                    checked(option, text, Parameter::bytes, static_cast<double>(parse_size(option, text)));
              });
  options.add("--ratio", "", "R", "compression: dense bytes over payload bytes",
              real_into(&a.input.ratio, Parameter::ratio, parse_number));
  options.add("--codec-time", "", "TIME", "encode + decode of one rank",
              real_into(&a.input.codec_s, Parameter::codec_time, parse_time));
  options.add("--codec-rate", "", "RATE", "encode + decode as a throughput, for the break-even size",
              real_into(&a.codec_rate_Bps, Parameter::codec_rate, parse_bandwidth));
  options.add("--codec-fixed", "", "TIME", "with --codec-rate: what a codec costs on an empty vector",
              real_into(&a.codec_fixed_s, Parameter::codec_time, parse_time));
  options.add("--ranks-per-node", "", "G", "ranks of a node; divides --ranks",
              count_into(&a.ranks_per_node, Parameter::ranks_per_node));
  options.add("--intra-link", "", "LINK", "the link inside a node", text_into(&a.intra_link));
  options.add("--intra-alpha", "", "TIME", "its start-up time",
              real_into(&a.intra_alpha_s, Parameter::alpha, parse_time));
  options.add("--intra-beta", "", "RATE", "its bandwidth",
              real_into(&a.intra_beta_Bps, Parameter::beta, parse_bandwidth));
  options.add("--pipeline", "", "P,M[,V]", "bubble of P stages, M micro-batches, V model chunks per stage",
              [arguments](const std::string& option, const std::string& text) {
                arguments->pipeline = parse_pipeline(option, text);
              });
  options.add("--bubble", "", "SHARE", "with --pipeline: micro-batches for a bubble of at most this",
              real_into(&a.bubble, Parameter::bubble, parse_share));
  options.add("--loggp", "", "LIST", "o_s,L,g,G,o_r as times: LogGP for messages of --bytes",
              [arguments](const std::string& option, const std::string& text) {
                arguments->input.loggp = parse_loggp(option, text);
              });
  options.add("--messages", "", "N", "with --loggp: messages of the train",
              [arguments](const std::string& option, const std::string& text) {
                arguments->messages =
                    checked(option, text, Parameter::messages, static_cast<double>(parse_count(option, text)));
              });
  a.output.add_to(options);
  command.run = [arguments] { return run(*arguments); };
}

}  // namespace gradgate::cli
