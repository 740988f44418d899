// The measurements of `gradgate bench --device cuda`: kernels against a copy within the device, of the same run.
#pragma once

#include "integration/cli/bench_run.h"

namespace gradgate::cli {

/// Seconds by events, one entry per round; every result compared with the CPU's before it counts.
struct DeviceCodecTimes {
  NamedCodec codec;
  size_t payload = 0;  ///< bytes
  std::vector<double> encode_s, encode_feedback_s, decode_s;
  uint64_t wrong = 0;  ///< bytes of payload, residual and output that differ from the CPU's
};
struct DeviceBenchResult {
  std::string device;
  std::vector<double> copy_s;  ///< gradient to gradient, within the device
  std::vector<DeviceCodecTimes> codecs;
  std::vector<PeerTimes> peers;  ///< torch's, on the device
  std::string peers_note;
};

/// `setup`: codecs, count, dtype, rounds, and peers with their Python. Throws RunError without a device, or where a call fails.
DeviceBenchResult run_device_bench(const BenchSetup& setup, Progress& progress);
std::string device_bench_table(const BenchSetup& setup, const DeviceBenchResult& result);
Json device_bench_json(const BenchSetup& setup, const DeviceBenchResult& result);
uint64_t wrong_values(const DeviceBenchResult& result);

}  // namespace gradgate::cli
