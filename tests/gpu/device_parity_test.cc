// Every codec x dtype x feedback x generator x size: the device gives the CPU's bytes (payload, residual, decoded
// output, sums) and writes nothing else.
#include <algorithm>
#include <bit>
#include <tuple>

#include "tests/gpu/gpu_fixture.h"
#include "tests/support/bytes_equal.h"
#include "tests/support/gen.h"
#include "tests/support/specs.h"

namespace gradgate::test {
namespace {

constexpr size_t kSizes[] = {0, 1, 31, 32, 33, 255, 256, 257, 10001, 65535, 65536, 65537, 1000003};

using Param = std::tuple<std::string, DType, bool>;

class DeviceParity : public Gpu, public ::testing::WithParamInterface<Param> {
 protected:
  CodecSpec spec() const { return spec_of(std::get<0>(GetParam()).c_str()); }
  DType dtype() const { return std::get<1>(GetParam()); }
  bool feedback() const { return std::get<2>(GetParam()); }

  // Generators for a size: all for small ones, those that differ most for large ones.
  static std::vector<Gen> gens(size_t n) {
    if (n > 500000) return {Gen::heavy_tail};
    if (n > 60000) return {Gen::gaussian, Gen::zero_groups, Gen::non_finite, Gen::ties};
    return {std::begin(kAllGens), std::end(kAllGens)};
  }
  std::vector<float> residual(Gen gen, size_t n) const {
    std::vector<float> e = generate(gen == Gen::constant || gen == Gen::zeros ? Gen::gaussian : gen, n, 77);
    for (size_t i = 0; i < e.size(); i += 3) e[i] *= 0.25f;
    return e;
  }
};

struct CpuEncoded {
  std::vector<std::byte> payload;
  std::vector<float> residual;
  EncodeStats stats;
};

// A vector of bytes whose data is 16-byte aligned, as operator new gives it.
CpuEncoded encode_on_cpu(const CodecSpec& spec, const Gradient& g, const std::vector<float>* e, bool flush, Seed seed) {
  CpuEncoded r;
  r.payload.resize(payload_bytes(spec, g.dtype, g.count()));
  if (e != nullptr) r.residual = *e;
  std::vector<std::byte> workspace(workspace_bytes(spec, g.dtype, g.count()));
  EncodeArgs args;
  args.gradient = g.view();
  args.residual = e == nullptr ? nullptr : r.residual.data();
  args.payload = r.payload;
  args.workspace = workspace;
  args.seed = seed;
  args.flush = flush;
  const Status status = encode(spec, args, &r.stats);
  EXPECT_TRUE(status.ok()) << status.message();
  return r;
}

TEST_P(DeviceParity, EncodeGivesTheBytesOfTheCpu) {
  for (const size_t n : kSizes) {
    for (const Gen gen : gens(n)) {
      for (const bool flush : {false, true}) {
        if (flush && (!feedback() || n > 60000)) continue;
        SCOPED_TRACE(std::string(gen_name(gen)) + " n=" + std::to_string(n) + (flush ? " flush" : ""));
        const Gradient g = Gradient::of(gen, n, 11, dtype());
        const std::vector<float> e = residual(gen, n);
        const Seed seed{3, 4, 41, 5};
        const CpuEncoded cpu = encode_on_cpu(spec(), g, feedback() ? &e : nullptr, flush, seed);

        // Misaligned to everything but the element, one time in two.
        const size_t element = dtype_bytes(dtype()), odd = n % 2;
        DeviceBuffer gradient(g.data(), g.bytes(), odd * element), slot(e.data(), n * 4, odd * 4);
        DeviceBuffer payload(cpu.payload.size()), workspace(device::workspace_bytes(spec(), dtype(), n), n % 13);
        const uint64_t zero = 0;
        DeviceBuffer odd_count(&zero, 8);
        device::EncodeArgs args;
        args.gradient = {gradient.data(), n, dtype()};
        args.residual = feedback() ? slot.as<float>() : nullptr;
        args.payload = {payload.data(), payload.size()};
        args.workspace = {workspace.data(), workspace.size()};
        args.seed = seed;
        args.flush = flush;
        args.non_finite = odd_count.as<uint64_t>();
        const Status status = device::encode(spec(), args, stream_);
        ASSERT_TRUE(status.ok()) << status.message() << " " << status.detail();
        ASSERT_CUDA(cudaStreamSynchronize(stream_));
        ASSERT_TRUE(bytes_equal(cpu.payload.data(), payload.fetch(), payload.size(), 4)) << "payload";
        ASSERT_TRUE(bytes_equal(feedback() ? cpu.residual.data() : e.data(), slot.fetch(), slot.size(), 4))
            << "residual";
        ASSERT_TRUE(bytes_equal(g.data(), gradient.fetch(), gradient.size(), element)) << "the gradient was changed";
        uint64_t seen = 0;
        std::memcpy(&seen, odd_count.fetch(), 8);
        EXPECT_EQ(seen, cpu.stats.non_finite);
        workspace.fetch();
        ASSERT_TRUE(payload.intact() && slot.intact() && gradient.intact() && workspace.intact());
      }
    }
  }
}

class DeviceDecode : public DeviceParity {};  // a payload does not tell whether there was a residual
TEST_P(DeviceDecode, GivesTheBytesOfTheCpu) {
  for (const size_t n : kSizes) {
    for (const Gen gen : gens(n)) {
      const Gradient g = Gradient::of(gen, n, 12, dtype());
      const CpuEncoded cpu = encode_on_cpu(spec(), g, nullptr, false, {});
      for (const DType to : {DType::f32, DType::bf16, DType::f16}) {
        if (spec().id == CodecId::none && to != dtype()) continue;
        for (const auto& [scale, into] : {std::pair{1.0f, Into::store}, {1.0f / 3, Into::store}, {-0.25f, Into::add}}) {
          SCOPED_TRACE(std::string(gen_name(gen)) + " n=" + std::to_string(n) + " to " + dtype_name(to) + " scale " +
                       std::to_string(scale));
          const Gradient before = Gradient::of(Gen::zero_groups, n, 5, to);
          Gradient after = before;
          DecodeArgs host;
          host.payload = cpu.payload;
          host.gradient = dtype();
          host.out = after.vec();
          host.scale = scale;
          host.into = into;
          ASSERT_TRUE(decode(spec(), host).ok());

          DeviceBuffer payload(cpu.payload.data(), cpu.payload.size()),
              out(before.data(), before.bytes(), n % 2 * dtype_bytes(to));
          DeviceBuffer workspace(device::workspace_bytes(spec(), dtype(), n));
          const uint64_t zero = 0;
          DeviceBuffer fault(&zero, 8);
          device::DecodeArgs args;
          args.payload = {payload.data(), payload.size()};
          args.gradient = dtype();
          args.out = {out.data(), n, to};
          args.scale = scale;
          args.into = into;
          args.workspace = {workspace.data(), workspace.size()};
          args.fault = fault.as<uint64_t>();
          const Status status = device::decode(spec(), args, stream_);
          ASSERT_TRUE(status.ok()) << status.message() << " " << status.detail();
          ASSERT_CUDA(cudaStreamSynchronize(stream_));
          ASSERT_TRUE(bytes_equal(after.data(), out.fetch(), out.size(), dtype_bytes(to)));
          ASSERT_TRUE(bytes_equal(&zero, fault.fetch(), 8)) << "a fault in a good payload";
          ASSERT_TRUE(out.intact());
        }
      }
    }
  }
}

// The end of an all_gather: the payloads of all ranks, into out.
TEST_P(DeviceDecode, SumOfAllPayloadsGivesTheBytesOfTheCpu) {
  for (const size_t n : {size_t{0}, size_t{1}, size_t{33}, size_t{257}, size_t{10001}, size_t{70001}}) {
    for (const Gen gen : {Gen::gaussian, Gen::zero_groups, Gen::non_finite, Gen::ties, Gen::tiny}) {
      for (const unsigned ranks : {1u, 2u, 5u}) {
        if (n > 20000 && ranks != 5) continue;
        const size_t bytes = payload_bytes(spec(), dtype(), n), stride = bytes + 16 * (ranks - 1);
        std::vector<std::byte> all(stride * (ranks - 1) + bytes);
        std::vector<ConstBytes> terms;
        for (unsigned rank = 0; rank < ranks; ++rank) {
          const Gradient g = Gradient::of(rank % 2 == 0 ? gen : Gen::gaussian, n, 100 + rank, dtype());
          const CpuEncoded cpu = encode_on_cpu(spec(), g, nullptr, false, {3, 4, 7 + rank, rank});
          std::memcpy(all.data() + rank * stride, cpu.payload.data(), bytes);
        }
        for (unsigned rank = 0; rank < ranks; ++rank) terms.emplace_back(all.data() + rank * stride, bytes);
        DeviceBuffer payloads(all.data(), all.size());
        for (const auto& [to, scale] :
             {std::pair{DType::f32, 1.0f}, {DType::f32, -0.25f}, {DType::bf16, 1.0f / 3}, {DType::f16, 1.0f}}) {
          SCOPED_TRACE(std::string(gen_name(gen)) + " n=" + std::to_string(n) + " ranks " + std::to_string(ranks) +
                       " to " + dtype_name(to) + " scale " + std::to_string(scale));
          const Gradient before = Gradient::of(Gen::gaussian, n, 5, to);
          Gradient expected = before;
          std::vector<std::byte> scratch(decode_sum_bytes(spec(), dtype(), n, ranks));
          ASSERT_TRUE(decode_sum(spec(), {.payloads = terms,
                                          .gradient = dtype(),
                                          .out = expected.vec(),
                                          .scale = scale,
                                          .workspace = scratch,
                                          .executor = {}})
                          .ok());
          DeviceBuffer out(before.data(), before.bytes(), n % 2 * dtype_bytes(to));
          DeviceBuffer workspace(device::workspace_bytes(spec(), dtype(), n), n % 13);
          const uint64_t zero = 0;
          DeviceBuffer fault(&zero, 8);
          device::DecodeSumArgs args;
          args.payloads = payloads.data();
          args.stride = stride;
          args.ranks = ranks;
          args.gradient = dtype();
          args.out = {out.data(), n, to};
          args.scale = scale;
          args.workspace = {workspace.data(), workspace.size()};
          args.fault = fault.as<uint64_t>();
          const Status status = device::decode_sum(spec(), args, stream_);
          ASSERT_TRUE(status.ok()) << status.message() << " " << status.detail();
          ASSERT_CUDA(cudaStreamSynchronize(stream_));
          ASSERT_TRUE(bytes_equal(expected.data(), out.fetch(), out.size(), dtype_bytes(to)));
          ASSERT_TRUE(bytes_equal(&zero, fault.fetch(), 8)) << "a fault in a good payload";
          workspace.fetch();
          ASSERT_TRUE(out.intact() && workspace.intact());
        }
      }
    }
  }
}

TEST_P(DeviceParity, SumOfAllRanksGivesTheBytesOfTheCpu) {
  if (!codec_travels_by(spec(), Exchange::two_shot)) return;  // DeviceTopk: refused
  for (const size_t n : {size_t{0}, size_t{1}, size_t{257}, size_t{10001}, size_t{70001}}) {
    for (const Gen gen : {Gen::gaussian, Gen::zero_groups, Gen::non_finite, Gen::ties, Gen::tiny}) {
      for (const auto& [ranks, self] : {std::pair<unsigned, unsigned>{1, 0}, {3, 0}, {3, 2}, {4, 1}}) {
        if (n > 20000 && ranks != 3) continue;
        SCOPED_TRACE(std::string(gen_name(gen)) + " n=" + std::to_string(n) + " ranks " + std::to_string(ranks) +
                     " self " + std::to_string(self));
        const Gradient own = Gradient::of(gen, n, 100 + self, dtype());
        const size_t bytes = payload_bytes(spec(), dtype(), n), stride = bytes + 48;
        std::vector<std::byte> all(stride * ranks);
        std::vector<ConstBytes> terms;
        std::vector<CpuEncoded> encoded;
        for (unsigned rank = 0; rank < ranks; ++rank) {
          encoded.push_back(encode_on_cpu(
              spec(), Gradient::of(rank % 2 == 0 ? gen : Gen::gaussian, n, 100 + rank, dtype()), nullptr, false, {}));
          if (rank != self) std::memcpy(all.data() + rank * stride, encoded.back().payload.data(), bytes);
        }
        for (unsigned rank = 0; rank < ranks; ++rank)
          terms.push_back(rank == self ? ConstBytes{} : ConstBytes(encoded[rank].payload));
        const std::vector<float> e = residual(gen, n);
        std::vector<float> expected_e = e;
        std::vector<std::byte> expected(bytes), scratch(workspace_bytes(spec(), dtype(), n));
        ReduceArgs host;
        host.payloads = terms;
        host.self = self;
        host.gradient = own.view();
        host.residual = feedback() ? expected_e.data() : nullptr;
        host.payload = expected;
        host.workspace = scratch;
        host.seed.step = 7;
        EncodeStats stats;
        ASSERT_TRUE(reduce_encode(spec(), host, &stats).ok());

        DeviceBuffer payloads(all.data(), all.size()), gradient(own.data(), own.bytes(), n % 2 * dtype_bytes(dtype())),
            slot(e.data(), n * 4);
        DeviceBuffer payload(bytes), workspace(device::workspace_bytes(spec(), dtype(), n));
        const uint64_t words[2] = {0, 0};
        DeviceBuffer fault(words, 16);
        device::ReduceArgs args;
        args.payloads = payloads.data();
        args.stride = stride;
        args.ranks = ranks;
        args.self = self;
        args.gradient = {gradient.data(), n, dtype()};
        args.residual = feedback() ? slot.as<float>() : nullptr;
        args.payload = {payload.data(), bytes};
        args.workspace = {workspace.data(), workspace.size()};
        args.seed.step = 7;
        args.fault = fault.as<uint64_t>();
        args.non_finite = fault.as<uint64_t>() + 1;
        const Status status = device::reduce_encode(spec(), args, stream_);
        ASSERT_TRUE(status.ok()) << status.message() << " " << status.detail();
        ASSERT_CUDA(cudaStreamSynchronize(stream_));
        ASSERT_TRUE(bytes_equal(expected.data(), payload.fetch(), bytes, 4)) << "payload";
        ASSERT_TRUE(bytes_equal(expected_e.data(), slot.fetch(), slot.size(), 4)) << "residual";
        uint64_t seen[2];
        std::memcpy(seen, fault.fetch(), 16);
        EXPECT_EQ(seen[0], 0u);
        EXPECT_EQ(seen[1], stats.non_finite);
        ASSERT_TRUE(payload.intact() && slot.intact());
      }
    }
  }
}

// Test cases are listed where there is no device to ask; the test below asks it.
bool has_kernels(const CodecSpec& spec) { return spec.id <= CodecId::randk; }
std::vector<Param> params(bool with_feedback) {
  std::vector<Param> all;
  for (const char* text : kSpecs) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      if (!codec_takes(spec_of(text), dtype) || !has_kernels(spec_of(text))) continue;
      all.emplace_back(text, dtype, false);
      if (with_feedback && takes_feedback(spec_of(text))) all.emplace_back(text, dtype, true);
    }
  }
  return all;
}
std::string name_of(const ::testing::TestParamInfo<Param>& p) {
  return test_name(std::get<0>(p.param)) + "_" + dtype_name(std::get<1>(p.param)) +
         (std::get<2>(p.param) ? "_ef" : "_noef");
}
INSTANTIATE_TEST_SUITE_P(Codecs, DeviceParity, ::testing::ValuesIn(params(true)), name_of);
INSTANTIATE_TEST_SUITE_P(Codecs, DeviceDecode, ::testing::ValuesIn(params(false)), name_of);

class DeviceCodecs : public Gpu {};
TEST_F(DeviceCodecs, TheListOfThisTestIsTheDevices) {
  for (const char* text : kSpecs)
    EXPECT_EQ(device::takes(spec_of(text), DType::f32), has_kernels(spec_of(text))) << text;
}

// fp16 by the scale of the step before, right or wrong: the same bytes, and the greatest magnitude of this step is
// left.
class DeviceFp16 : public Gpu {};
TEST_F(DeviceFp16, AnyGuessOfTheScaleGivesTheBytesOfTheCpu) {
  const CodecSpec spec = spec_of("fp16");
  for (const size_t n : {size_t{1}, size_t{255}, size_t{257}, size_t{10001}, size_t{70000}}) {
    for (const Gen gen : kAllGens) {
      if (n > 60000 && gen != Gen::gaussian && gen != Gen::non_finite) continue;
      const Gradient g = Gradient::of(gen, n, 3, DType::f32);
      uint32_t greatest = 0;
      for (const float v : generate(gen, n, 3)) {
        const uint32_t m = std::bit_cast<uint32_t>(v) & 0x7fffffffu;
        if (m < 0x7f800000u) greatest = std::max(greatest, m);
      }
      const CpuEncoded cpu = encode_on_cpu(spec, g, nullptr, false, {});
      for (const uint32_t guess : {0u, greatest, greatest / 2, greatest + (1u << 23), 0x3f800000u, 0xffffffffu}) {
        SCOPED_TRACE(std::string(gen_name(gen)) + " n=" + std::to_string(n) + " guess " + std::to_string(guess));
        DeviceBuffer gradient(g.data(), g.bytes(), n % 2 * 4), payload(cpu.payload.size()), word(&guess, 4);
        DeviceBuffer workspace(device::workspace_bytes(spec, DType::f32, n));
        const uint64_t zero = 0;
        DeviceBuffer odd(&zero, 8);
        device::EncodeArgs args;
        args.gradient = {gradient.data(), n, DType::f32};
        args.payload = {payload.data(), payload.size()};
        args.workspace = {workspace.data(), workspace.size()};
        args.threshold = word.as<uint32_t>();
        args.non_finite = odd.as<uint64_t>();
        ASSERT_TRUE(device::encode(spec, args, stream_).ok());
        ASSERT_CUDA(cudaStreamSynchronize(stream_));
        ASSERT_TRUE(bytes_equal(cpu.payload.data(), payload.fetch(), payload.size(), 2));
        ASSERT_TRUE(bytes_equal(&greatest, word.fetch(), 4)) << "what is carried on";
        ASSERT_TRUE(bytes_equal(&cpu.stats.non_finite, odd.fetch(), 8)) << "counted once, however often encoded";
        ASSERT_TRUE(payload.intact() && word.intact());
      }
    }
  }
}

class DeviceFold : public Gpu {};
TEST_F(DeviceFold, GivesTheBytesOfTheCpu) {
  for (const size_t n : {size_t{0}, size_t{1}, size_t{255}, size_t{257}, size_t{10001}}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const Gen gen : kAllGens) {
        Gradient g = Gradient::of(gen, n, 3, dtype);
        std::vector<float> e = generate(gen, n, 4);
        DeviceBuffer gradient(g.data(), g.bytes(), n % 2 * dtype_bytes(dtype)), slot(e.data(), n * 4);
        ASSERT_TRUE(fold_residual(g.vec(), e.data(), {}).ok());
        ASSERT_TRUE(device::fold_residual({gradient.data(), n, dtype}, slot.as<float>(), stream_).ok());
        ASSERT_CUDA(cudaStreamSynchronize(stream_));
        ASSERT_TRUE(bytes_equal(g.data(), gradient.fetch(), g.bytes(), dtype_bytes(dtype))) << gen_name(gen);
        ASSERT_TRUE(bytes_equal(e.data(), slot.fetch(), n * 4, 4)) << gen_name(gen);
        ASSERT_TRUE(gradient.intact() && slot.intact());
      }
    }
  }
}

}  // namespace
}  // namespace gradgate::test
