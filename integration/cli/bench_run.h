// The measurements of `gradgate bench`: codecs and memory floors on one large gradient, in interleaved rounds, verified.
#pragma once

#include <string>
#include <vector>

#include "integration/cli/bench_peers.h"
#include "integration/cli/codec_option.h"
#include "integration/cli/error_metrics.h"
#include "integration/cli/report.h"

namespace gradgate::cli {

struct BenchSetup {
  std::vector<NamedCodec> codecs;
  size_t count = 0;
  DType dtype = DType::f32;
  unsigned threads = 1;
  int ranks = 4;         ///< of the exchange whose codec work is measured
  size_t rounds = 11;
  bool exchange = true;  ///< measure the codec work of an exchange too
  bool floors = false;   ///< measure what only the goals ask for: first encodes, sums of payloads, one thread beside several
  bool peers = false;    ///< measure std::nth_element and torch too (f32)
  std::string python = "python3";
};

/// Seconds of the codec work of one rank in an exchange (encoding, summing, decoding), without any transfer.
struct ExchangeWork {
  std::vector<double> seconds;  ///< one entry per round; all 0 for the dense exchange
  size_t wire_bytes = 0;
};

/// One codec; seconds, one entry per round. Empty where there is nothing to measure.
struct CodecTimes {
  NamedCodec codec;
  size_t payload = 0;  ///< bytes
  std::vector<double> encode_s, encode_feedback_s, decode_s;
  std::vector<double> encode_first_s;  ///< floors, topk: without the threshold of the step before
  std::vector<double> encode_one_s;    ///< floors: by one thread, where setup.threads are more
  std::vector<double> sum_s;           ///< floors, codecs that travel by all_gather: kSummedPayloads payloads into one vector
  ExchangeWork exchange;
  uint32_t threshold[2] = {0, 0};  ///< carried from round to round, as a session does (EncodeArgs): without and with feedback
  ErrorMetrics error;  ///< of one encode and decode without feedback
  uint64_t wrong = 0;  ///< elements and payload bytes that differ from the scalar reference
};

struct BenchResult {
  std::vector<double> read_s, copy_s, axpy_s;  ///< floors: sum the gradient, copy it, residual += gradient (f32 only)
  std::vector<CodecTimes> codecs;
  std::vector<PeerTimes> peers;
  std::string peers_note;
  ExchangeWork bf16;                           ///< the one-line cast as a baseline; empty for bf16 gradients
};

/// Payloads of a sum.
inline constexpr size_t kSummedPayloads = 8;

/// How many of `count` bytes differ: what every benchmark asks of what it timed.
uint64_t differing_bytes(const std::byte* a, const std::byte* b, size_t count);

/// Throws RunError when a codec fails, std::bad_alloc.
BenchResult run_bench(const BenchSetup& setup, Progress& progress);

}  // namespace gradgate::cli
