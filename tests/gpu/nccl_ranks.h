// NCCL ranks as threads, on as many devices as there are, and exchanges on them.
#pragma once

#include "gradgate/device_exchange.h"
#include "gradgate/nccl.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/multirank/exchange_fixture.h"

namespace gradgate::test {

inline int device_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 ? count : 1;
}

/// Skips without a device or without NCCL; GRADGATE_REQUIRE_NCCL=1 forbids the latter.
class NcclRanks : public Gpu {
 protected:
  void SetUp() override {
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);  // ranks share a device where there are fewer devices
    Gpu::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    Message why;
    if (nccl_version(&why) != 0) return;
    const char* require = std::getenv("GRADGATE_REQUIRE_NCCL");
    if (require != nullptr && std::strcmp(require, "1") == 0) FAIL() << "GRADGATE_REQUIRE_NCCL=1: " << why.text;
    GTEST_SKIP() << why.text;
  }
};

/// body(communicator) on every rank, in a thread with its device current.
inline void run_nccl_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  NcclId id;
  Message why;
  ASSERT_TRUE(make_nccl_id(&id, &why).ok()) << why.text;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      ASSERT_CUDA(cudaSetDevice(rank % device_count()));
      std::unique_ptr<Communicator> comm;
      Message text;
      const Status status = make_nccl(id, rank, ranks, kWatchdogSeconds, &comm, &text);
      ASSERT_TRUE(status.ok()) << "rank " << rank << ": " << text.text;
      try {
        body(*comm);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "rank " << rank << " threw: " << e.what();
      } catch (const std::string& e) {
        ADD_FAILURE() << "rank " << rank << ": " << e;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

/// A stream of the current device.
class TestStream {
 public:
  TestStream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess); }
  ~TestStream() { EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  Stream get() const { return {stream_}; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// One rank's exchange with everything in device memory.
struct DeviceRank {
  ExchangeArgs args;
  DeviceBuffer gradient, residual, workspace, record;
  TestStream stream;
  DevicePlace place;
  ExchangeMachine between;

  /// `host`: the arguments as for the CPU; its gradient and residual are copied in.
  explicit DeviceRank(const ExchangeArgs& host)
      : args(on_device(host)),
        gradient(host.gradient.data, host.gradient.count * dtype_bytes(host.gradient.dtype)),
        residual(host.residual, host.residual == nullptr ? 0 : host.gradient.count * sizeof(float)),
        workspace(exchange_workspace_bytes(args.shape), 48),
        record(sizeof(ExchangeRecord)) {
    args.gradient.data = gradient.data();
    args.residual = host.residual == nullptr ? nullptr : residual.as<float>();
    args.workspace = {workspace.data(), workspace.size()};
    place.stream = stream.get();
    place.record = record.as<ExchangeRecord>();
    place.between = &between;
    args.device = &place;
    const ExchangeRecord empty;
    EXPECT_EQ(cudaMemcpy(record.data(), &empty, sizeof empty, cudaMemcpyHostToDevice), cudaSuccess);
  }
  /// Waits, copies gradient and residual back, and says what the record says. Canaries must stand.
  Status finish(Communicator& comm, const ExchangeArgs& host, ExchangeTimes* times, Message* why) {
    if (const Status s = comm.wait(place.stream, patient()); !s.ok()) {
      why->format("%s", comm.last_error());
      return s;
    }
    if (gradient.size() > 0) std::memcpy(host.gradient.data, gradient.fetch(), gradient.size());
    if (residual.size() > 0) std::memcpy(host.residual, residual.fetch(), residual.size());
    workspace.fetch();
    EXPECT_TRUE(gradient.intact() && residual.intact() && workspace.intact()) << "rank " << comm.rank();
    ExchangeRecord copy;
    std::memcpy(&copy, record.fetch(), sizeof copy);
    return exchange_record_status(args, copy, &times->non_finite, why);
  }

 private:
  static ExchangeArgs on_device(ExchangeArgs args) {
    args.shape.device = true;
    return args;
  }
};

/// exchange() of exchange_fixture.h over NCCL.
inline std::vector<Outcome> exchange_on_devices(Ranks& ranks, const Candidate& candidate, Feedback feedback,
                                                uint32_t step, const std::function<void(ExchangeArgs&)>& change = {}) {
  std::vector<Outcome> outcomes(ranks.gradients.size());
  run_nccl_ranks(ranks.size(), [&](Communicator& comm) {
    ExchangeArgs args = ranks.args(comm.rank(), candidate, feedback, step);
    if (change) change(args);
    Outcome& outcome = outcomes[static_cast<size_t>(comm.rank())];
    const NodeTiers tiers = tiers_of(comm, args.shape);
    DeviceRank rank(args);
    outcome.status = enqueue_exchange(comm, rank.args, kWatchdogSeconds, nullptr, &outcome.why, &tiers);
    if (outcome.status.ok()) outcome.status = rank.finish(comm, args, &outcome.times, &outcome.why);
  });
  return outcomes;
}

}  // namespace gradgate::test
