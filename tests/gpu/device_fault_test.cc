// Damaged payloads in device memory: the output stays as it was, the fault word says what and whose; and arguments that
// are refused before anything is enqueued.
#include "codecs/header.h"
#include "tests/gpu/gpu_fixture.h"
#include "tests/support/bytes_equal.h"
#include "tests/support/codec_calls.h"
#include "tests/support/gen.h"
#include "tests/support/specs.h"

namespace gradgate::test {
namespace {

constexpr size_t kCount = 5000;

class DeviceFault : public Gpu, public ::testing::WithParamInterface<const char*> {
 protected:
  CodecSpec spec() const { return spec_of(GetParam()); }

  // Decodes a payload; returns the fault's status. `touched`: whether the output changed.
  Status decode_on_device(const Payload& payload, bool* touched) {
    const std::vector<float> before(kCount, -7.0f);
    const uint64_t zero = 0;
    DeviceBuffer in(payload.data(), payload.size()), out(before.data(), kCount * 4), fault(&zero, 8);
    DeviceBuffer workspace(device::workspace_bytes(spec(), DType::f32, kCount));
    device::DecodeArgs args;
    args.payload = {in.data(), in.size()};
    args.out = {out.data(), kCount, DType::f32};
    args.workspace = {workspace.data(), workspace.size()};
    args.fault = fault.as<uint64_t>();
    const Status status = device::decode(spec(), args, stream_);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    uint64_t word = 0;
    std::memcpy(&word, fault.fetch(), 8);
    *touched = std::memcmp(before.data(), out.fetch(), kCount * 4) != 0;
    return device::fault_status(word);
  }
  Payload good() const { return encode(GetParam(), generate(Gen::gaussian, kCount, 1)); }
};

TEST_P(DeviceFault, EveryFieldOfTheHeaderIsChecked) {
  struct Damage {
    size_t at;
    uint8_t flip;
    PayloadFault fault;
  };
  const Damage damages[] = {
      {0, 1, PayloadFault::magic},       {4, 1, PayloadFault::version}, {5, 7, PayloadFault::codec},
      {6, 2, PayloadFault::value_dtype}, {8, 1, PayloadFault::count},   {16, 1, PayloadFault::parameter},
      {20, 1, PayloadFault::parameter},  {7, 4, PayloadFault::flags},   {28, 1, PayloadFault::check}};
  bool touched = false;
  ASSERT_TRUE(decode_on_device(good(), &touched).ok());
  EXPECT_TRUE(touched);
  for (const Damage& d : damages) {
    Payload payload = good();
    payload.put<uint8_t>(d.at, payload.get<uint8_t>(d.at) ^ d.flip);
    const Status status = decode_on_device(payload, &touched);
    EXPECT_EQ(status, (Status{StatusCode::bad_payload, static_cast<int64_t>(d.fault)}))
        << "byte " << d.at << ": detail " << status.detail();
    EXPECT_FALSE(touched) << "byte " << d.at;
  }
}

TEST_P(DeviceFault, AnErrorPayloadNamesThePeersCode) {
  Payload payload = good();
  ASSERT_TRUE(
      encode_error(spec(), DType::f32, kCount, {}, StatusCode::out_of_memory, {payload.data(), payload.size()}).ok());
  bool touched = true;
  EXPECT_EQ(decode_on_device(payload, &touched),
            (Status{StatusCode::peer_failed, static_cast<int64_t>(StatusCode::out_of_memory)}));
  EXPECT_FALSE(touched);
}

class DeviceIndexFault : public DeviceFault {};
TEST_P(DeviceIndexFault, ABadIndexAnywhereStopsTheWholeDecode) {
  const size_t entries =
      kCount / spec().param1 * spec().param0 + std::min<size_t>(spec().param0, kCount % spec().param1);
  const size_t at = section1(entries * dtype_bytes(spec().value)) + 2 * (entries - 1);  // the last one
  bool touched = true;
  for (const uint16_t wrong : {uint16_t{0xffff}, static_cast<uint16_t>(kCount % spec().param1)}) {
    Payload payload = good();
    payload.put<uint16_t>(at, wrong);
    EXPECT_EQ(decode_on_device(payload, &touched),
              (Status{StatusCode::bad_payload, static_cast<int64_t>(PayloadFault::index)}));
    EXPECT_FALSE(touched);
  }
  Payload payload = good();
  payload.put<uint16_t>(at, payload.get<uint16_t>(at - 2));  // twice the same
  EXPECT_EQ(decode_on_device(payload, &touched),
            (Status{StatusCode::bad_payload, static_cast<int64_t>(PayloadFault::index)}));
  EXPECT_FALSE(touched);
}

TEST_P(DeviceFault, TheFirstRankAtFaultIsNamedAndNothingIsSummed) {
  if (!codec_travels_by(spec(), Exchange::two_shot)) return;  // DeviceTopk: refused
  const std::vector<float> g = generate(Gen::gaussian, kCount, 1);
  const Payload term = good();
  const size_t bytes = term.size(), stride = bytes;
  std::vector<std::byte> all(4 * stride);
  for (int rank = 0; rank < 4; ++rank) std::memcpy(all.data() + rank * stride, term.data(), bytes);
  all[3 * stride] ^= std::byte{1};       // rank 3: magic
  all[2 * stride + 28] ^= std::byte{1};  // rank 2: check
  all[1 * stride] ^= std::byte{1};       // rank 1 is this rank: not looked at
  const std::vector<float> e(kCount, 0.5f);
  const std::vector<std::byte> before(bytes, std::byte{0x3c});
  const uint64_t zero = 0;
  DeviceBuffer payloads(all.data(), all.size()), gradient(g.data(), kCount * 4), slot(e.data(), kCount * 4);
  DeviceBuffer payload(before.data(), bytes), fault(&zero, 8),
      workspace(device::workspace_bytes(spec(), DType::f32, kCount));
  device::ReduceArgs args;
  args.payloads = payloads.data();
  args.stride = stride;
  args.ranks = 4;
  args.self = 1;
  args.gradient = {gradient.data(), kCount, DType::f32};
  args.residual = spec().id == CodecId::none ? nullptr : slot.as<float>();
  args.payload = {payload.data(), bytes};
  args.workspace = {workspace.data(), workspace.size()};
  args.fault = fault.as<uint64_t>();
  ASSERT_TRUE(device::reduce_encode(spec(), args, stream_).ok());
  ASSERT_CUDA(cudaStreamSynchronize(stream_));
  uint64_t word = 0;
  std::memcpy(&word, fault.fetch(), 8);
  unsigned rank = 0;
  EXPECT_EQ(device::fault_status(word, &rank),
            (Status{StatusCode::bad_payload, static_cast<int64_t>(PayloadFault::check)}));
  EXPECT_EQ(rank, 2u);
  EXPECT_TRUE(bytes_equal(before.data(), payload.fetch(), bytes));
  EXPECT_TRUE(bytes_equal(e.data(), slot.fetch(), kCount * 4, 4));
}

TEST_P(DeviceFault, TheFirstRankAtFaultIsNamedAndNothingIsWritten) {
  const Payload term = good();
  const size_t bytes = term.size();
  std::vector<std::byte> all(4 * bytes);
  for (int rank = 0; rank < 4; ++rank) std::memcpy(all.data() + rank * bytes, term.data(), bytes);
  const auto sum = [&](bool* touched, unsigned* rank) {
    const std::vector<float> before(kCount, -7.0f);
    const uint64_t zero = 0;
    DeviceBuffer payloads(all.data(), all.size()), out(before.data(), kCount * 4), fault(&zero, 8),
        workspace(device::workspace_bytes(spec(), DType::f32, kCount));
    device::DecodeSumArgs args;
    args.payloads = payloads.data();
    args.stride = bytes;
    args.ranks = 4;
    args.out = {out.data(), kCount, DType::f32};
    args.workspace = {workspace.data(), workspace.size()};
    args.fault = fault.as<uint64_t>();
    EXPECT_TRUE(device::decode_sum(spec(), args, stream_).ok());
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    uint64_t word = 0;
    std::memcpy(&word, fault.fetch(), 8);
    *touched = std::memcmp(before.data(), out.fetch(), kCount * 4) != 0;
    return device::fault_status(word, rank);
  };
  bool touched = false;
  unsigned rank = 99;
  EXPECT_TRUE(sum(&touched, &rank).ok());
  EXPECT_TRUE(touched);
  all[3 * bytes] ^= std::byte{1};  // rank 3: magic
  EXPECT_EQ(sum(&touched, &rank), (Status{StatusCode::bad_payload, static_cast<int64_t>(PayloadFault::magic)}));
  EXPECT_EQ(rank, 3u);
  EXPECT_FALSE(touched);
  all[1 * bytes + 28] ^= std::byte{1};  // rank 1: check
  EXPECT_EQ(sum(&touched, &rank), (Status{StatusCode::bad_payload, static_cast<int64_t>(PayloadFault::check)}));
  EXPECT_EQ(rank, 1u);
  EXPECT_FALSE(touched);
}

std::string name_of(const ::testing::TestParamInfo<const char*>& p) { return test_name(p.param); }
INSTANTIATE_TEST_SUITE_P(Codecs, DeviceFault,
                         ::testing::Values("none", "bf16", "fp16", "int8", "int4:hadamard", "onebit",
                                           "chunk-topk:8/1024", "chunk-topk:3/2048:bf16", "chunk-topk:8/1024:int8",
                                           "topk:0.01", "topk:0.01:int8", "randk:0.01"),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Codecs, DeviceIndexFault,
                         ::testing::Values("chunk-topk:8/1024", "chunk-topk:3/2048:bf16", "chunk-topk:2/32"), name_of);

class DeviceArguments : public Gpu {};
TEST_F(DeviceArguments, AreRefusedBeforeAnythingIsEnqueued) {
  const CodecSpec spec = spec_of("chunk-topk:8/1024");
  const size_t bytes = payload_bytes(spec, DType::f32, kCount),
               scratch = device::workspace_bytes(spec, DType::f32, kCount);
  DeviceBuffer gradient(kCount * 4), payload(bytes), workspace(scratch);
  device::EncodeArgs args;
  args.gradient = {gradient.data(), kCount, DType::f32};
  args.payload = {payload.data(), bytes};
  args.workspace = {workspace.data(), scratch};
  EXPECT_TRUE(device::encode(spec, args, stream_).ok());
  const auto with = [&](auto change) {
    device::EncodeArgs changed = args;
    change(changed);
    return device::encode(spec, changed, stream_);
  };
  EXPECT_EQ(with([&](auto& a) {
              a.payload = {payload.data(), bytes - 1};
            }),
            (Status{StatusCode::payload_too_small, static_cast<int64_t>(bytes)}));
  EXPECT_EQ(with([&](auto& a) {
              a.workspace = {workspace.data(), scratch - 1};
            }),
            (Status{StatusCode::workspace_too_small, static_cast<int64_t>(scratch)}));
  EXPECT_EQ(with([&](auto& a) { a.payload = {payload.data() + 8, bytes}; }).code(), StatusCode::invalid_argument);
  EXPECT_EQ(with([&](auto& a) { a.gradient.data = gradient.data() + 2; }).code(), StatusCode::invalid_argument);
  EXPECT_EQ(with([&](auto& a) { a.gradient.data = nullptr; }).code(), StatusCode::invalid_argument);
  EXPECT_EQ(with([&](auto& a) { a.gradient.dtype = DType::f64; }).code(), StatusCode::unsupported);
  EXPECT_EQ(with([&](auto& a) { a.residual = gradient.as<float>(); }).code(), StatusCode::invalid_argument);
  device::DecodeArgs decode_args;
  decode_args.payload = {payload.data(), bytes};
  decode_args.out = {gradient.data(), kCount, DType::f32};
  decode_args.workspace = {workspace.data(), scratch};
  EXPECT_EQ(device::decode(spec, decode_args, stream_).code(), StatusCode::invalid_argument) << "no fault word";
  device::DecodeSumArgs sum_args;
  sum_args.payloads = payload.data();
  sum_args.stride = bytes;
  sum_args.out = {gradient.data(), kCount, DType::f32};
  sum_args.workspace = {workspace.data(), scratch};
  DeviceBuffer fault(8);
  const auto sum_with = [&](auto change) {
    device::DecodeSumArgs changed = sum_args;
    changed.fault = fault.as<uint64_t>();
    change(changed);
    return device::decode_sum(spec, changed, stream_).code();
  };
  EXPECT_EQ(sum_with([](auto& a) { a.fault = nullptr; }), StatusCode::invalid_argument);
  EXPECT_EQ(sum_with([](auto& a) { a.ranks = 0; }), StatusCode::invalid_argument);
  EXPECT_EQ(sum_with([](auto& a) { a.payloads = nullptr; }), StatusCode::invalid_argument);
  EXPECT_EQ(sum_with([](auto& a) { a.payloads += 8; }), StatusCode::invalid_argument);
  EXPECT_EQ(sum_with([](auto& a) { a.ranks = 2, a.stride -= 16; }), StatusCode::invalid_argument) << "too near";
  EXPECT_EQ(sum_with([](auto& a) { a.ranks = 2, a.stride += 8; }), StatusCode::invalid_argument) << "not aligned";
  EXPECT_EQ(sum_with([&](auto& a) { a.out.data = payload.data(); }), StatusCode::invalid_argument) << "overlaps";
  EXPECT_EQ(sum_with([](auto& a) { a.out.dtype = DType::f64; }), StatusCode::unsupported);
  EXPECT_EQ(sum_with([](auto& a) { a.gradient = DType::f64; }), StatusCode::unsupported);
  EXPECT_EQ(sum_with([&](auto& a) { a.workspace = {workspace.data(), scratch - 1}; }), StatusCode::workspace_too_small);
  // Sizes past 2^31 are arithmetic on the host: they must neither wrap nor allocate.
  const size_t huge = (size_t{1} << 33) + 5;
  EXPECT_GE(payload_bytes(spec, DType::f32, huge), huge / 1024 * 48);
  EXPECT_LE(device::workspace_bytes(spec, DType::f32, huge), size_t{1} << 26);
  ASSERT_CUDA(cudaStreamSynchronize(stream_));
}

}  // namespace
}  // namespace gradgate::test
