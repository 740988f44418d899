// topk on the device: the exact choice whatever the values are and wherever the threshold began, the threshold that is
// carried, and payloads whose counts or indices are forged.
#include <bit>
#include <cmath>

#include "tests/gpu/gpu_fixture.h"
#include "tests/support/bytes_equal.h"
#include "tests/support/codec_calls.h"
#include "tests/support/gen.h"
#include "tests/support/specs.h"
#include "tests/support/topk_cases.h"

namespace gradgate::test {
namespace {

class DeviceTopk : public Gpu {
 protected:
  struct Encoded {
    std::vector<std::byte> payload;
    std::vector<float> residual;
    uint64_t non_finite = 0;
    uint32_t threshold = 0;
  };

  static Encoded on_cpu(const CodecSpec& spec, const Gradient& g, const std::vector<float>& e, bool flush) {
    Encoded r;
    r.payload.resize(payload_bytes(spec, g.dtype, g.count()));
    r.residual = e;
    std::vector<std::byte> scratch(workspace_bytes(spec, g.dtype, g.count()));
    EncodeStats stats;
    EncodeArgs args;
    args.gradient = g.view();
    args.residual = e.empty() ? nullptr : r.residual.data();
    args.payload = r.payload;
    args.workspace = scratch;
    args.flush = flush;
    args.threshold = &r.threshold;
    EXPECT_TRUE(encode(spec, args, &stats).ok());
    r.non_finite = stats.non_finite;
    return r;
  }

  // An empty e: no feedback.
  Encoded on_device(const CodecSpec& spec, const Gradient& g, const std::vector<float>& e, bool flush, uint32_t start) {
    const size_t n = g.count(), element = dtype_bytes(g.dtype);
    Encoded r;
    DeviceBuffer gradient(g.data(), g.bytes(), n % 2 * element), slot(e.data(), e.size() * 4, n % 2 * 4);
    DeviceBuffer payload(payload_bytes(spec, g.dtype, n)), workspace(device::workspace_bytes(spec, g.dtype, n), n % 13);
    const uint64_t zero = 0;
    DeviceBuffer odd(&zero, 8), threshold(&start, 4);
    device::EncodeArgs args;
    args.gradient = {gradient.data(), n, g.dtype};
    args.residual = e.empty() ? nullptr : slot.as<float>();
    args.payload = {payload.data(), payload.size()};
    args.workspace = {workspace.data(), workspace.size()};
    args.flush = flush;
    args.non_finite = odd.as<uint64_t>();
    args.threshold = threshold.as<uint32_t>();
    const Status status = device::encode(spec, args, stream_);
    EXPECT_TRUE(status.ok()) << status.message() << " " << status.detail();
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    r.payload.assign(payload.fetch(), payload.data_on_host() + payload.size());
    r.residual.resize(e.size());
    slot.fetch();
    if (!e.empty()) std::memcpy(r.residual.data(), slot.data_on_host(), slot.size());
    std::memcpy(&r.non_finite, odd.fetch(), 8);
    std::memcpy(&r.threshold, threshold.fetch(), 4);
    workspace.fetch(), gradient.fetch();
    EXPECT_TRUE(payload.intact() && slot.intact() && workspace.intact() && gradient.intact() && threshold.intact());
    EXPECT_TRUE(bytes_equal(g.data(), gradient.data_on_host(), g.bytes(), element)) << "the gradient was changed";
    return r;
  }

  void expect_equal(const char* text, const Gradient& g, const std::vector<float>& e, bool flush,
                    std::initializer_list<uint32_t> starts) {
    const CodecSpec spec = spec_of(text);
    const Encoded expected = on_cpu(spec, g, e, flush);
    for (const uint32_t start : starts) {
      SCOPED_TRACE(std::string(text) + (e.empty() ? "" : " feedback") + " threshold " + std::to_string(start));
      const Encoded got = on_device(spec, g, e, flush, start);
      ASSERT_TRUE(bytes_equal(expected.payload.data(), got.payload.data(), expected.payload.size(), 4)) << "payload";
      ASSERT_TRUE(bytes_equal(expected.residual.data(), got.residual.data(), e.size() * 4, 4)) << "residual";
      ASSERT_EQ(got.non_finite, expected.non_finite);
      ASSERT_EQ(got.threshold, expected.threshold);
    }
  }

  // With and without feedback, from several thresholds.
  void expect_exact(const char* text, const std::vector<float>& x, const std::string& what) {
    SCOPED_TRACE(what);
    Gradient g = Gradient::of(Gen::zeros, x.size(), 1, DType::f32);
    std::memcpy(g.data(), x.data(), x.size() * 4);
    expect_equal(text, g, {}, false, {0, 1, 0x3f800000u, 0x7f800000u, 0xffffffffu});
    std::vector<float> half = x;  // the same x, half of it from the residual
    for (float& v : half) v = std::isfinite(v) ? v * 0.5f : v;
    std::memcpy(g.data(), half.data(), x.size() * 4);
    for (float& v : half) v = std::isfinite(v) ? v : 1.0f;
    expect_equal(text, g, half, false, {0, 0x3f800000u});
  }
};

TEST_F(DeviceTopk, AllEqual) {
  for (const TopkCase& c : topk_all_equal()) expect_exact(c.spec, c.x, c.what);
}

TEST_F(DeviceTopk, SortedEitherWay) {
  for (const TopkCase& c : topk_sorted()) expect_exact(c.spec, c.x, c.what);
}

TEST_F(DeviceTopk, OneSpikeAndMostlyZeros) {
  for (const TopkCase& c : topk_spikes()) expect_exact(c.spec, c.x, c.what);
}

TEST_F(DeviceTopk, DifferencesInTheLastBitOnly) {
  for (const TopkCase& c : topk_last_bits()) expect_exact(c.spec, c.x, c.what);
}

TEST_F(DeviceTopk, NaNBeforeInfBeforeFinite) {
  for (const TopkCase& c : topk_non_finite()) expect_exact(c.spec, c.x, c.what);
}

// chunk-topk's search ends by a count of k, one more, one less, or between neighbouring keys, among one row of listed
// keys, a few, as many as registers hold, or more. The chunks of one vector need all of these.
TEST_F(DeviceTopk, ChunksThatAreHardToSearch) {
  Random random(17);
  const auto bits = [](uint32_t key) { return std::bit_cast<float>(key); };
  const auto unit = [&] { return 1.0f + static_cast<float>(random.below(1u << 20)) * 0x1p-20f; };
  std::vector<float> x;
  const auto chunk = [&](const auto& value) {  // 4096 elements: one chunk or several
    for (uint32_t i = 0; i < 4096; ++i) x.push_back(value(i) * (random.below(2) != 0 ? -1.0f : 1.0f));
  };
  const auto ranked = [](uint32_t i) { return i * 389 % 1024; };  // a number of its own for every element of a chunk
  chunk([](uint32_t) { return 0.5f; });
  chunk([](uint32_t) { return 0.0f; });
  chunk([&](uint32_t i) { return bits(0x3f800000u + ranked(i)); });  // every key once, one bit apart
  chunk([&](uint32_t i) { return bits(0x3f800000u + (ranked(i) << 13)); });
  chunk([&](uint32_t i) { return bits(0x3f800000u + ranked(i) / 2); });  // every key twice
  for (const uint32_t above : {7u, 8u, 9u, 31u, 99u, 100u, 101u, 299u, 301u}) {
    chunk([&](uint32_t i) { return ranked(i) < above ? unit() : 0.25f; });
    chunk([&](uint32_t i) { return ranked(i) < above ? unit() : 0.0f; });
    chunk([&](uint32_t i) { return ranked(i) < above ? 3.0f : bits(0x3f800000u + ranked(i)); });
    chunk([&](uint32_t i) { return bits(ranked(i) < above ? 0x7fc00000u + i : 0x3f800000u + i); });
    chunk([&](uint32_t i) { return ranked(i) < above ? (i % 2 == 0 ? INFINITY : NAN) : 0.5f * random.normal(); });
  }
  chunk([&](uint32_t i) { return i == 4000 ? 1e30f : 1e-30f * random.normal(); });
  chunk([&](uint32_t i) { return bits(ranked(i) / 8); });  // subnormal, 0 too
  chunk([&](uint32_t i) { return i % 4 == 0 ? random.normal() : 0.0f; });
  chunk([&](uint32_t) { return std::exp(4.0f * random.normal()); });
  for (const size_t shortened : {0u, 961u, 4096u - 5}) {  // whole chunks, and last ones of some lengths
    const size_t n = x.size() - shortened;
    for (const DType dtype : {DType::f32, DType::bf16}) {
      Gradient g = Gradient::of(Gen::zeros, n, 1, dtype);
      for (size_t i = 0; i < n; ++i) {
        const uint32_t b = std::bit_cast<uint32_t>(x[i]);
        const uint16_t upper = static_cast<uint16_t>(b >> 16);
        if (dtype == DType::f32) std::memcpy(static_cast<float*>(g.data()) + i, &b, 4);
        if (dtype == DType::bf16) std::memcpy(static_cast<uint16_t*>(g.data()) + i, &upper, 2);
      }
      const std::vector<float> e(shortened == 0 ? n : 0, 0.0f);  // x stays what it is
      for (const char* text : {"chunk-topk:8/1024", "chunk-topk:100/1024", "chunk-topk:300/1024:bf16",
                               "chunk-topk:32/4096", "chunk-topk:400/4096", "chunk-topk:9/64"})
        expect_equal(text, g, e, false, {0});
    }
  }
}

// Large only where the sample looks, or only where it does not: too few candidates, or more than the list holds.
TEST_F(DeviceTopk, TheSampleIsMisled) {
  constexpr size_t kStep = kLong / 16384 * 16;
  std::vector<bool> seen(kLong, false);
  for (uint32_t line = 0; line * kStep < kLong; ++line) {
    const size_t at = line * kStep + (line * 0x9e3779b1u >> 16) % (kStep / 16) * 16;
    for (size_t i = at; i < at + 16 && i < kLong; ++i) seen[i] = true;
  }
  for (const bool large_in_sample : {true, false}) {
    std::vector<float> x(kLong);
    for (size_t i = 0; i < kLong; ++i)
      x[i] = seen[i] == large_in_sample ? 1.0f + static_cast<float>(i)
                                        : std::bit_cast<float>(0x34000000u + static_cast<uint32_t>(i % 5000));
    for (const char* text : {"topk:0.01", "topk:0.2:bf16", "topk:0.4:int8"})
      expect_exact(text, x, large_in_sample ? "too high" : "too low");
  }
}

// Without feedback their candidates are listed as they are, and the first histogram of them tells the last key.
TEST_F(DeviceTopk, HalfGradientsWithoutFeedback) {
  for (const auto& cases : {topk_all_equal(), topk_sorted(), topk_spikes(), topk_last_bits(), topk_non_finite()}) {
    for (const TopkCase& c : cases) {
      SCOPED_TRACE(c.what);
      for (const DType dtype : {DType::bf16, DType::f16})
        expect_equal(c.spec, Gradient::of(c.x, dtype), {}, false, {0, 0x3f800000u, 0x7f800000u});
    }
  }
  for (const Gen gen : {Gen::gaussian, Gen::subnormal, Gen::ties, Gen::tiny}) {
    SCOPED_TRACE(gen_name(gen));
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const char* text : {"topk:0.01", "topk:0.003:bf16", "topk:0.01:int8"})
        expect_equal(text, Gradient::of(gen, kLong, 6, dtype), {}, false, {0});
    }
  }
}

// The threshold of the step before was right, a little or far off, or far beyond what the sample lets pass.
TEST_F(DeviceTopk, CarriedThresholdsNearAndFar) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    SCOPED_TRACE(dtype_name(dtype));
    const Gradient g = Gradient::of(Gen::gaussian, kLong, 7, dtype);
    for (const bool feedback : {false, true}) {
      const std::vector<float> e = feedback ? generate(Gen::heavy_tail, kLong, 8) : std::vector<float>{};
      for (const char* text : {"topk:0.01", "topk:0.001:bf16", "topk:0.02:int8"}) {
        const uint32_t last = on_cpu(spec_of(text), g, e, false).threshold;
        expect_equal(text, g, e, false,
                     {last, last - 0x30000u, last + 0x30000u, last + 0x60000u, last - 0x200000u, last + 0x1000000u});
      }
    }
  }
}

// x may overflow where neither g nor e does: its residual stays what it was, also when everything is looked at again.
TEST_F(DeviceTopk, SumsThatOverflow) {
  for (const bool again : {false, true}) {
    Gradient g = Gradient::of(again ? Gen::constant : Gen::gaussian, kLong, 4, DType::f32);
    std::vector<float> e = generate(again ? Gen::constant : Gen::gaussian, kLong, 5);
    for (size_t i = 77; i < kLong; i += 9001) {
      const float huge = 3e38f, half = 2e38f;
      std::memcpy(static_cast<float*>(g.data()) + i, &huge, 4);
      e[i] = i % 2 == 0 ? huge : half;
      std::memcpy(static_cast<float*>(g.data()) + i + 1, &half,
                  4);  // finite, but not with its own residual added once more
      e[i + 1] = 1e38f;
    }
    expect_equal("topk:0.01", g, e, false, {0, 0x3f800000u});
    expect_equal("topk:0.00005", g, e, false, {0, 0x3f800000u});
    expect_equal("topk:0.01:bf16", g, e, true, {0});
    expect_equal("topk:0.01:int8", g, e, true, {0});
  }
}

TEST_F(DeviceTopk, ZeroGroupsKeepTheirResidual) {
  const size_t n = 70001;
  std::vector<float> e = generate(Gen::gaussian, n, 2);
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    Gradient g = Gradient::of(Gen::zero_groups, n, 1, dtype);
    for (size_t i = 0; i < n; ++i) {
      if (i / 256 % 2 == 1) {
        std::memset(static_cast<std::byte*>(g.data()) + i * dtype_bytes(dtype), 0, dtype_bytes(dtype));
        e[i] = 100.0f;  // large residuals that may not be sent
      }
    }
    for (const char* text : {"topk:0.01", "topk:0.7:bf16", "topk:0.7:int8", "topk:1"}) {
      for (const bool flush : {false, true}) expect_equal(text, g, e, flush, {0, 0x7f000000u});
    }
  }
}

TEST_F(DeviceTopk, ShortVectors) {
  for (size_t n = 1; n <= 40; n += 3) expect_exact("topk:0.3", generate(Gen::ties, n, n), "n " + std::to_string(n));
  for (const size_t n : {63, 65, 1023, 1024, 1025, 8191, 8192, 8193, 65535, 65536, 65537}) {
    expect_exact("topk:0.01", generate(Gen::ties, n, n), "n " + std::to_string(n));
    expect_exact("topk:1", generate(Gen::heavy_tail, n, n), "n " + std::to_string(n));
  }
}

TEST_F(DeviceTopk, TheThresholdIsThatOfThisStep) {
  std::vector<float> x(1000);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  Gradient g = Gradient::of(Gen::zeros, x.size(), 1, DType::f32);
  std::memcpy(g.data(), x.data(), x.size() * 4);
  EXPECT_EQ(std::bit_cast<float>(on_device(spec_of("topk:0.01"), g, {}, false, 0).threshold), 990.0f);
}

TEST_F(DeviceTopk, IsNotASumOfShards) {
  const CodecSpec spec = spec_of("topk:0.01");
  const size_t n = 1000, bytes = payload_bytes(spec, DType::f32, n);
  DeviceBuffer gradient(n * 4), payload(bytes), workspace(device::workspace_bytes(spec, DType::f32, n)), fault(8);
  device::ReduceArgs args;
  args.gradient = {gradient.data(), n, DType::f32};
  args.payload = {payload.data(), bytes};
  args.workspace = {workspace.data(), workspace.size()};
  args.fault = fault.as<uint64_t>();
  EXPECT_EQ(device::reduce_encode(spec, args, stream_).code(), StatusCode::unsupported);
}

// Forged payloads, alone and as one of several.
TEST_F(DeviceTopk, EveryForgedCountAndIndexIsFound) {
  const size_t n = 65536 + 1000, k = 67;
  const CodecSpec spec = spec_of("topk:0.001");
  const Payload good = encode("topk:0.001", generate(Gen::gaussian, n, 5));
  const size_t bytes = good.size(), values_at = 32 + 16, indices_at = values_at + 272;
  ASSERT_EQ(bytes, indices_at + 144);
  const std::vector<float> before(n, -7.0f);
  const auto fault = [&](const auto& change) {
    Status last;
    for (const unsigned ranks : {0u, 3u}) {  // 0: decode
      std::vector<std::byte> all(bytes * (ranks == 0 ? 1 : ranks));
      for (size_t at = 0; at < all.size(); at += bytes) std::memcpy(all.data() + at, good.data(), bytes);
      change(all.data() + all.size() - bytes);  // the last rank's
      const uint64_t zero = 0;
      DeviceBuffer in(all.data(), all.size()), out(before.data(), n * 4), word(&zero, 8);
      DeviceBuffer workspace(device::workspace_bytes(spec, DType::f32, n));
      if (ranks == 0) {
        device::DecodeArgs args;
        args.payload = {in.data(), bytes};
        args.out = {out.data(), n, DType::f32};
        args.workspace = {workspace.data(), workspace.size()};
        args.fault = word.as<uint64_t>();
        EXPECT_TRUE(device::decode(spec, args, stream_).ok());
      } else {
        device::DecodeSumArgs args;
        args.payloads = in.data();
        args.stride = bytes;
        args.ranks = ranks;
        args.out = {out.data(), n, DType::f32};
        args.workspace = {workspace.data(), workspace.size()};
        args.fault = word.as<uint64_t>();
        EXPECT_TRUE(device::decode_sum(spec, args, stream_).ok());
      }
      EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      uint64_t found = 0;
      std::memcpy(&found, word.fetch(), 8);
      unsigned rank = 99;
      const Status status = device::fault_status(found, &rank);
      if (!status.ok()) {
        EXPECT_EQ(rank, ranks == 0 ? 0 : ranks - 1);
      }
      EXPECT_EQ(std::memcmp(before.data(), out.fetch(), n * 4) == 0, !status.ok());
      if (ranks != 0) {
        EXPECT_EQ(status, last);
      }
      last = status;
    }
    return last;
  };
  const Status bad(StatusCode::bad_payload, static_cast<int64_t>(PayloadFault::index));
  EXPECT_TRUE(fault([](std::byte*) {}).ok());
  const uint32_t counts[2] = {good.get<uint32_t>(32), good.get<uint32_t>(36)};
  ASSERT_EQ(counts[0] + counts[1], k);
  const auto with_counts = [&](uint32_t a, uint32_t b) {
    return fault([=](std::byte* p) {
      const uint32_t forged[] = {a, b};
      std::memcpy(p + 32, forged, 8);
    });
  };
  EXPECT_EQ(with_counts(counts[0] + 1, counts[1]), bad) << "too many";
  EXPECT_EQ(with_counts(counts[0], counts[1] - 1), bad) << "too few";
  EXPECT_EQ(with_counts(0xffffffffu, counts[1] + counts[0] + 1), bad) << "a sum that wraps around";
  EXPECT_EQ(with_counts(0, 0), bad);
  EXPECT_EQ(with_counts(0, static_cast<uint32_t>(k)), bad) << "indices that fall where the chunks met";
  EXPECT_EQ(with_counts(counts[0] - 1, counts[1] + 1), bad) << "one index too many in the last chunk";
  const auto with_index = [&](size_t entry, uint16_t index) {
    return fault([=](std::byte* p) { std::memcpy(p + indices_at + 2 * entry, &index, 2); });
  };
  EXPECT_EQ(with_index(k - 1, 1000), bad) << "beyond the end";
  EXPECT_EQ(with_index(k - 1, 0), bad) << "not rising";
  uint16_t first = good.get<uint16_t>(indices_at);
  EXPECT_EQ(with_index(1, first), bad) << "twice the same";
  EXPECT_EQ(fault([](std::byte* p) { p[28] ^= std::byte{1}; }),
            Status(StatusCode::bad_payload, static_cast<int64_t>(PayloadFault::check)));
}

}  // namespace
}  // namespace gradgate::test
