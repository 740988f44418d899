#include "integration/cli/bench_report.h"

#include <cmath>
#include <limits>

#include "integration/cli/bandwidth.h"
#include "integration/cli/quantity.h"
#include "integration/cli/statistics.h"
#include "integration/cli/table.h"

namespace gradgate::cli {
namespace {

constexpr double kUndefined = std::numeric_limits<double>::quiet_NaN();

size_t gradient_bytes(const BenchSetup& setup) { return setup.count * dtype_bytes(setup.dtype); }

double gb_per_s(const BenchSetup& setup, const std::vector<double>& seconds) {
  const double s = median(seconds);
  return s > 0 ? static_cast<double>(gradient_bytes(setup)) / s / 1e9 : kUndefined;
}

double ratio(const BenchSetup& setup, const CodecTimes& times) { return static_cast<double>(gradient_bytes(setup)) / static_cast<double>(times.payload); }

// Link bandwidths below which the codec beats the dense exchange and the bf16 cast; NaN where the question is empty.
struct BreakEven {
  double dense = kUndefined, bf16 = kUndefined;
};
BreakEven break_even(const BenchSetup& setup, const BenchResult& result, const CodecTimes& times) {
  BreakEven beta;
  if (times.codec.spec.id == CodecId::none || times.exchange.seconds.empty() || setup.ranks < 2 || setup.count == 0) return beta;
  const double codec_s = median(times.exchange.seconds);
  // An all_gather moves (n-1) payloads through each rank's link, which is 2(n-1)/n · (n/2 payloads).
  const size_t ranks = static_cast<size_t>(setup.ranks), payload = times.exchange.wire_bytes;
  const size_t wire = times.codec.exchange == Exchange::all_gather ? payload * ranks / 2 : payload;
  beta.dense = break_even_bandwidth(gradient_bytes(setup), wire, setup.ranks, codec_s);
  if (times.codec.spec.id == CodecId::bf16 || result.bf16.seconds.empty()) return beta;
  beta.bf16 = break_even_bandwidth(result.bf16.wire_bytes, wire, setup.ranks, codec_s - median(result.bf16.seconds));
  return beta;
}

std::string link_cell(double beta) {
  if (std::isnan(beta)) return "-";
  if (std::isinf(beta)) return "any";
  return beta == 0 ? "never" : format_link_rate(beta);
}
// JSON has no infinity: "any" link is said by a text.
Json link_json(double beta) {
  if (std::isinf(beta)) return "any";
  return number(beta);
}

std::string cell(double value, int digits) { return std::isnan(value) ? "-" : format_number(value, digits); }

std::string floor_lines(const BenchSetup& setup, const BenchResult& result) {
  std::string text = "read floor " + format_number(gb_per_s(setup, result.read_s), 3) + " GB/s (sum the gradient; quartiles +-" +
                     format_number(100 * relative_spread(result.read_s), 2) + " %), copy " + format_number(gb_per_s(setup, result.copy_s), 3) + " GB/s";
  if (!result.axpy_s.empty()) text += ", axpy " + format_number(gb_per_s(setup, result.axpy_s), 3) + " GB/s (residual += gradient)";
  return text;
}

std::string title(const BenchSetup& setup) {
  return machine_text() + "\n" + std::to_string(setup.count) + " " + dtype_name(setup.dtype) + " elements (" + format_size(gradient_bytes(setup)) + "), " +
         std::to_string(setup.threads) + (setup.threads == 1 ? " thread" : " pinned threads") + ", medians of " + std::to_string(setup.rounds) +
         " interleaved rounds, caches cold";
}

std::string verdict(const BenchResult& result) {
  const uint64_t wrong = wrong_values(result);
  return comment("Out of bounds values : " + std::to_string(wrong) + (wrong == 0 ? " OK" : " FAILED"));
}

struct Goal {
  const char* what;
  double at_most;
  const char* floor;
};
// What this version promises of each codec, as time over a floor of the same run.
std::vector<std::pair<Goal, double>> goals(const BenchResult& result, const CodecTimes& times) {
  const double encode = median_ratio(times.encode_s, result.read_s), decode = median_ratio(times.decode_s, result.read_s);
  const double feedback = times.encode_feedback_s.empty() ? kUndefined : median_ratio(times.encode_feedback_s, result.axpy_s);
  switch (times.codec.spec.id) {
    case CodecId::int8: return {{{"encode", 1.5, "read"}, encode}, {{"decode", 1.2, "read"}, decode}, {{"encode+ef", 1.5, "axpy"}, feedback}};
    case CodecId::fp8:
    case CodecId::int4:
    case CodecId::onebit: return {{{"encode", 1.6, "read"}, encode}, {{"decode", kUndefined, "read"}, decode}, {{"encode+ef", kUndefined, "axpy"}, feedback}};
    case CodecId::chunk_topk: return {{{"encode", 2.0, "read"}, encode}, {{"decode", kUndefined, "read"}, decode}, {{"encode+ef", kUndefined, "axpy"}, feedback}};
    default: return {{{"encode", kUndefined, "read"}, encode}, {{"decode", kUndefined, "read"}, decode}, {{"encode+ef", kUndefined, "axpy"}, feedback}};
  }
}

}  // namespace

uint64_t wrong_values(const BenchResult& result) {
  uint64_t wrong = 0;
  for (const CodecTimes& times : result.codecs) wrong += times.wrong;
  return wrong;
}

std::string bench_table(const BenchSetup& setup, const BenchResult& result) {
  const Table table({{"codec", "", 20, true},
                     {"wire", "B", 11},
                     {"ratio", "", 6},
                     {"encode", "GB/s", 7},
                     {"/read", "", 6},
                     {"enc+ef", "GB/s", 7},
                     {"/axpy", "", 6},
                     {"decode", "GB/s", 7},
                     {"/read", "", 6},
                     {"maxerr", "", 9},
                     {"relL2", "", 9},
                     {"codec", "ms", 8},
                     {"pays vs dense", "below", 14},
                     {"pays vs bf16", "below", 14},
                     {"#wrong", "", 7}});
  std::string text =
      comment("gradgate bench: " + title(setup) + "\n" + floor_lines(setup, result) +
              "\n"
              "GB/s are gradient bytes per second (1e9); /read and /axpy are time over that floor, round by round; wire is the payload;\n"
              "codec ms is one rank's codec work in the codec's exchange with " +
              std::to_string(setup.ranks) +
              " ranks (encode, sum, re-encode, decode), feedback as written;\n"
              "break-even, per rank, without latency: T_codec = 2(n-1)/n * (M - wire) / beta, so it pays on links slower than\n"
              "  beta = 2(n-1)/n * (M - wire) / T_codec; against bf16 with its wire in the place of M and the difference of both T_codec") +
      comment("") + table.header();
  for (const CodecTimes& times : result.codecs) {
    const bool feedback = !times.encode_feedback_s.empty();
    const BreakEven beta = break_even(setup, result, times);
    text += table.row({times.codec.text, std::to_string(times.payload), format_number(ratio(setup, times), 3), cell(gb_per_s(setup, times.encode_s), 3),
                       cell(median_ratio(times.encode_s, result.read_s), 3), feedback ? cell(gb_per_s(setup, times.encode_feedback_s), 3) : "-",
                       feedback ? cell(median_ratio(times.encode_feedback_s, result.axpy_s), 3) : "-", cell(gb_per_s(setup, times.decode_s), 3),
                       cell(median_ratio(times.decode_s, result.read_s), 3), format_number(times.error.max_error, 2), cell(times.error.relative_l2, 2),
                       cell(median(times.exchange.seconds) * 1e3, 3), link_cell(beta.dense), link_cell(beta.bf16), std::to_string(times.wrong)});
  }
  return text + verdict(result);
}

std::string floors_table(const BenchSetup& setup, const BenchResult& result) {
  const Table table({{"codec", "", 20, true}, {"kernel", "", 10, true}, {"time", "ms", 9}, {"speed", "GB/s", 7}, {"time / floor", "", 16}, {"goal", "", 8}, {"", "", 7}});
  std::string text = comment("gradgate bench --floors: " + title(setup) + "\n" + floor_lines(setup, result) +
                             "\nratios are medians over rounds of time over the floor of the same round; a missed goal is printed, not an error") +
                     comment("") + table.header();
  for (const CodecTimes& times : result.codecs) {
    for (const auto& [goal, measured] : goals(result, times)) {
      const std::string kernel = goal.what;
      const std::vector<double>& seconds = kernel == "encode" ? times.encode_s : (kernel == "decode" ? times.decode_s : times.encode_feedback_s);
      if (std::isnan(measured)) continue;
      const bool has_goal = !std::isnan(goal.at_most);
      text += table.row({times.codec.text, kernel, format_number(median(seconds) * 1e3, 4), cell(gb_per_s(setup, seconds), 3),
                         format_number(measured, 3) + " x " + goal.floor, has_goal ? "<= " + format_number(goal.at_most, 2) : "-",
                         has_goal ? (measured <= goal.at_most ? "met" : "MISSED") : ""});
    }
  }
  return text + verdict(result);
}

Json bench_json(const BenchSetup& setup, const BenchResult& result) {
  Json json = {{"count", setup.count},
               {"dtype", dtype_name(setup.dtype)},
               {"bytes", gradient_bytes(setup)},
               {"threads", setup.threads},
               {"ranks", setup.ranks},
               {"rounds", setup.rounds},
               {"floors",
                {{"read_s", number(median(result.read_s))}, {"copy_s", number(median(result.copy_s))}, {"axpy_s", number(median(result.axpy_s))}, {"read_spread", number(relative_spread(result.read_s))}}}};
  json["results"] = Json::array();
  json["goals"] = Json::array();
  for (const CodecTimes& times : result.codecs) {
    const BreakEven beta = break_even(setup, result, times);
    json["results"].push_back({{"codec", times.codec.text},
                               {"payload_bytes", times.payload},
                               {"ratio", number(ratio(setup, times))},
                               {"encode_s", number(median(times.encode_s))},
                               {"encode_gb_s", number(gb_per_s(setup, times.encode_s))},
                               {"encode_over_read", number(median_ratio(times.encode_s, result.read_s))},
                               {"encode_spread", number(relative_spread(times.encode_s))},
                               {"encode_feedback_s", number(median(times.encode_feedback_s))},
                               {"encode_feedback_gb_s", number(gb_per_s(setup, times.encode_feedback_s))},
                               {"encode_feedback_over_axpy", number(median_ratio(times.encode_feedback_s, result.axpy_s))},
                               {"decode_s", number(median(times.decode_s))},
                               {"decode_gb_s", number(gb_per_s(setup, times.decode_s))},
                               {"decode_over_read", number(median_ratio(times.decode_s, result.read_s))},
                               {"decode_spread", number(relative_spread(times.decode_s))},
                               {"max_error", number(times.error.max_error)},
                               {"relative_l2", number(times.error.relative_l2)},
                               {"exchange_codec_s", number(median(times.exchange.seconds))},
                               {"exchange_wire_bytes", times.exchange.wire_bytes},
                               {"break_even_dense_bytes_per_s", link_json(beta.dense)},
                               {"break_even_bf16_bytes_per_s", link_json(beta.bf16)},
                               {"wrong", times.wrong}});
    for (const auto& [goal, measured] : goals(result, times)) {
      if (std::isnan(goal.at_most) || std::isnan(measured)) continue;
      json["goals"].push_back({{"codec", times.codec.text}, {"kernel", goal.what}, {"floor", goal.floor}, {"at_most", goal.at_most}, {"measured", number(measured)}, {"met", measured <= goal.at_most}});
    }
  }
  json["out_of_bounds"] = wrong_values(result);
  return json;
}

}  // namespace gradgate::cli
