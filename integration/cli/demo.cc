// gradgate demo: the whole idea in about a minute. Trains a small network on real handwritten digits with every codec,
// then shows per link what a step costs, what the gate chose and why, and whether that was right.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>

#include "integration/cli/context.h"
#include "integration/cli/demo_runs.h"
#include "integration/cli/error.h"
#include "integration/cli/link.h"
#include "integration/cli/quantity.h"
#include "integration/cli/report.h"
#include "integration/cli/table.h"

namespace gradgate::cli {
namespace {

/// A choice more than this slower than the best fixed one is called a miss.
constexpr double kMissTolerance = 1.05;
/// Two medians closer than this are called equal in the sentence.
constexpr double kSameTolerance = 0.05;

struct DemoOptions {
  DemoSetup setup;
  std::optional<std::vector<std::string>> links;  ///< as given
  bool quick = false;
  Device device = Device::cpu;
  OutputOptions output;
};

std::string percent(double share) { return format_number(100 * share, 3) + " %"; }
std::string ms(double seconds) { return format_number(1e3 * seconds, 3); }

std::string link_title(const DemoOptions& o, const std::string& text) {
  if (text != "none") return describe_link(parse_link("--links", text));
  return o.device == Device::cuda ? "no emulated link: NCCL's, between the ranks' devices"
                                  : "no link: the thread ranks share this machine's memory";
}

/// The links to show: as given, else by the other options.
std::vector<std::string> links_of(const DemoOptions& o) {
  using List = std::vector<std::string>;
  if (o.device == Device::cpu)
    return o.links.value_or(o.quick ? List{"none", "1gbit"} : List{"none", "10gbit", "1gbit"});
  if (o.links && *o.links != List{"none"})
    throw UsageError("--links: emulates links between ranks of host memory; with --device cuda only 'none'");
  return {"none"};
}

/// The fastest fixed choice, as an index into setup.codecs.
size_t best_fixed(const LinkResult& result) {
  size_t best = 0;
  for (size_t c = 1; c < result.fixed.size(); ++c)
    if (result.fixed[c].median_s < result.fixed[best].median_s) best = c;
  return best;
}

double regret(const LinkResult& result) {
  return result.automatic.median_s / result.fixed[best_fixed(result)].median_s;
}

/// One sentence for a person who skipped the table.
std::string meaning(const DemoSetup& setup, const LinkResult& result, double dense_accuracy) {
  const double gain = result.fixed[0].median_s / result.automatic.median_s;
  const std::string points = format_number(100 * (result.accuracy - dense_accuracy), 2);
  const std::string best = setup.codecs[best_fixed(result)];
  if (result.settle_steps < 0)
    return "In " + std::to_string(setup.recipe.steps) +
           " steps the gate did not get past its measurements; a longer run (--steps) lets it settle.";
  if (result.chosen == "none") {
    if (result.fixed[0].median_s <= result.fixed[best_fixed(result)].median_s * (1 + kSameTolerance))
      return "Compression does not pay here: the gate left it off, and a step takes " + ms(result.automatic.median_s) +
             " ms, as it would without gradgate.";
    return "The gate stayed dense although " + best + " was " +
           format_number(result.fixed[0].median_s / result.fixed[best_fixed(result)].median_s, 3) +
           "x faster in the windows: a miss.";
  }
  if (gain > 1 + kSameTolerance)
    return "Compression pays here: with " + result.chosen + " a step is " + format_number(gain, 3) +
           "x faster than dense, at " + points + " points of test accuracy after equal steps.";
  return "The gate chose " + result.chosen + ", but the windows show no gain over dense: a miss.";
}

void print_link(const DemoOptions& o, const std::string& link, const LinkResult& result,
                const std::vector<TrainingResult>& trained) {
  std::string text = comment("") + comment(link_title(o, link));
  Table table({{"reduction", "", 18, true},
               {"step", "ms", 8},
               {"10 %", "ms", 8},
               {"90 %", "ms", 8},
               {"vs dense", "", 9},
               {"bytes", "", 8},
               {"accuracy", "", 9}});
  text += table.header();
  const auto row = [&](const std::string& name, const StepTime& t, const std::string& ratio, double accuracy) {
    text += table.row({name, ms(t.median_s), ms(t.low_s), ms(t.high_s),
                       format_number(result.fixed[0].median_s / t.median_s, 3) + "x", ratio, percent(accuracy)});
  };
  for (size_t c = 0; c < result.fixed.size(); ++c)
    row(c == 0 ? "dense" : o.setup.codecs[c], result.fixed[c], "1/" + format_number(trained[c].wire_ratio, 3),
        trained[c].accuracy);
  row("auto", result.automatic, result.chosen == "none" ? "dense" : result.chosen, result.accuracy);
  const double over = regret(result);
  text += comment(result.explanation);
  text += comment("auto / best fixed choice (" +
                  (best_fixed(result) == 0 ? std::string("dense") : o.setup.codecs[best_fixed(result)]) + ") = " +
                  format_number(over, 3) + (over > kMissTolerance ? "  MISS: more than 5 % from the best" : ""));
  if (result.settle_steps >= 0) {
    text +=
        comment("start-up: " + std::to_string(result.settle_steps) + " steps and " + format_number(result.settle_s, 3) +
                " s until the gate held its choice, of which probing, shadow measurements and agreements: " +
                format_number(result.gate_s, 3) + " s");
  } else {
    text += comment("start-up: not over after " + std::to_string(o.setup.recipe.steps) + " steps (phase " +
                    result.phase + ")");
  }
  text += comment("=> " + meaning(o.setup, result, trained[0].accuracy));
  if (!result.replicas_equal) text += comment("WRONG: the ranks' parameters differ");
  o.output.print(text);
}

Json to_json(const StepTime& t) {
  return {{"median_s", number(t.median_s)},
          {"p10_s", number(t.low_s)},
          {"p90_s", number(t.high_s)},
          {"samples", t.samples}};
}

int run_demo(const Context& context, const OptionSet& options, DemoOptions o) {
  if (o.quick) {
    o.setup.recipe.steps = std::min<uint64_t>(o.setup.recipe.steps, 90);
    o.setup.rounds = 3;
  }
  const std::vector<std::string> links = links_of(o);
  const std::unique_ptr<Ranks> ranks = Ranks::open("--ranks", o.setup.ranks, o.device);
  const std::string where = ranks->description({});
  Progress progress;
  std::string shown;
  const DemoProgress on_progress = [&](const std::string& what, double fraction) {
    progress.show("gradgate demo: " + shown + what + " " + std::to_string(static_cast<int>(100 * fraction)) + " %");
  };

  const auto& s = o.setup;
  o.output.print(
      comment("gradgate demo on " + machine_text()) +
      comment(std::to_string(s.ranks) +
              " ranks as threads train one network on 1,797 handwritten digits (UCI, CC BY 4.0), " +
              std::to_string(s.recipe.steps) + " steps, seed " + std::to_string(s.seed) + ".") +
      (o.device == Device::cuda ? comment(where) : "") +
      comment("Every rank sees other digits, so what a codec loses matters. " +
              std::string(o.device == Device::cuda ? "Gradients are copied to the device, reduced there\n"
                                                     "and copied back; the network stays on the CPU."
                                                   : "Links are emulated: a collective lasts as long as the\n"
                                                     "model of that link says.") +
              " A step is gradient + reduction + update, the slowest rank; median of interleaved windows."));
  const auto trained = train_per_codec(*ranks, s, on_progress);

  Json results = Json::object();
  results["training"] = Json::array();
  bool wrong = false;
  for (const TrainingResult& t : trained) {
    wrong = wrong || !t.replicas_equal;
    results["training"].push_back({{"codec", t.codec},
                                   {"accuracy", number(t.accuracy)},
                                   {"ratio", number(t.wire_ratio)},
                                   {"replicas_equal", t.replicas_equal}});
  }
  results["links"] = Json::array();
  for (const std::string& link : links) {
    shown = link == "none" ? "" : "link " + link + ": ";
    std::optional<NamedLink> emulated;
    if (link != "none") emulated = parse_link("--links", link);
    const LinkResult result = run_link(*ranks, s, emulated, on_progress);
    progress.clear();
    print_link(o, link, result, trained);
    wrong = wrong || !result.replicas_equal;
    Json fixed = Json::array();
    for (size_t c = 0; c < result.fixed.size(); ++c) {
      Json entry = to_json(result.fixed[c]);
      entry["codec"] = s.codecs[c];
      fixed.push_back(entry);
    }
    results["links"].push_back({{"link", link},
                                {"emulated", link != "none"},
                                {"fixed", fixed},
                                {"auto", to_json(result.automatic)},
                                {"chosen", result.chosen},
                                {"phase", result.phase},
                                {"explanation", result.explanation},
                                {"accuracy", number(result.accuracy)},
                                {"auto_over_best", number(regret(result))},
                                {"settle_steps", result.settle_steps < 0 ? Json() : Json(result.settle_steps)},
                                {"settle_s", number(result.settle_s)},
                                {"gate_s", number(result.gate_s)},
                                {"replicas_equal", result.replicas_equal},
                                {"meaning", meaning(s, result, trained[0].accuracy)}});
  }
  Json json = report_header("demo", context, options);
  json["ranks"] = where;
  json["results"] = results;
  o.output.finish(json);
  return wrong ? kExitFailed : kExitOk;
}

}  // namespace

void add_demo(CLI::App& program, Context& context) {
  Command& command =
      context.add(program, "demo", "the whole idea in a minute: real training, real ranks, emulated links",
                  "Examples:\n"
                  "  gradgate demo                      about a minute\n"
                  "  gradgate demo --quick              two links, fewer steps\n"
                  "  gradgate demo --links 100gbit:10us,ib-ndr --json\n"
                  "  gradgate demo --device cuda        the same with codecs and exchanges on a GPU");
  auto o = std::make_shared<DemoOptions>();
  OptionSet& options = *command.options;
  options.add("--steps", std::to_string(o->setup.recipe.steps), "N", "training steps, 20 … 100000",
              [o](const std::string& option, const std::string& text) {
                o->setup.recipe.steps = parse_count(option, text);
                check_range(option, text, o->setup.recipe.steps, 20, 100000);
              });
  options.add("--ranks", std::to_string(o->setup.ranks), "N", "ranks (threads), 2 … 64",
              [o](const std::string& option, const std::string& text) {
                const uint64_t ranks = parse_count(option, text);
                check_range(option, text, ranks, 2, 64);
                o->setup.ranks = static_cast<int>(ranks);
              });
  options.add("--seed", std::to_string(o->setup.seed), "N", "seed of the parameters and of the order of the images",
              [o](const std::string& option, const std::string& text) { o->setup.seed = parse_count(option, text); });
  options.add(
      "--links", "", "LINK,…",
      "links to emulate, 'none' for the bare ranks [none,10gbit,1gbit; with --quick none,1gbit; on devices none]; " +
          link_grammar(),
      [o](const std::string& option, const std::string& text) {
        o->links = split_list(option, text);
        for (const std::string& link : *o->links)
          if (link != "none") parse_link(option, link);
      });
  options.flag("--quick", "90 steps and three rounds of windows instead of eight", &o->quick);
  add_device_option(options, &o->device);
  o->output.add_to(options);
  const OptionSet* set = command.options.get();
  command.run = [&context, set, o] { return run_demo(context, *set, *o); };
}

}  // namespace gradgate::cli
