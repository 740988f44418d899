// Sessions over devices: the same training on device ranks and on thread ranks ends with the same bytes; nothing waits
// on the host within a step; errors come with the next step.
#include <gmock/gmock.h>

#include "tests/gpu/nccl_ranks.h"
#include "tests/session/session_fixture.h"

namespace gradgate::test {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using DeviceSession = NcclRanks;

bool emulated() {
  cudaDeviceProp properties;
  return cudaGetDeviceProperties(&properties, 0) == cudaSuccess && std::strstr(properties.name, "emulator") != nullptr;
}

const std::vector<size_t> kCounts = {3000, 513, 4096};

/// One rank's training loop: what the test does per step, and what comes out.
struct Trace {
  std::vector<std::vector<float>> results;    ///< of every bucket of every step
  std::vector<std::vector<float>> residuals;  ///< of every bucket at the end
  std::vector<std::byte> state;
  SessionStats stats;
  Lines log;
};

struct Training {
  Mode mode = Mode::on;
  std::vector<CodecSpec> codecs;
  uint64_t steps = 8, first_step = 0;
  int overflow_rank = -1;  ///< puts an Inf into steps 2 and 5, under a loss scale
  uint64_t flush_before = ~uint64_t{0};
  std::vector<std::vector<std::byte>> load;  ///< per rank
  std::function<void(SessionOptions&)> options = {};
};

/// Runs it over `comm`; gradients are in device memory where the communicator is.
void train(Communicator& comm, const Training& what, Trace* trace) {
  const auto rank = static_cast<size_t>(comm.rank());
  auto session = make_session(comm, what.mode, what.codecs, [&](SessionOptions& options) {
    options.virtual_rates = {};
    options.log = Lines::log;
    options.log_context = &trace->log;
    if (what.options) what.options(options);
  });
  ASSERT_NE(session, nullptr);
  ASSERT_TRUE(set_simple_layout(*session, kCounts).ok()) << session->last_error();
  if (!what.load.empty()) {
    ASSERT_TRUE(session->load_state(what.load[rank]).ok()) << session->last_error();
  }
  TestStream compute;
  // Made once: to free memory waits for the device, and on a shared one for a peer that may be waiting for this rank.
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  for (const size_t count : kCounts) {
    if (comm.on_device()) buffers.push_back(std::make_unique<DeviceBuffer>(count * sizeof(float)));
  }
  double scale = 1024;
  for (uint64_t step = what.first_step; step < what.first_step + what.steps; ++step) {
    const bool overflow = step == 2 || step == 5;
    if (what.overflow_rank >= 0) {
      ASSERT_TRUE(session->set_gradient_scale(scale).ok()) << session->last_error();
    }
    if (step == what.flush_before) {
      ASSERT_TRUE(session->flush().ok()) << session->last_error();
    }
    std::vector<std::vector<float>> gradients;
    for (uint32_t b = 0; b < kCounts.size(); ++b) {
      std::vector<float> g(kCounts[b]);
      for (size_t i = 0; i < g.size(); ++i) {
        g[i] = small_integer(comm.rank(), step * 10 + b, i);
        if (what.overflow_rank >= 0) g[i] *= static_cast<float>(scale);
      }
      if (overflow && b == 1 && comm.rank() == what.overflow_rank) g[100] = std::numeric_limits<float>::infinity();
      Status status;
      if (comm.on_device()) {
        ASSERT_CUDA(cudaMemcpy(buffers[b]->data(), g.data(), g.size() * sizeof(float), cudaMemcpyHostToDevice));
        status = session->all_reduce(b, {buffers[b]->data(), g.size(), DType::f32}, compute.get());
      } else {
        status = session->all_reduce(b, {g.data(), g.size(), DType::f32});
      }
      ASSERT_TRUE(status.ok()) << session->last_error();
      gradients.push_back(std::move(g));
    }
    if (comm.on_device()) {
      ASSERT_TRUE(session->join(compute.get()).ok()) << session->last_error();
      ASSERT_TRUE(comm.wait(compute.get(), patient()).ok()) << comm.last_error();
      for (size_t b = 0; b < buffers.size(); ++b) {
        std::memcpy(gradients[b].data(), buffers[b]->fetch(), buffers[b]->size());
        EXPECT_TRUE(buffers[b]->intact());
      }
    }
    for (auto& g : gradients) trace->results.push_back(std::move(g));
    if (what.overflow_rank >= 0) scale *= overflow ? 0.5 : step % 3 == 0 ? 2 : 1;
  }
  ASSERT_TRUE(session->synchronize().ok()) << session->last_error();
  for (uint32_t b = 0; b < kCounts.size(); ++b) {
    std::vector<float> e(kCounts[b]);
    const float* from = session->residual(b);
    if (from == nullptr) continue;
    if (comm.on_device()) {
      ASSERT_CUDA(cudaMemcpy(e.data(), from, e.size() * sizeof(float), cudaMemcpyDeviceToHost));
    } else {
      std::memcpy(e.data(), from, e.size() * sizeof(float));
    }
    trace->residuals.push_back(std::move(e));
  }
  trace->state.resize(session->state_bytes());
  ASSERT_TRUE(session->save_state(trace->state, nullptr).ok()) << session->last_error();
  trace->stats = session->stats();
}

std::vector<Trace> on_threads(int size, const Training& what) {
  std::vector<Trace> traces(static_cast<size_t>(size));
  run_ranks(size, [&](Communicator& comm) { train(comm, what, &traces[static_cast<size_t>(comm.rank())]); });
  return traces;
}
std::vector<Trace> on_devices(int size, const Training& what) {
  std::vector<Trace> traces(static_cast<size_t>(size));
  run_nccl_ranks(size, [&](Communicator& comm) { train(comm, what, &traces[static_cast<size_t>(comm.rank())]); });
  return traces;
}

bool equal_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_same_bytes(const std::vector<Trace>& device, const std::vector<Trace>& host) {
  for (size_t r = 0; r < host.size(); ++r) {
    ASSERT_EQ(device[r].results.size(), host[r].results.size()) << "rank " << r;
    for (size_t i = 0; i < host[r].results.size(); ++i)
      EXPECT_TRUE(equal_bits(device[r].results[i], host[r].results[i]))
          << "rank " << r << ", step " << i / kCounts.size() << ", bucket " << i % kCounts.size();
    ASSERT_EQ(device[r].residuals.size(), host[r].residuals.size()) << "rank " << r;
    for (size_t b = 0; b < host[r].residuals.size(); ++b)
      EXPECT_TRUE(equal_bits(device[r].residuals[b], host[r].residuals[b]))
          << "residual of rank " << r << ", bucket " << b;
  }
}

TEST_F(DeviceSession, TrainsToTheBytesOfThreadRanks) {
  for (const char* text : {"int8", "chunk-topk:8/1024", "int4"}) {
    Training what;
    what.codecs = {codec(text)};
    what.steps = 5;
    what.flush_before = 3;
    const auto device = on_devices(3, what), host = on_threads(3, what);
    expect_same_bytes(device, host);
    EXPECT_EQ(device[1].stats.steps, 5u);
    EXPECT_EQ(device[1].stats.compressed_buckets, host[1].stats.compressed_buckets) << text;
    EXPECT_EQ(device[1].stats.wire_bytes, host[1].stats.wire_bytes) << text;
    EXPECT_GT(device[1].stats.encode_s, 0.0) << text;
    EXPECT_GT(device[1].stats.transfer_s, 0.0) << text;
  }
}

TEST_F(DeviceSession, TrainsToTheBytesOfThreadRanksOverNodesAndSums) {
  for (const char* text : {"chunk-topk:8/1024@hierarchical", "randk:0.1"}) {
    const Candidate candidate = candidate_of(text);
    Training what;
    what.steps = 4;
    what.flush_before = 2;
    what.options = [&](SessionOptions& options) {
      options.candidates = {&candidate, 1};
      options.ranks_per_node = 2;
    };
    const auto device = on_devices(4, what), host = on_threads(4, what);
    expect_same_bytes(device, host);
    EXPECT_EQ(device[3].stats.compressed_buckets, 9u) << text;
    EXPECT_EQ(device[3].stats.wire_bytes, host[3].stats.wire_bytes) << text;
  }
}

TEST_F(DeviceSession, ScalesAndSkipsStepsAsThreadRanksDo) {
  Training what;
  what.codecs = {codec("chunk-topk:8/1024")};
  what.steps = 7;
  what.overflow_rank = 1;
  const auto device = on_devices(2, what), host = on_threads(2, what);
  expect_same_bytes(device, host);
  EXPECT_EQ(device[0].stats.skipped_steps, 2u);
  EXPECT_EQ(device[0].stats.non_finite, host[0].stats.non_finite);
}

TEST_F(DeviceSession, TwoPlusFourStepsEqualSix) {
  Training what;
  what.codecs = {codec("chunk-topk:8/1024")};
  what.steps = 6;
  const auto six = on_devices(2, what);
  what.steps = 2;
  const auto two = on_devices(2, what);
  what.first_step = 2;
  what.steps = 4;
  for (const Trace& trace : two) what.load.push_back(trace.state);
  const auto four = on_devices(2, what);
  for (size_t r = 0; r < 2; ++r) {
    for (size_t i = 0; i < four[r].results.size(); ++i)
      EXPECT_TRUE(equal_bits(four[r].results[i], six[r].results[i + 2 * kCounts.size()])) << r << " " << i;
    for (size_t b = 0; b < four[r].residuals.size(); ++b)
      EXPECT_TRUE(equal_bits(four[r].residuals[b], six[r].residuals[b])) << r << " " << b;
  }
}

// The gate on devices: measured by events, agreed through staged host memory, verified. What it decides depends on the
// machine; that all ranks decide the same, and that nothing is lost meanwhile, does not.
TEST_F(DeviceSession, TheGateDecidesTheSameOnAllRanksAndLosesNothing) {
  constexpr int kSize = 3;
  // Under emulation codecs are slow and the network is fast: this is one on which they pay. No other NCCL knows the
  // name.
  setenv("CUDAEMU_NCCL_BETA_GBPS", "0.0005", 0);
  Training what;
  what.mode = Mode::automatic;
  what.codecs = {codec("int8"), codec("chunk-topk:8/1024")};
  what.steps = 70;
  what.options = [](SessionOptions& options) { options.link = {1e-4, 5e5}; };
  const auto traces = on_devices(kSize, what);
  for (size_t r = 1; r < traces.size(); ++r) {
    ASSERT_EQ(traces[r].log.lines, traces[0].log.lines) << "rank " << r;
    for (size_t i = 0; i < traces[0].results.size(); ++i)
      ASSERT_TRUE(equal_bits(traces[r].results[i], traces[0].results[i])) << "rank " << r << " " << i;
  }
  EXPECT_EQ(traces[0].stats.steps, 70u);
  if (emulated()) {
    EXPECT_GT(traces[0].stats.compressed_buckets, 0u);
  }
  EXPECT_GT(traces[0].stats.gate_s, 0.0);
  // N · Σ out + Σ e = Σ Σ g. int8 rounds its sums; what it lost is bounded by its steps' scales.
  for (size_t b = 0; b < kCounts.size(); ++b) {
    double sent = 0, received = 0;
    for (uint64_t step = 0; step < what.steps; ++step) {
      for (size_t i = 0; i < kCounts[b]; ++i) {
        for (int r = 0; r < kSize; ++r) sent += small_integer(r, step * 10 + b, i);
        received += kSize * static_cast<double>(traces[0].results[step * kCounts.size() + b][i]);
      }
    }
    for (const Trace& trace : traces) {
      for (const float e : trace.residuals[b]) received += e;
    }
    EXPECT_NEAR(received, sent, 0.02 * static_cast<double>(kCounts[b]) * static_cast<double>(what.steps))
        << "bucket " << b;
  }
}

TEST_F(DeviceSession, ProbesTheLinkByEvents) {
  Training what;
  what.mode = Mode::automatic;
  what.codecs = {codec("int8")};
  what.steps = 3;
  const auto traces = on_devices(2, what);
  EXPECT_GT(traces[0].stats.gate_s, 0.0);
  EXPECT_EQ(traces[0].stats.steps, 3u);
  // Two tiers: both are probed, and what is measured aside is a shard's work.
  const Candidate candidates[] = {candidate_of("int8@hierarchical"), candidate_of("randk:0.1")};
  what.codecs = {};
  what.steps = 5;
  what.options = [&](SessionOptions& options) {
    options.candidates = candidates;
    options.ranks_per_node = 1;
  };
  const auto tiers = on_devices(2, what);
  EXPECT_GT(tiers[0].stats.gate_s, 0.0);
  EXPECT_EQ(tiers[1].stats.steps, 5u);
}

TEST_F(DeviceSession, OffAndObserveAreThePlainSum) {
  for (const Mode mode : {Mode::off, Mode::observe}) {
    Training what;
    what.mode = mode;
    what.codecs = {codec("chunk-topk:8/1024")};
    what.steps = 30;
    what.options = [](SessionOptions& options) { options.link = {1e-3, 1e6}; };
    const auto device = on_devices(4, what);
    Training plain;
    plain.mode = Mode::off;
    plain.codecs = what.codecs;
    plain.steps = 30;
    const auto host = on_threads(4, plain);
    for (size_t i = 0; i < host[0].results.size(); ++i)
      ASSERT_TRUE(equal_bits(device[0].results[i], host[0].results[i])) << mode_name(mode) << " " << i;
  }
}

TEST_F(DeviceSession, RegroupedBucketsKeepTheirResiduals) {
  run_nccl_ranks(2, [](Communicator& comm) {
    auto session = make_session(comm, Mode::on, {codec("chunk-topk:8/1024")});
    ASSERT_TRUE(set_simple_layout(*session, {1024, 2048}).ok()) << session->last_error();
    TestStream compute;
    std::vector<float> a(1024), b(2048);
    for (size_t i = 0; i < a.size(); ++i) a[i] = small_integer(comm.rank(), 0, i);
    for (size_t i = 0; i < b.size(); ++i) b[i] = small_integer(comm.rank(), 1, i);
    DeviceBuffer first(a.data(), a.size() * 4), second(b.data(), b.size() * 4);
    ASSERT_TRUE(session->all_reduce(0, {first.data(), a.size(), DType::f32}, compute.get()).ok());
    ASSERT_TRUE(session->all_reduce(1, {second.data(), b.size(), DType::f32}, compute.get()).ok());
    ASSERT_TRUE(session->synchronize().ok()) << session->last_error();
    std::vector<float> before(2048), after(2048);
    ASSERT_CUDA(cudaMemcpy(before.data(), session->residual(1), 2048 * 4, cudaMemcpyDeviceToHost));
    // Parameter 2 alone now; parameter 1 is gone and counted.
    ASSERT_TRUE(set_simple_layout(*session, {2048}, DType::f32, 2).ok()) << session->last_error();
    ASSERT_CUDA(cudaMemcpy(after.data(), session->residual(0), 2048 * 4, cudaMemcpyDeviceToHost));
    EXPECT_EQ(after, before);
    EXPECT_GT(session->stats().dropped_residuals, 0u);
    // A step outside the layout, then the layout again.
    const float one = 1;
    DeviceBuffer value(&one, 4);
    ASSERT_TRUE(session->all_reduce_dense({value.data(), 1, DType::f32}, compute.get()).ok()) << session->last_error();
    ASSERT_TRUE(session->join(compute.get()).ok());
    ASSERT_TRUE(comm.wait(compute.get(), patient()).ok());
    float got = 0;
    std::memcpy(&got, value.fetch(), 4);
    EXPECT_EQ(got, 1.0f);
    ASSERT_TRUE(set_simple_layout(*session, {2048}, DType::f32, 2).ok()) << session->last_error();
  });
}

TEST_F(DeviceSession, AVanishedRankIsNamedWithBucketStepAndTime) {
  // Also where it is the communicator of a node that waits: it must not keep the session from ending.
  for (const char* text : {"int8", "int8@hierarchical"}) {
    const Candidate candidate = candidate_of(text);
    run_nccl_ranks(2, [&](Communicator& comm) {
      auto session = make_session(comm, Mode::on, {}, [&](SessionOptions& options) {
        options.candidates = {&candidate, 1};
        options.ranks_per_node = 2;
        options.timeout_s = 0.5;
      });
      ASSERT_TRUE(set_simple_layout(*session, {1000, 1000}).ok()) << session->last_error();
      TestStream compute;
      std::vector<float> g(1000, 1.0f);
      DeviceBuffer gradient(g.data(), g.size() * 4);
      const Vec both{gradient.data(), g.size(), DType::f32};
      ASSERT_TRUE(session->all_reduce(0, both, compute.get()).ok());
      if (comm.rank() == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(800));
        return;
      }
      ASSERT_TRUE(session->all_reduce(1, both, compute.get()).ok());
      EXPECT_EQ(session->synchronize().code(), StatusCode::timeout) << text;
      // The first bucket is through: both ranks called it.
      EXPECT_THAT(session->last_error(),
                  AllOf(HasSubstr("bucket 1 step 0"), HasSubstr("transfer"), ContainsRegex("after 0\\.[0-9]+ s")))
          << text;
      if (candidate.exchange == Exchange::two_shot) {
        EXPECT_THAT(session->last_error(), HasSubstr("all_gather"));
      }
      EXPECT_EQ(session->all_reduce(0, both, compute.get()).code(), StatusCode::bad_state);
    });
  }
}

TEST_F(DeviceSession, SaysWhatItNeeds) {
  run_nccl_ranks(1, [](Communicator& comm) {
    auto session = make_session(comm, Mode::on, {codec("int8")});
    ASSERT_TRUE(set_simple_layout(*session, {100}).ok());
    TestStream compute;
    std::vector<float> g(100, 1.0f);
    DeviceBuffer gradient(g.data(), g.size() * 4);
    ASSERT_TRUE(session->all_reduce(0, {gradient.data(), g.size(), DType::f32}, compute.get()).ok());
    std::vector<std::byte> state(session->state_bytes());
    EXPECT_EQ(session->save_state(state, nullptr).code(), StatusCode::bad_state);
    EXPECT_THAT(session->last_error(), HasSubstr("synchronize() first"));
    ASSERT_TRUE(session->synchronize().ok());
    EXPECT_TRUE(session->save_state(state, nullptr).ok());
  });
  run_ranks(1, [](Communicator& comm) {
    auto session = make_session(comm, Mode::off, {});
    ASSERT_TRUE(set_simple_layout(*session, {1}).ok());
    float g = 1;
    EXPECT_EQ(session->all_reduce(0, {&g, 1, DType::f32}, Stream{&g}).code(), StatusCode::invalid_argument);
    EXPECT_THAT(session->last_error(), HasSubstr("stream"));
    EXPECT_TRUE(session->join({}).ok());
    EXPECT_TRUE(session->synchronize().ok());
  });
}

}  // namespace
}  // namespace gradgate::test
