// Calls, and whole exchanges, captured in a CUDA graph: replayed, they read the step from the device and give what the
// same calls give alone.
#include "codecs/header.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/support/bytes_equal.h"
#include "tests/support/gen.h"
#include "tests/support/specs.h"

namespace gradgate::test {
namespace {

class DeviceGraph : public Gpu, public ::testing::WithParamInterface<const char*> {};

TEST_P(DeviceGraph, ReplaysReadTheStepAndCarryTheResidual) {
  constexpr size_t kCount = 7001;
  const CodecSpec spec = spec_of(GetParam());
  const bool feedback = takes_feedback(spec);
  const std::vector<float> g = generate(Gen::gaussian, kCount, 1), zeros(kCount, 0.0f);
  const size_t bytes = payload_bytes(spec, DType::f32, kCount);
  const uint64_t no_fault = 0;
  uint32_t step = 100, threshold = 0;
  DeviceBuffer gradient(g.data(), kCount * 4), slot(zeros.data(), kCount * 4), payload(bytes), out(kCount * 4);
  DeviceBuffer workspace(device::workspace_bytes(spec, DType::f32, kCount)), fault(&no_fault, 8), step_word(&step, 4),
      threshold_word(&threshold, 4);
  device::EncodeArgs encode_args;
  encode_args.gradient = {gradient.data(), kCount, DType::f32};
  encode_args.residual = feedback ? slot.as<float>() : nullptr;
  encode_args.payload = {payload.data(), bytes};
  encode_args.workspace = {workspace.data(), workspace.size()};
  encode_args.step = step_word.as<uint32_t>();
  encode_args.threshold = threshold_word.as<uint32_t>();
  device::DecodeArgs decode_args;
  decode_args.payload = {payload.data(), bytes};
  decode_args.out = {out.data(), kCount, DType::f32};
  decode_args.workspace = {workspace.data(), workspace.size()};
  decode_args.fault = fault.as<uint64_t>();

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  ASSERT_TRUE(device::encode(spec, encode_args, stream_).ok());
  ASSERT_TRUE(device::decode(spec, decode_args, stream_).ok());
  ASSERT_CUDA(cudaStreamEndCapture(stream_, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));

  std::vector<float> e = zeros;
  for (step = 100; step < 103; ++step) {
    std::vector<std::byte> expected(bytes), scratch(workspace_bytes(spec, DType::f32, kCount));
    EncodeArgs cpu;
    cpu.gradient = {g.data(), kCount, DType::f32};
    cpu.residual = feedback ? e.data() : nullptr;
    cpu.payload = expected;
    cpu.workspace = scratch;
    cpu.seed.step = step;
    cpu.threshold = &threshold;
    ASSERT_TRUE(encode(spec, cpu).ok());
    std::vector<float> decoded(kCount);
    ASSERT_TRUE(
        decode(
            spec,
            {.payload = expected, .gradient = DType::f32, .out = {decoded.data(), kCount, DType::f32}, .executor = {}})
            .ok());

    ASSERT_CUDA(cudaMemcpy(step_word.data(), &step, 4, cudaMemcpyHostToDevice));
    ASSERT_CUDA(cudaGraphLaunch(exec, stream_));
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
    ASSERT_TRUE(bytes_equal(expected.data(), payload.fetch(), bytes, 4)) << "step " << step;
    ASSERT_TRUE(bytes_equal(decoded.data(), out.fetch(), kCount * 4, 4)) << "step " << step;
    if (feedback) {
      ASSERT_TRUE(bytes_equal(e.data(), slot.fetch(), kCount * 4, 4)) << "step " << step;
    }
    if (spec.id == CodecId::topk) {
      ASSERT_TRUE(bytes_equal(&threshold, threshold_word.fetch(), 4)) << "step " << step;
    }
    ASSERT_TRUE(bytes_equal(&no_fault, fault.fetch(), 8));
  }
  ASSERT_CUDA(cudaGraphExecDestroy(exec));
  ASSERT_CUDA(cudaGraphDestroy(graph));
}

INSTANTIATE_TEST_SUITE_P(Codecs, DeviceGraph,
                         ::testing::Values("none", "bf16", "fp16", "int8", "int8:sr", "int4:hadamard:sr", "onebit",
                                           "chunk-topk:8/1024", "chunk-topk:20/4096", "topk:0.01", "topk:0.05:bf16",
                                           "topk:0.02:int8", "chunk-topk:8/1024:int8", "randk:0.01"),
                         [](const auto& p) { return test_name(p.param); });

class GraphExchange : public NcclRanks, public ::testing::WithParamInterface<const char*> {};

TEST_P(GraphExchange, ReplaysTakeOtherGradientsAndTheirStep) {
  constexpr int kSize = 2;
  constexpr size_t kCount = 3001;
  constexpr uint32_t kSteps[] = {7, 8, 9};
  const Candidate candidate = candidate_of(GetParam());
  const Feedback feedback = candidate.codec.feedback ? Feedback::apply : Feedback::none;
  const auto fill = [&](Ranks& ranks, uint32_t step) {
    for (size_t r = 0; r < kSize; ++r)
      ranks.gradients[r] = Gradient::of(Gen::gaussian, kCount, 10 * step + r, DType::f32);
  };
  // What thread ranks end with, step by step.
  std::vector<Ranks> expected;
  Ranks host(kSize, kCount, DType::f32);
  for (const uint32_t step : kSteps) {
    fill(host, step);
    expect_all_ok(exchange(host, candidate, feedback, step, nodes_of(1)));
    expected.push_back(host);
  }

  Ranks ranks(kSize, kCount, DType::f32);
  fill(ranks, 0);
  run_nccl_ranks(kSize, [&](Communicator& comm) {
    const auto r = static_cast<size_t>(comm.rank());
    ExchangeArgs args = ranks.args(comm.rank(), candidate, feedback, 0);
    nodes_of(1)(args);
    const NodeTiers tiers = tiers_of(comm, args.shape);
    DeviceRank rank(args);
    DeviceBuffer step_word(sizeof(uint32_t));
    rank.place.step = step_word.as<uint32_t>();
    auto* const stream = static_cast<cudaStream_t>(rank.place.stream.handle);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    Message why;
    ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    const Status captured = enqueue_exchange(comm, rank.args, kWatchdogSeconds, nullptr, &why, &tiers);
    ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
    ASSERT_TRUE(captured.ok()) << why.text;
    ASSERT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (size_t i = 0; i < std::size(kSteps); ++i) {
      const Gradient g = Gradient::of(Gen::gaussian, kCount, 10 * kSteps[i] + r, DType::f32);
      ASSERT_CUDA(cudaMemcpy(rank.gradient.data(), g.data(), kCount * sizeof(float), cudaMemcpyHostToDevice));
      ASSERT_CUDA(cudaMemcpy(step_word.data(), &kSteps[i], sizeof(uint32_t), cudaMemcpyHostToDevice));
      ASSERT_CUDA(cudaGraphLaunch(exec, stream));
      ExchangeTimes times;
      ASSERT_TRUE(rank.finish(comm, args, &times, &why).ok()) << why.text;
      EXPECT_TRUE(bytes_equal(expected[i].gradients[r].data(), args.gradient.data, kCount * sizeof(float), 4))
          << "step " << kSteps[i];
      if (args.residual == nullptr) continue;
      EXPECT_TRUE(bytes_equal(expected[i].residuals[r].data(), args.residual, kCount * sizeof(float), 4))
          << "residual after step " << kSteps[i];
    }
    ASSERT_CUDA(cudaGraphExecDestroy(exec));
    ASSERT_CUDA(cudaGraphDestroy(graph));
  });
}

INSTANTIATE_TEST_SUITE_P(Exchanges, GraphExchange,
                         ::testing::Values("none", "int8:sr", "chunk-topk:8/1024", "topk:0.01", "int4:sr@all_gather",
                                           "randk:0.05", "int8:sr@hierarchical"),
                         [](const auto& at) { return test_name(at.param); });

}  // namespace
}  // namespace gradgate::test
