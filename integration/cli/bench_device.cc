#include "integration/cli/bench_device.h"

#include <cstring>

#include "gradgate/device.h"
#include "integration/cli/device.h"
#include "integration/cli/error.h"
#include "integration/cli/quantity.h"
#include "integration/cli/statistics.h"
#include "integration/cli/table.h"
#include "integration/cli/test_data.h"

namespace gradgate::cli {
namespace {

constexpr uint64_t kGradientSeed = 1, kResidualSeed = 2;

class DeviceBench {
 public:
  DeviceBench(const BenchSetup& setup, Progress& progress)
      : setup_(setup), progress_(progress), cuda_(require_cuda()), bytes_(setup.count * dtype_bytes(setup.dtype)), host_(bytes_), residual_(setup.count) {
    data_.fill(kGradientSeed, 0, {host_.data(), setup.count, setup.dtype});
    data_.fill(kResidualSeed, 0, {residual_.data(), setup.count, DType::f32});
    size_t payload = 0, workspace = 0;
    for (const NamedCodec& codec : setup.codecs) {
      payload = std::max(payload, payload_bytes(codec.spec, setup.dtype, setup.count));
      workspace = std::max(workspace, device::workspace_bytes(codec.spec, setup.dtype, setup.count));
    }
    gradient_ = DeviceMemory(bytes_);
    out_ = DeviceMemory(bytes_);
    device_residual_ = DeviceMemory(setup.count * sizeof(float));
    residual_before_ = DeviceMemory(setup.count * sizeof(float));
    payload_ = DeviceMemory(payload);
    workspace_ = DeviceMemory(workspace);
    words_ = DeviceMemory(4 * sizeof(uint64_t));
    up(gradient_, host_.data(), bytes_);
    up(residual_before_, residual_.data(), residual_.size() * sizeof(float));
  }

  DeviceBenchResult run() {
    DeviceBenchResult result;
    result.device = cuda_text();
    for (const NamedCodec& codec : setup_.codecs) {
      DeviceCodecTimes times;
      times.codec = codec;
      times.payload = payload_bytes(codec.spec, setup_.dtype, setup_.count);
      result.codecs.push_back(times);
    }
    // One round more, first, that does not count.
    for (size_t round = 0; round <= setup_.rounds; ++round) {
      const bool keep = round > 0;
      measure(keep, &result.copy_s, [&] { return call(cuda_.copy(out_.data(), gradient_.data(), bytes_, clock_.stream().handle)); });
      for (size_t c = 0; c < result.codecs.size(); ++c) {
        progress_.show("round " + std::to_string(round) + " of " + std::to_string(setup_.rounds) + ": " + result.codecs[c].codec.text);
        measure_codec(keep, round == 0, &result.codecs[c]);
      }
    }
    if (setup_.peers) {
      progress_.show("peers: torch");
      const std::span<const float> floats{reinterpret_cast<const float*>(host_.data()), setup_.count};
      result.peers = torch_peers({setup_.python, Device::cuda, setup_.rounds}, floats, expected_sums(floats), &result.peers_note);
    }
    progress_.clear();
    return result;
  }

 private:
  Status call(int error) { return error == 0 ? Status{} : Status{StatusCode::internal, error}; }
  void up(const DeviceMemory& to, const void* from, size_t bytes) {
    require_cuda_ok(cuda_.copy(to.data(), from, bytes, clock_.stream().handle), "a copy");
    wait();
  }
  std::vector<std::byte> down(const DeviceMemory& from, size_t bytes) {
    std::vector<std::byte> host(bytes);
    require_cuda_ok(cuda_.copy(host.data(), from.data(), bytes, clock_.stream().handle), "a copy");
    wait();
    return host;
  }
  void wait() {
    clock_.start();
    clock_.stop();
  }

  template <class Call>
  void measure(bool keep, std::vector<double>* list, Call work) {
    clock_.start();
    const Status status = work();
    const double seconds = clock_.stop();
    if (!status.ok()) throw RunError(std::string("--device cuda: ") + status.message());
    if (keep) list->push_back(seconds);
  }

  void measure_codec(bool keep, bool check, DeviceCodecTimes* times) {
    CodecSpec spec = times->codec.spec;
    const Bytes payload{payload_.data(), times->payload}, workspace{workspace_.data(), workspace_.size()};
    const ConstVec gradient{gradient_.data(), setup_.count, setup_.dtype};
    // Word 0: fault. Word 1: the threshold that topk carries from step to step, without feedback; word 2: with.
    require_cuda_ok(cuda_.fill(words_.data(), 0, words_.size(), clock_.stream().handle), "a fill");
    const auto encode_with = [&](float* residual, size_t word) {
      return device::encode(spec,
                            {.gradient = gradient, .residual = residual, .payload = payload, .workspace = workspace, .seed = {}, .threshold = reinterpret_cast<uint32_t*>(words_.as<uint64_t>() + word)},
                            clock_.stream().handle);
    };
    if (spec.id != CodecId::none) {
      spec.feedback = true;
      const auto refill = [&] { require_cuda_ok(cuda_.copy(device_residual_.data(), residual_before_.data(), device_residual_.size(), clock_.stream().handle), "a copy"); };
      refill();
      // A first encode finds topk's threshold; the one that is timed has it, as in training.
      if (spec.id == CodecId::topk && !encode_with(device_residual_.as<float>(), 2).ok()) throw RunError(times->codec.text + ": encode");
      refill();
      measure(keep, &times->encode_feedback_s, [&] { return encode_with(device_residual_.as<float>(), 2); });
      if (check) times->wrong += check_encode(spec, true, times->payload);
    }
    spec.feedback = false;
    if (spec.id == CodecId::topk && !encode_with(nullptr, 1).ok()) throw RunError(times->codec.text + ": encode");
    measure(keep, &times->encode_s, [&] { return encode_with(nullptr, 1); });
    if (check) times->wrong += check_encode(spec, false, times->payload);
    measure(keep, &times->decode_s, [&] {
      return device::decode(spec, {.payload = payload, .gradient = setup_.dtype, .out = {out_.data(), setup_.count, setup_.dtype}, .workspace = workspace, .fault = words_.as<uint64_t>()},
                            clock_.stream().handle);
    });
    if (check) times->wrong += check_decode(spec, times->payload);
  }

  // The CPU's bytes: its fast path, which its own tests hold to the reference.
  std::vector<std::byte> encode_on_cpu(const CodecSpec& spec, float* residual, size_t bytes) {
    std::vector<std::byte> payload(bytes), workspace(gradgate::workspace_bytes(spec, setup_.dtype, setup_.count));
    const Status status = gradgate::encode(spec, {.gradient = {host_.data(), setup_.count, setup_.dtype}, .residual = residual, .payload = payload, .workspace = workspace, .seed = {}, .executor = {}});
    if (!status.ok()) throw RunError(std::string("the CPU's encode: ") + status.message());
    return payload;
  }
  uint64_t check_encode(const CodecSpec& spec, bool feedback, size_t bytes) {
    std::vector<float> residual = feedback ? residual_ : std::vector<float>();
    const std::vector<std::byte> expected = encode_on_cpu(spec, feedback ? residual.data() : nullptr, bytes);
    uint64_t wrong = differing_bytes(expected.data(), down(payload_, bytes).data(), bytes);
    if (feedback) wrong += differing_bytes(reinterpret_cast<const std::byte*>(residual.data()), down(device_residual_, device_residual_.size()).data(), device_residual_.size());
    return wrong;
  }
  uint64_t check_decode(const CodecSpec& spec, size_t bytes) {
    const std::vector<std::byte> payload = encode_on_cpu(spec, nullptr, bytes);
    std::vector<std::byte> expected(bytes_);
    const Status status = gradgate::decode(spec, {.payload = payload, .gradient = setup_.dtype, .out = {expected.data(), setup_.count, setup_.dtype}, .executor = {}});
    if (!status.ok()) throw RunError(std::string("the CPU's decode: ") + status.message());
    return differing_bytes(expected.data(), down(out_, bytes_).data(), bytes_);
  }

  const BenchSetup& setup_;
  Progress& progress_;
  const kernels::cuda::Runtime& cuda_;
  const size_t bytes_;
  DeviceClock clock_;
  GradientLike data_;
  std::vector<std::byte> host_;
  std::vector<float> residual_;
  DeviceMemory gradient_, out_, device_residual_, residual_before_, payload_, workspace_, words_;
};

std::string times_floor(const std::vector<double>& seconds, const std::vector<double>& floor) {
  return seconds.empty() ? "-" : format_number(median_ratio(seconds, floor), 3);
}

}  // namespace

DeviceBenchResult run_device_bench(const BenchSetup& setup, Progress& progress) { return DeviceBench(setup, progress).run(); }

uint64_t wrong_values(const DeviceBenchResult& result) {
  uint64_t wrong = 0;
  for (const DeviceCodecTimes& times : result.codecs) wrong += times.wrong;
  for (const PeerTimes& peer : result.peers) wrong += peer.wrong;
  return wrong;
}

std::string device_bench_table(const BenchSetup& setup, const DeviceBenchResult& result) {
  const double bytes = static_cast<double>(setup.count * dtype_bytes(setup.dtype));
  const auto gb_per_s = [&](const std::vector<double>& seconds) { return seconds.empty() || median(seconds) <= 0 ? std::string("-") : format_number(bytes / median(seconds) / 1e9, 3); };
  const double copy_s = median(result.copy_s);
  const auto over_copy = [&](const std::vector<double>& seconds) { return seconds.empty() ? std::string("-") : format_number(median(seconds) / copy_s, 3); };  // not of the same rounds
  std::string text = comment("gradgate bench --device cuda: codecs as kernels, times by events, every result compared with the CPU's\n" + result.device + "\n" +
                             std::to_string(setup.count) + " " + dtype_name(setup.dtype) + " elements (" + format_size(setup.count * dtype_bytes(setup.dtype)) + "), medians of " +
                             std::to_string(setup.rounds) + " interleaved rounds; copy within the device " + gb_per_s(result.copy_s) +
                             " GB/s of gradient (read and written); /copy: time over that of the copy\n");
  const Table table({{"codec", "", 26, true}, {"ratio", "", 7}, {"encode", "GB/s", 9}, {"/copy", "", 7}, {"encode+ef", "GB/s", 10}, {"/copy", "", 7}, {"decode", "GB/s", 9}, {"/copy", "", 7}, {"#wrong", "", 7}});
  text += table.header();
  for (const DeviceCodecTimes& times : result.codecs) {
    text += table.row({times.codec.text, format_number(bytes / static_cast<double>(times.payload), 3), gb_per_s(times.encode_s), times_floor(times.encode_s, result.copy_s), gb_per_s(times.encode_feedback_s),
                       times_floor(times.encode_feedback_s, result.copy_s), gb_per_s(times.decode_s), times_floor(times.decode_s, result.copy_s), std::to_string(times.wrong)});
  }
  if (setup.peers) text += comment("peers on the same gradient, results compared: " + result.peers_note);
  for (const PeerTimes& peer : result.peers) {
    text += table.row({peer.name, "-", gb_per_s(peer.encode_s), over_copy(peer.encode_s), "-", "-", gb_per_s(peer.decode_s), over_copy(peer.decode_s), std::to_string(peer.wrong)});
  }
  const uint64_t wrong = wrong_values(result);
  return text + comment("Out of bounds values : " + std::to_string(wrong) + (wrong == 0 ? " OK" : " FAILED"));
}

Json device_bench_json(const BenchSetup& setup, const DeviceBenchResult& result) {
  Json json = {{"device", result.device}, {"elements", setup.count}, {"dtype", dtype_name(setup.dtype)}, {"rounds", setup.rounds}, {"copy_s", number(median(result.copy_s))}, {"codecs", Json::array()}};
  const auto seconds = [](const std::vector<double>& list) { return list.empty() ? Json(nullptr) : number(median(list)); };
  const auto over_copy = [&](const std::vector<double>& list) { return list.empty() ? Json(nullptr) : number(median_ratio(list, result.copy_s)); };
  for (const DeviceCodecTimes& times : result.codecs) {
    json["codecs"].push_back({{"codec", times.codec.text},
                              {"payload_bytes", times.payload},
                              {"encode_s", seconds(times.encode_s)},
                              {"encode_over_copy", over_copy(times.encode_s)},
                              {"encode_feedback_s", seconds(times.encode_feedback_s)},
                              {"encode_feedback_over_copy", over_copy(times.encode_feedback_s)},
                              {"decode_s", seconds(times.decode_s)},
                              {"decode_over_copy", over_copy(times.decode_s)},
                              {"wrong", times.wrong}});
  }
  if (setup.peers) {
    json["peers_note"] = result.peers_note;
    json["peers"] = Json::array();
    for (const PeerTimes& peer : result.peers) json["peers"].push_back({{"name", peer.name}, {"encode_s", seconds(peer.encode_s)}, {"decode_s", seconds(peer.decode_s)}, {"wrong", peer.wrong}});
  }
  json["wrong"] = wrong_values(result);
  return json;
}

}  // namespace gradgate::cli
