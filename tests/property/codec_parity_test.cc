// Every codec x dtype x feedback x generator x size: the loops of every instruction set, with any number of threads,
// give the bytes of the scalar reference (payload, residual, decoded output, sums), write nothing else, and allocate
// nothing.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <tuple>

#include "codecs/reference.h"
#include "kernels/cpu/calls.h"
#include "tests/support/alloc_guard.h"
#include "tests/support/bytes_equal.h"
#include "tests/support/canary.h"
#include "tests/support/gen.h"
#include "tests/support/specs.h"
#include "tests/support/threads.h"

namespace gradgate::test {
namespace {

using kernels::cpu::all_loops;
using kernels::cpu::Loops;

// Those above 100,000 are cut into several tasks.
#if defined(__SANITIZE_ADDRESS__)
// The largest takes most of the time and has no other ends of blocks, chunks and tasks than the one before it, which
// f32 alone sees.
constexpr bool kSanitized = true;
constexpr size_t kSizes[] = {0, 1, 2, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 10001, 3 * 65536 + 1};
#else
constexpr bool kSanitized = false;
constexpr size_t kSizes[] = {0, 1, 2, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 10001, 3 * 65536 + 1, 1000003};
#endif

constexpr Seed kSeed{0x123456789abcdefull, 3, 41, 2, 512}, kSumSeed{0x123456789abcdefull, 3, 41, 9, 1 << 20};

struct Case {
  CodecSpec spec;
  DType dtype;
  bool feedback, flush;
  Gen gen;
  size_t n;
};

std::string describe(const Case& c) {
  return std::string(format_codec(c.spec).text) + " " + dtype_name(c.dtype) + (c.feedback ? " feedback" : "") +
         (c.flush ? " flush" : "") + " " + gen_name(c.gen) + " n=" + std::to_string(c.n);
}

// Residuals of a run: the generator's own kind of values, smaller, and now and then what only a broken run leaves
// behind.
std::vector<float> residual_for(const Case& c) {
  std::vector<float> e = generate(c.gen == Gen::constant || c.gen == Gen::zeros ? Gen::gaussian : c.gen, c.n, 77);
  if (c.gen != Gen::non_finite) {
    for (size_t i = 0; i < e.size(); i += 3) e[i] *= 0.25f;
  }
  return e;
}

struct Expected {
  std::vector<std::byte> payload;
  std::vector<float> residual;
  EncodeStats stats;
};

void check_encode(const Case& c, const Loops& loops, unsigned width, const Gradient& g, const std::vector<float>& e,
                  const Expected& expected) {
  const size_t bytes = payload_bytes(c.spec, c.dtype, c.n), scratch = workspace_bytes(c.spec, c.dtype, c.n, width);
  ASSERT_EQ(bytes, expected.payload.size());
  Guarded payload(bytes, 16 * (c.n % 4)), workspace(scratch, 1 + c.n % 15),
      residual = Guarded::copy_of(e, 4 * (c.n % 16));
  const Gradient before = g;
  EncodeArgs args;
  args.gradient = g.view();
  args.residual = c.feedback ? residual.as<float>() : nullptr;
  args.payload = {payload.data(), bytes};
  args.workspace = {workspace.data(), scratch};
  args.seed = kSeed;
  args.flush = c.flush;
  args.executor = threads(width);
  EncodeStats stats;
  const uint64_t allocated = allocations();
  const Status status = encode(loops, c.spec, args, &stats);
  if (width == 1) {
    EXPECT_EQ(allocations(), allocated);
  }
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(bytes_equal(expected.payload.data(), payload.data(), bytes, 4)) << "payload";
  EXPECT_TRUE(bytes_equal(expected.residual.data(), residual.data(), residual.size(), 4)) << "residual";
  EXPECT_EQ(stats.non_finite, expected.stats.non_finite);
  EXPECT_TRUE(g == before) << "the gradient was changed";
  EXPECT_TRUE(payload.intact() && workspace.intact() && residual.intact());
}

struct Decoded {
  float scale;
  Into into;
  Gradient before, after;
};

constexpr DType kOutputs[] = {DType::f32, DType::bf16, DType::f16};

std::vector<Decoded> expected_decodes(const Case& c, const std::vector<std::byte>& payload,
                                      std::span<const DType> outputs = kOutputs) {
  std::vector<Decoded> all;
  for (const DType dtype : outputs) {
    if (c.spec.id == CodecId::none && dtype != c.dtype) continue;
    for (const auto& [scale, into] :
         {std::pair{1.0f, Into::store}, {1.0f / 3, Into::store}, {1.0f, Into::add}, {-0.25f, Into::add}}) {
      Decoded d{scale, into, Gradient::of(Gen::zero_groups, c.n, 5, dtype), {}};
      d.after = d.before;
      reference::decode(c.spec, c.dtype, payload.data(), d.after.vec(), scale, into);
      all.push_back(std::move(d));
    }
  }
  return all;
}

void check_decode(const Case& c, const Loops& loops, unsigned width, const std::vector<std::byte>& encoded,
                  const Decoded& expected) {
  Guarded payload = Guarded::copy_of(encoded, 32);
  const DType dtype = expected.before.dtype;
  Guarded out(expected.before.bytes(), c.n % 3 == 0 ? 0 : dtype_bytes(dtype));
  if (c.n > 0) std::memcpy(out.data(), expected.before.data(), out.size());
  DecodeArgs args;
  args.payload = {payload.data(), payload.size()};
  args.gradient = c.dtype;
  args.out = {out.data(), c.n, dtype};
  args.scale = expected.scale;
  args.into = expected.into;
  args.executor = threads(width);
  const uint64_t allocated = allocations();
  const Status status = decode(loops, c.spec, args);
  if (width == 1) {
    EXPECT_EQ(allocations(), allocated);
  }
  ASSERT_TRUE(status.ok()) << status.message();
  EXPECT_TRUE(bytes_equal(expected.after.data(), out.data(), out.size(), dtype_bytes(dtype)))
      << "decode to " << dtype_name(dtype) << " scale " << expected.scale
      << (expected.into == Into::add ? " add" : " store");
  EXPECT_TRUE(out.intact() && payload.intact());
}

void check_reduce(const Case& c, unsigned width, size_t ranks, size_t self) {
  const Gradient own = Gradient::of(c.gen, c.n, 100 + self, c.dtype);
  std::vector<std::unique_ptr<Guarded>> storage;
  std::vector<ConstBytes> payloads;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const Gradient g = Gradient::of(rank % 2 == 0 ? c.gen : Gen::gaussian, c.n, 100 + rank, c.dtype);
    storage.push_back(std::make_unique<Guarded>(
        Guarded::copy_of(reference::encode(c.spec, g.view(), nullptr, false, kSeed, nullptr))));
    payloads.push_back(rank == self ? ConstBytes{} : ConstBytes{storage.back()->data(), storage.back()->size()});
  }
  const std::vector<float> before = residual_for(c);
  std::vector<float> e = before;
  EncodeStats expected_stats;
  const std::vector<std::byte> expected = reference::reduce_encode(
      c.spec, payloads, self, own.view(), c.feedback ? e.data() : nullptr, kSumSeed, &expected_stats);
  for (const Loops* loops : all_loops()) {
    SCOPED_TRACE(loops->name);
    Guarded payload(expected.size()), workspace(workspace_bytes(c.spec, c.dtype, c.n, width), 3),
        residual = Guarded::copy_of(before);
    ReduceArgs args;
    args.payloads = payloads;
    args.self = self;
    args.gradient = own.view();
    args.residual = c.feedback ? residual.as<float>() : nullptr;
    args.payload = {payload.data(), payload.size()};
    args.workspace = {workspace.data(), workspace.size()};
    args.seed = kSumSeed;
    args.executor = threads(width);
    EncodeStats stats;
    const uint64_t allocated = allocations();
    const Status status = reduce_encode(*loops, c.spec, args, &stats);
    if (width == 1) {
      EXPECT_EQ(allocations(), allocated);
    }
    ASSERT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(bytes_equal(expected.data(), payload.data(), expected.size(), 4))
        << "reduce of " << ranks << ", self " << self;
    EXPECT_TRUE(bytes_equal(e.data(), residual.data(), residual.size(), 4))
        << "residual of reduce of " << ranks << ", self " << self;
    EXPECT_EQ(stats.non_finite, expected_stats.non_finite);
    EXPECT_TRUE(payload.intact() && workspace.intact() && residual.intact());
  }
}

void check_sum(const Case& c, unsigned width, size_t ranks, std::span<const DType> outputs = kOutputs) {
  std::vector<std::unique_ptr<Guarded>> storage;
  std::vector<ConstBytes> payloads;
  for (size_t rank = 0; rank < ranks; ++rank) {
    const Gradient g = Gradient::of(rank % 2 == 0 ? c.gen : Gen::gaussian, c.n, 100 + rank, c.dtype);
    storage.push_back(
        std::make_unique<Guarded>(Guarded::copy_of(reference::encode(c.spec, g.view(), nullptr, false, {}, nullptr))));
    payloads.push_back({storage.back()->data(), storage.back()->size()});
  }
  for (const DType dtype : outputs) {
    for (const float scale : {1.0f, 1.0f / 3}) {
      Gradient expected = Gradient::of(Gen::gaussian, c.n, 5, dtype);
      reference::decode_sum(c.spec, c.dtype, payloads, expected.vec(), scale);
      for (const Loops* loops : all_loops()) {
        SCOPED_TRACE(loops->name);
        Guarded out(expected.bytes(), c.n % 3 == 0 ? 0 : dtype_bytes(dtype)),
            workspace(decode_sum_bytes(c.spec, c.dtype, c.n, ranks, width), 5);
        DecodeSumArgs args;
        args.payloads = payloads;
        args.gradient = c.dtype;
        args.out = {out.data(), c.n, dtype};
        args.scale = scale;
        args.workspace = {workspace.data(), workspace.size()};
        args.executor = threads(width);
        const uint64_t allocated = allocations();
        const Status status = decode_sum(*loops, c.spec, args);
        if (width == 1) {
          EXPECT_EQ(allocations(), allocated);
        }
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_TRUE(bytes_equal(expected.data(), out.data(), out.size(), dtype_bytes(dtype)))
            << "sum of " << ranks << " to " << dtype_name(dtype) << " scale " << scale;
        EXPECT_TRUE(out.intact() && workspace.intact());
      }
    }
  }
}

void run(const Case& c) {
  SCOPED_TRACE(describe(c));
  const Gradient g = Gradient::of(c.gen, c.n, 11, c.dtype);
  const std::vector<float> e = residual_for(c);
  Expected expected;
  expected.residual = e;
  expected.payload = reference::encode(c.spec, g.view(), c.feedback ? expected.residual.data() : nullptr, c.flush,
                                       kSeed, &expected.stats);
  const bool large = c.n > 2 * 65536;
  const std::vector<Decoded> decodes = c.feedback ? std::vector<Decoded>{} : expected_decodes(c, expected.payload);
  for (const Loops* loops : all_loops()) {
    SCOPED_TRACE(loops->name);
    for (unsigned width = 1; width <= (large ? 3u : 1u); ++width) {
      SCOPED_TRACE("threads " + std::to_string(width));
      check_encode(c, *loops, width, g, e, expected);
      for (const Decoded& d : decodes) check_decode(c, *loops, width, expected.payload, d);
    }
    if (::testing::Test::HasFailure()) return;  // one report of a case is enough
  }
  if (c.flush || c.n > 500000) return;
  if (!c.feedback && c.n > 2000) check_sum(c, large ? 2 : 1, 3);
  if (!c.feedback && c.n <= 2000) {
    for (const size_t ranks : {1, 2, 4}) check_sum(c, 1, ranks);
  }
  if (!codec_travels_by(c.spec, Exchange::two_shot)) return;
  if (c.n > 2000) {
    check_reduce(c, large ? 2 : 1, 3, 1);
  } else {
    for (const auto& [ranks, self] : {std::pair<size_t, size_t>{1, 0}, {3, 0}, {3, 2}, {4, 1}})
      check_reduce(c, 1, ranks, self);
  }
}

using Param = std::tuple<std::string, DType, bool>;
class CodecParity : public ::testing::TestWithParam<Param> {};

std::vector<Param> params() {
  std::vector<Param> all;
  for (const char* text : kSpecs) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      if (!codec_takes(spec_of(text), dtype)) continue;
      all.emplace_back(text, dtype, false);
      if (takes_feedback(spec_of(text))) all.emplace_back(text, dtype, true);
    }
  }
  return all;
}

TEST_P(CodecParity, AllLoopsGiveTheBytesOfTheReference) {
  const auto& [text, dtype, feedback] = GetParam();
  const CodecSpec spec = spec_of(text.c_str());
  for (const size_t n : kSizes) {
    for (const Gen gen : kAllGens) {
      const bool large = n > 2 * 65536;
      if (n > 500000 && gen != Gen::heavy_tail) continue;
      // How a vector is cut does not depend on the dtype.
      if (large && (dtype == DType::f16 || (kSanitized && dtype != DType::f32))) continue;
      if (large && gen != Gen::heavy_tail && gen != Gen::zero_groups && gen != Gen::non_finite) continue;
      run({spec, dtype, feedback, false, gen, n});
      if (feedback && !large) run({spec, dtype, feedback, true, gen, n});
      ASSERT_FALSE(HasFailure());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, CodecParity, ::testing::ValuesIn(params()), [](const auto& p) {
  return test_name(std::get<0>(p.param)) + "_" + dtype_name(std::get<1>(p.param)) +
         (std::get<2>(p.param) ? "_ef" : "_noef");
});

#if !defined(__SANITIZE_ADDRESS__)
// The longest of the sizes with every generator, which above would take minutes: one encode and one decode by each set
// of loops, of the codecs that any job may run unasked and the first sparse one.
TEST(EveryGenerator, AMillionAndThreeElements) {
  for (const char* text : {"none", "bf16", "int8", "chunk-topk:8/1024"}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      if (!codec_takes(spec_of(text), dtype)) continue;
      for (const Gen gen : kAllGens) {
        const Case c{spec_of(text), dtype, takes_feedback(spec_of(text)), false, gen, 1000003};
        SCOPED_TRACE(describe(c));
        const Gradient g = Gradient::of(gen, c.n, 11, dtype);
        const std::vector<float> e = residual_for(c);
        Expected expected;
        expected.residual = e;
        expected.payload = reference::encode(c.spec, g.view(), c.feedback ? expected.residual.data() : nullptr, false,
                                             kSeed, &expected.stats);
        Decoded d{1.0f / 3, Into::store, Gradient::of(Gen::zero_groups, c.n, 5, dtype), {}};
        d.after = d.before;
        reference::decode(c.spec, dtype, expected.payload.data(), d.after.vec(), d.scale, d.into);
        for (const Loops* loops : all_loops()) {
          SCOPED_TRACE(loops->name);
          check_encode(c, *loops, 3, g, e, expected);
          check_decode(c, *loops, 3, expected.payload, d);
        }
        ASSERT_FALSE(HasFailure());
      }
    }
  }
}
#endif

// Results of 4 MiB and more are stored around the caches: from the start of a line, and from elsewhere.
TEST(LargeResults, AllLoopsGiveTheBytesOfTheReference) {
  constexpr size_t kMultipleOf3 = 1050000;
  static_assert(kMultipleOf3 * sizeof(float) > kernels::cpu::kStreamBytes && kMultipleOf3 % 3 == 0);
  for (const char* text : {"none", "bf16", "int8", "onebit", "chunk-topk:8/1024", "topk:0.01", "randk:0.01"}) {
    for (const size_t n : {kMultipleOf3 + 1, kMultipleOf3}) {
      if (kSanitized && n % 3 == 0) continue;
      const Case c{spec_of(text), DType::f32, false, false, Gen::heavy_tail, n};
      SCOPED_TRACE(describe(c));
      const Gradient g = Gradient::of(c.gen, n, 11, c.dtype);
      EncodeStats stats;
      const std::vector<std::byte> payload = reference::encode(c.spec, g.view(), nullptr, false, kSeed, &stats);
      constexpr DType kOutput[] = {DType::f32};
      const std::vector<Decoded> decodes = expected_decodes(c, payload, kOutput);
      for (const Loops* loops : all_loops()) {
        SCOPED_TRACE(loops->name);
        for (const Decoded& d : decodes) check_decode(c, *loops, 2, payload, d);
      }
      check_sum(c, 2, 3, kOutput);
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST(FoldResidual, AllLoopsGiveTheBytesOfTheReference) {
  for (const size_t n : kSizes) {
    if (n > 500000) continue;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const Gen gen : kAllGens) {
        Gradient expected = Gradient::of(gen, n, 3, dtype);
        std::vector<float> e = generate(gen, n, 4);
        const std::vector<float> e_before = e;
        const Gradient g_before = expected;
        reference::fold_residual(expected.vec(), e.data());
        for (const Loops* loops : all_loops()) {
          for (const unsigned width : {1u, 3u}) {
            SCOPED_TRACE(std::string(loops->name) + " " + gen_name(gen) + " " + dtype_name(dtype) +
                         " n=" + std::to_string(n));
            Gradient g = g_before;
            std::vector<float> got = e_before;
            ASSERT_TRUE(fold_residual(*loops, g.vec(), got.data(), threads(width)).ok());
            ASSERT_TRUE(bytes_equal(expected.data(), g.data(), g.bytes(), dtype_bytes(dtype)));
            ASSERT_TRUE(bytes_equal(e.data(), got.data(), n * 4, 4));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace gradgate::test
