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

// A kernel against what it is measured by, with what this version promises of it: time over a floor of the same run, at most; or how many times as fast as
// something else, at least.
struct Row {
  std::string kernel;
  const std::vector<double>* seconds;
  double measured;
  const char* against;
  double goal = kUndefined;
  bool at_least = false;
  double possible = kUndefined;  // at least: what the memory's speed allows

  bool met() const { return at_least ? measured >= goal : measured <= goal; }
  std::string verdict() const {
    if (std::isnan(goal)) return "";
    if (met()) return "met";
    return possible < goal ? "MISSED (memory allows " + format_number(possible, 3) + ")" : "MISSED";
  }
};

struct Goals {
  double encode = kUndefined, decode = kUndefined, feedback = kUndefined;
};
Goals goals_of(CodecId id) {
  switch (id) {
    case CodecId::int8: return {1.5, 1.2, 1.5};
    case CodecId::fp8:
    case CodecId::int4:
    case CodecId::onebit: return {1.6, kUndefined, kUndefined};
    case CodecId::chunk_topk: return {2.0, kUndefined, kUndefined};
    case CodecId::topk: return {1.6, kUndefined, 1.4};
    default: return {};
  }
}

std::vector<Row> rows(const BenchSetup& setup, const BenchResult& result, const CodecTimes& times) {
  const Goals goals = goals_of(times.codec.spec.id);
  std::vector<Row> list = {{"encode", &times.encode_s, median_ratio(times.encode_s, result.read_s), "read", goals.encode},
                           {"decode", &times.decode_s, median_ratio(times.decode_s, result.read_s), "read", goals.decode},
                           {"encode+ef", &times.encode_feedback_s, median_ratio(times.encode_feedback_s, result.axpy_s), "axpy", goals.feedback},
                           {"first enc", &times.encode_first_s, median_ratio(times.encode_first_s, result.read_s), "read"},
                           {"sum of " + std::to_string(kSummedPayloads), &times.sum_s, median_ratio(times.sum_s, result.read_s), "read", 1.5}};
  // One thread's share of the memory's speed differs from machine to machine; two threads are promised, more are not.
  list.push_back({"encode", &times.encode_s, median_ratio(times.encode_one_s, times.encode_s), "1 thread", setup.threads == 2 ? 1.6 : kUndefined, true,
                  median_ratio(times.encode_one_s, result.read_s)});
  for (const PeerTimes& peer : result.peers) {
    CodecSpec plain = times.codec.spec;
    plain.feedback = false;
    if (plain == peer_topk()) {
      if (peer.name.rfind("std::nth", 0) == 0) list.push_back({"encode", &times.encode_s, median_ratio(peer.encode_s, times.encode_s), "nth_element", setup.threads == 1 ? 25 : kUndefined, true});
      if (peer.name.rfind("torch.topk", 0) == 0) list.push_back({"encode", &times.encode_s, median(peer.encode_s) / median(times.encode_s), "torch.topk", kUndefined, true});
    }
  }
  std::erase_if(list, [](const Row& row) { return std::isnan(row.measured); });
  return list;
}

// Rows of peers have no payload, and no exchange.
std::string peer_rows(const BenchSetup& setup, const BenchResult& result, const Table& table) {
  if (result.peers.empty()) return "";
  std::string text = comment("peers on the same gradient, results compared: " + result.peers_note);
  for (const PeerTimes& peer : result.peers) {
    const auto over_read = [&](const std::vector<double>& seconds) { return cell(median(seconds) / median(result.read_s), 3); };
    text += table.row({peer.name, "-", "-", cell(gb_per_s(setup, peer.encode_s), 3), over_read(peer.encode_s), "-", "-", cell(gb_per_s(setup, peer.decode_s), 3),
                       over_read(peer.decode_s), "-", "-", "-", "-", "-", std::to_string(peer.wrong)});
  }
  return text;
}

}  // namespace

uint64_t wrong_values(const BenchResult& result) {
  uint64_t wrong = 0;
  for (const CodecTimes& times : result.codecs) wrong += times.wrong;
  for (const PeerTimes& peer : result.peers) wrong += peer.wrong;
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
  return text + peer_rows(setup, result, table) + verdict(result);
}

std::string floors_table(const BenchSetup& setup, const BenchResult& result) {
  const Table table({{"codec", "", 20, true}, {"kernel", "", 10, true}, {"time", "ms", 9}, {"speed", "GB/s", 7}, {"time / floor, or speed", "", 24}, {"goal", "", 8}, {"", "", 7}});
  std::string text = comment("gradgate bench --floors: " + title(setup) + "\n" + floor_lines(setup, result) +
                             "\nratios are medians over rounds of time over the floor of the same round; a missed goal is printed, not an error") +
                     comment("") + table.header();
  for (const CodecTimes& times : result.codecs) {
    for (const Row& row : rows(setup, result, times)) {
      const bool has_goal = !std::isnan(row.goal);
      text += table.row({times.codec.text, row.kernel, format_number(median(*row.seconds) * 1e3, 4), cell(gb_per_s(setup, *row.seconds), 3),
                         format_number(row.measured, 3) + (row.at_least ? " x speed of " : " x ") + row.against,
                         has_goal ? (row.at_least ? ">= " : "<= ") + format_number(row.goal, 2) : "-", row.verdict()});
    }
  }
  if (!result.peers.empty()) text += comment("peers on the same gradient, results compared: " + result.peers_note);
  for (const PeerTimes& peer : result.peers) {
    for (const auto& [kernel, seconds] : {std::pair{"encode", &peer.encode_s}, {"decode", &peer.decode_s}}) {
      if (seconds->empty()) continue;
      text += table.row({peer.name, kernel, format_number(median(*seconds) * 1e3, 4), cell(gb_per_s(setup, *seconds), 3),
                         cell(median(*seconds) / median(result.read_s), 3) + " x read", "-", ""});
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
                               {"encode_first_s", number(median(times.encode_first_s))},
                               {"encode_one_thread_s", number(median(times.encode_one_s))},
                               {"sum_of_8_s", number(median(times.sum_s))},
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
    for (const Row& row : rows(setup, result, times)) {
      if (std::isnan(row.goal)) continue;
      json["goals"].push_back({{"codec", times.codec.text},
                               {"kernel", row.kernel},
                               {row.at_least ? "against" : "floor", row.against},
                               {row.at_least ? "at_least" : "at_most", row.goal},
                               {"measured", number(row.measured)},
                               {"memory_allows", number(row.possible)},
                               {"met", row.met()}});
    }
  }
  if (setup.peers) {
    json["peers_note"] = result.peers_note;
    json["peers"] = Json::array();
    for (const PeerTimes& peer : result.peers) {
      json["peers"].push_back({{"name", peer.name},
                               {"encode_s", number(median(peer.encode_s))},
                               {"encode_over_read", number(median(peer.encode_s) / median(result.read_s))},
                               {"decode_s", number(median(peer.decode_s))},
                               {"decode_over_read", number(median(peer.decode_s) / median(result.read_s))},
                               {"wrong", peer.wrong}});
    }
  }
  json["out_of_bounds"] = wrong_values(result);
  return json;
}

}  // namespace gradgate::cli
