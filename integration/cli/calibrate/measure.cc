#include "integration/cli/calibrate/measure.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>

#include "gradgate/device.h"
#include "gradgate/version.h"
#include "integration/cli/buffer.h"
#include "integration/cli/device.h"
#include "integration/cli/error.h"
#include "integration/cli/quantity.h"
#include "integration/cli/statistics.h"
#include "integration/cli/test_data.h"

namespace gradgate::cli {
namespace {

using gate::ProbeCollective;

constexpr uint64_t kFewestRounds = 3;
constexpr size_t kNameBytes = 256;

const char* name_of(ProbeCollective collective) {
  return collective == ProbeCollective::all_reduce   ? "all_reduce"
         : collective == ProbeCollective::all_gather ? "all_gather"
                                                     : "all_to_all";
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// One rank of a sweep.
class Sweeper {
 public:
  Sweeper(const SweepSetup& setup, Communicator& comm, Communicator& plain)
      : setup_(setup), comm_(comm), plain_(plain), ranks_(static_cast<size_t>(comm.size())), seconds_(ranks_) {
    const size_t largest = elements(setup.sizes.back()) * ranks_ * sizeof(float);
    send_ = Buffer(largest);
    recv_ = Buffer(largest);
    GradientLike().fill(static_cast<uint64_t>(comm.rank()), 0, {send_.data(), largest / sizeof(float), DType::f32});
    if (!comm.on_device()) return;
    clock_ = std::make_unique<DeviceClock>();
    device_send_ = DeviceMemory(largest);
    device_recv_ = DeviceMemory(largest);
    require_cuda_ok(require_cuda().copy(device_send_.data(), send_.data(), largest, clock_->stream().handle), "a copy");
  }

  Sweep run(const std::function<void(const std::string&)>& show) {
    Sweep sweep;
    sweep.barrier_spread_s = barrier_spread();
    for (int c = 0; c < gate::kProbeCollectives; ++c) {
      for (const uint64_t size : setup_.sizes)
        sweep.collectives[c].push_back({static_cast<double>(elements(size) * ranks_ * sizeof(float)), 0, {}});
    }
    // How many rounds a size gets follows from what all ranks saw while warming up, so that all agree.
    std::vector<std::vector<uint64_t>> wanted(gate::kProbeCollectives, std::vector<uint64_t>(setup_.sizes.size()));
    for (uint64_t round = 0; round < setup_.rounds; ++round) {
      for (int c = 0; c < gate::kProbeCollectives; ++c) {
        const auto collective = static_cast<ProbeCollective>(c);
        for (size_t s = 0; s < setup_.sizes.size(); ++s) {
          const uint64_t size = setup_.sizes[s];
          if (round == 0) {
            show(std::string(name_of(collective)) + " " + format_size(size) + " ...");
            double slowest = once(collective, size);
            for (uint64_t i = 1; i < setup_.warmup; ++i) slowest = once(collective, size);
            const double fit = setup_.seconds_per_size / std::max(slowest, 1e-9);
            wanted[static_cast<size_t>(c)][s] = std::clamp(static_cast<uint64_t>(std::min(fit, 1e9)),
                                                           std::min(kFewestRounds, setup_.rounds), setup_.rounds);
          }
          if (round >= wanted[static_cast<size_t>(c)][s]) continue;
          const double seconds = once(collective, size) - sweep.barrier_spread_s;
          if (seconds > 0 && std::isfinite(seconds)) sweep.collectives[c][s].rounds.push_back(seconds);
        }
      }
    }
    for (auto& points : sweep.collectives) {
      for (SweepPoint& point : points) point.seconds = median(point.rounds);
    }
    return sweep;
  }

 private:
  size_t elements(uint64_t bytes) const { return std::max<size_t>((bytes / sizeof(float) + ranks_ - 1) / ranks_, 1); }
  Deadline deadline() const { return Deadline::after(setup_.timeout_s); }

  // A barrier, then `operation`; this rank's seconds. On a device both are enqueued, and the events lie around the
  // operation.
  template <class Operation>
  double timed(const char* name, Operation operation) {
    const Stream stream = clock_ != nullptr ? clock_->stream() : Stream{};
    require(comm_.barrier(stream, deadline()), comm_, "barrier");
    if (clock_ != nullptr) clock_->start();
    const double start = comm_.now();
    require(operation(stream), comm_, name);
    if (clock_ == nullptr) return comm_.now() - start;
    require(comm_.wait(stream, deadline()), comm_, name);
    return clock_->stop();
  }

  // The slowest rank's seconds, on every rank.
  double once(ProbeCollective collective, uint64_t size) {
    const size_t per_rank = elements(size);
    const void* send = clock_ != nullptr ? device_send_.data() : send_.data();
    void* recv = clock_ != nullptr ? device_recv_.data() : recv_.data();
    gather(timed(name_of(collective), [&](Stream stream) {
      switch (collective) {
        case ProbeCollective::all_reduce:
          return comm_.all_reduce_sum(send, recv, per_rank * ranks_, DType::f32, stream, deadline());
        case ProbeCollective::all_gather:
          return comm_.all_gather(send, recv, per_rank, DType::f32, stream, deadline());
        case ProbeCollective::all_to_all:
          break;
      }
      return comm_.all_to_all(send, recv, per_rank, DType::f32, stream, deadline());
    }));
    return *std::max_element(seconds_.begin(), seconds_.end());
  }

  double barrier_spread() {
    std::vector<double> spreads;
    for (uint64_t i = 0; i < setup_.warmup + setup_.rounds; ++i) {
      gather(timed("barrier", [&](Stream stream) { return comm_.barrier(stream, deadline()); }));
      const auto [least, most] = std::minmax_element(seconds_.begin(), seconds_.end());
      if (i >= setup_.warmup) spreads.push_back(*most - *least);
    }
    return median(spreads);
  }

  void gather(double seconds) {
    require(plain_.all_gather(&seconds, seconds_.data(), 1, DType::f64, {}, deadline()), plain_, "gathering times");
  }

  const SweepSetup& setup_;
  Communicator &comm_, &plain_;
  size_t ranks_;
  std::vector<double> seconds_;
  Buffer send_, recv_;
  std::unique_ptr<DeviceClock> clock_;  ///< over devices
  DeviceMemory device_send_, device_recv_;
};

// One rank of the codec times: medians of encoding and decoding.
std::pair<double, double> time_codec(const NamedCodec& codec, DType dtype, size_t count, uint64_t rounds, int rank) {
  Buffer gradient(count * dtype_bytes(dtype)), out(gradient.size()), payload(payload_bytes(codec.spec, dtype, count)),
      workspace(workspace_bytes(codec.spec, dtype, count, 1)),
      residual(codec.spec.feedback ? count * sizeof(float) : 0);
  GradientLike().fill(static_cast<uint64_t>(rank), 0, {gradient.data(), count, dtype});
  const EncodeArgs encoding{.gradient = {gradient.data(), count, dtype},
                            .residual = codec.spec.feedback ? residual.as<float>() : nullptr,
                            .payload = payload.bytes(),
                            .workspace = workspace.bytes(),
                            .seed = {},
                            .executor = {}};
  const DecodeArgs decoding{
      .payload = payload.bytes(), .gradient = dtype, .out = {out.data(), count, dtype}, .executor = {}};
  std::vector<double> encodes, decodes;
  for (uint64_t i = 0; i <= rounds; ++i) {
    const double start = steady_seconds();
    Status status = encode(codec.spec, encoding);
    const double middle = steady_seconds();
    if (status.ok()) status = decode(codec.spec, decoding);
    const double end = steady_seconds();
    if (!status.ok()) throw RunError(codec.text + ": " + status.message());
    if (i == 0) continue;  // touches memory for the first time
    encodes.push_back(middle - start);
    decodes.push_back(end - middle);
  }
  return {median(encodes), median(decodes)};
}

// The same for kernels; a device's memory and stream, events around each call.
std::pair<double, double> time_device_codec(const NamedCodec& codec, DType dtype, size_t count, uint64_t rounds,
                                            int rank) {
  const auto& cuda = require_cuda();
  DeviceClock clock;
  void* const stream = clock.stream().handle;
  Buffer host(count * dtype_bytes(dtype));
  GradientLike().fill(static_cast<uint64_t>(rank), 0, {host.data(), count, dtype});
  const DeviceMemory gradient(host.size()), out(host.size()), payload(payload_bytes(codec.spec, dtype, count)),
      workspace(device::workspace_bytes(codec.spec, dtype, count)), words(2 * sizeof(uint64_t)),
      residual(codec.spec.feedback ? count * sizeof(float) : 0);
  require_cuda_ok(cuda.copy(gradient.data(), host.data(), host.size(), stream), "a copy");
  require_cuda_ok(cuda.fill(residual.data(), 0, residual.size(), stream), "a fill");
  require_cuda_ok(cuda.fill(words.data(), 0, words.size(), stream), "a fill");
  const device::EncodeArgs encoding{.gradient = {gradient.data(), count, dtype},
                                    .residual = codec.spec.feedback ? residual.as<float>() : nullptr,
                                    .payload = {payload.data(), payload.size()},
                                    .workspace = {workspace.data(), workspace.size()},
                                    .seed = {},
                                    .threshold = reinterpret_cast<uint32_t*>(words.as<uint64_t>() + 1)};
  const device::DecodeArgs decoding{.payload = {payload.data(), payload.size()},
                                    .gradient = dtype,
                                    .out = {out.data(), count, dtype},
                                    .workspace = {workspace.data(), workspace.size()},
                                    .fault = words.as<uint64_t>()};
  std::vector<double> encodes, decodes;
  for (uint64_t i = 0; i <= rounds; ++i) {
    clock.start();
    Status status = device::encode(codec.spec, encoding, stream);
    const double encode_s = clock.stop();
    clock.start();
    if (status.ok()) status = device::decode(codec.spec, decoding, stream);
    const double decode_s = clock.stop();
    if (!status.ok()) throw RunError(codec.text + ": " + status.message());
    if (i == 0) continue;  // loads kernels
    encodes.push_back(encode_s);
    decodes.push_back(decode_s);
  }
  return {median(encodes), median(decodes)};
}

}  // namespace

Sweep measure_sweep(Ranks& ranks, const SweepSetup& setup, Progress& progress) {
  Sweep result;
  ranks.run(setup.shaping, [&](Communicator& comm, Communicator& plain) {
    const bool shows = comm.rank() == 0;
    Sweep sweep = Sweeper(setup, comm, plain).run([&](const std::string& text) {
      if (shows) progress.show(text);
    });
    if (comm.rank() == ranks.first_local()) result = std::move(sweep);
  });
  progress.clear();
  return result;
}

std::vector<ProfileCodec> measure_codecs(Ranks& ranks, const std::vector<NamedCodec>& codecs, DType dtype,
                                         const std::vector<uint64_t>& bytes, uint64_t rounds, double timeout_s,
                                         Progress& progress) {
  std::vector<ProfileCodec> result;
  ranks.run({}, [&](Communicator& carrier, Communicator& comm) {
    const bool on_device = carrier.on_device();
    std::vector<ProfileCodec> list;
    std::vector<double> all(2 * static_cast<size_t>(comm.size()));
    for (const NamedCodec& codec : codecs) {
      for (const uint64_t size : bytes) {
        if (comm.rank() == 0) progress.show(codec.text + " " + format_size(size) + " ...");
        require(comm.barrier({}, Deadline::after(timeout_s)), comm, "barrier");
        const auto [encode_s, decode_s] =
            (on_device ? time_device_codec : time_codec)(codec, dtype, size / dtype_bytes(dtype), rounds, comm.rank());
        const double mine[] = {encode_s, decode_s};
        require(comm.all_gather(mine, all.data(), 2, DType::f64, {}, Deadline::after(timeout_s)), comm,
                "gathering times");
        ProfileCodec times{format_codec(codec.spec).text, dtype_name(dtype), static_cast<double>(size), 0, 0};
        for (size_t r = 0; r < all.size(); r += 2) {
          times.encode_s = std::max(times.encode_s, all[r]);
          times.decode_s = std::max(times.decode_s, all[r + 1]);
        }
        list.push_back(times);
      }
    }
    if (comm.rank() == ranks.first_local()) result = std::move(list);
  });
  progress.clear();
  return result;
}

ProfileKey profile_key(Ranks& ranks, const Shaping& shaping, double timeout_s) {
  ProfileKey key;
  key.device = machine_json()["cpu"].get<std::string>();
  key.backend = ranks.backend();
  if (key.backend == "nccl") key.device = cuda_text();
  key.world_size = static_cast<uint64_t>(ranks.size());
  key.version = GRADGATE_VERSION;
  // Ranks with one host name and one network are on one node: what they send each other takes no wire.
  char name[kNameBytes] = {}, network[64] = {};
  gethostname(name, 128);
  if (readlink("/proc/self/ns/net", network, sizeof network - 1) > 0)
    std::strncat(name, network, kNameBytes - 1 - std::strlen(name));
  std::vector<char> names(kNameBytes * static_cast<size_t>(ranks.size()));
  ranks.run({}, [&](Communicator&, Communicator& comm) {
    std::vector<char> all(names.size());
    require(comm.all_gather(name, all.data(), kNameBytes, DType::u8, {}, Deadline::after(timeout_s)), comm,
            "gathering host names");
    if (comm.rank() == ranks.first_local()) names = std::move(all);
  });
  std::map<std::string, uint64_t> nodes;
  for (size_t r = 0; r < static_cast<size_t>(ranks.size()); ++r)
    key.ranks_per_node = std::max(key.ranks_per_node, ++nodes[&names[r * kNameBytes]]);
  key.topology = std::to_string(nodes.size()) + (nodes.size() == 1 ? " node" : " nodes") + " of up to " +
                 std::to_string(key.ranks_per_node) + " ranks" +
                 (shaping.link ? ", link " + shaping.link->text + " (emulated)" : "");
  return key;
}

}  // namespace gradgate::cli
