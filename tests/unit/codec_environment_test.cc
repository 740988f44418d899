// Bytes do not depend on what the caller left in the floating-point unit, and the caller finds it again.
#include <gtest/gtest.h>

#include <cfenv>

#if defined(__SSE2__)
#include <pmmintrin.h>
#include <xmmintrin.h>
#endif

#include "kernels/cpu/calls.h"
#include "tests/support/codec_calls.h"
#include "tests/support/gen.h"
#include "tests/support/threads.h"

namespace gradgate::test {
namespace {

struct Result {
  std::vector<std::byte> payload;
  std::vector<float> residual, decoded, folded, folded_residual;
  friend bool operator==(const Result& a, const Result& b) {
    const auto same = [](const std::vector<float>& x, const std::vector<float>& y) {
      return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * 4) == 0;
    };
    return a.payload == b.payload && same(a.residual, b.residual) && same(a.decoded, b.decoded) &&
           same(a.folded, b.folded) && same(a.folded_residual, b.folded_residual);
  }
};

constexpr size_t kCount = 140000;

// What a run needs, made in the ordinary environment.
struct Input {
  std::vector<float> g, residual, fold_residual;
  explicit Input(Gen gen)
      : g(generate(gen, kCount, 1)), residual(generate(gen, kCount, 2)), fold_residual(generate(gen, kCount, 3)) {}
};

Result run(const char* text, const Input& input, const Executor& executor) {
  const CodecSpec spec = spec_of(text);
  const size_t n = kCount;
  const std::vector<float>& g = input.g;
  Result r;
  r.residual = input.residual;
  Payload payload(payload_bytes(spec, DType::f32, n));
  std::vector<std::byte> workspace(workspace_bytes(spec, DType::f32, n, executor.width));
  EncodeArgs args;
  args.gradient = {g.data(), n, DType::f32};
  args.residual = takes_feedback(spec) ? r.residual.data() : nullptr;
  args.payload = {payload.data(), payload.size()};
  args.workspace = workspace;
  args.executor = executor;
  EXPECT_TRUE(encode(spec, args).ok());
  r.payload.assign(payload.data(), payload.data() + payload.size());
  r.decoded.resize(n);
  DecodeArgs decode_args;
  decode_args.payload = payload.view();
  decode_args.out = {r.decoded.data(), n, DType::f32};
  decode_args.scale = 0.25f;
  decode_args.executor = executor;
  EXPECT_TRUE(decode(spec, decode_args).ok());
  r.folded = g;
  r.folded_residual = input.fold_residual;
  EXPECT_TRUE(fold_residual({r.folded.data(), n, DType::f32}, r.folded_residual.data(), executor).ok());
  return r;
}

#if defined(__SSE2__)
TEST(FloatEnvironment, FlushedSubnormalsOfTheCallerChangeNothing_NUM7) {
  for (const char* text : kSpecs) {
    for (const Gen gen : {Gen::subnormal, Gen::tiny}) {
      const Input input(gen);
      const Result expected = run(text, input, {});
      const unsigned before = _mm_getcsr();
      for (const unsigned width : {1u, 2u}) {
        // FTZ, DAZ, rounding toward zero: all at once.
        const unsigned odd = (before & ~0x3fu) | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON | _MM_ROUND_TOWARD_ZERO;
        _mm_setcsr(odd);
        const Result got = run(text, input, threads(width));
        const unsigned after = _mm_getcsr();
        _mm_setcsr(before);
        EXPECT_EQ(after & ~0x3fu, odd & ~0x3fu) << text;
        EXPECT_TRUE(got == expected) << text << " " << gen_name(gen) << " threads " << width;
      }
    }
  }
}

TEST(FloatEnvironment, StatusFlagsStayAsTheyWere) {
  const std::vector<float> g = generate(Gen::huge, 1000, 1);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before & ~0x3fu);
  const Payload payload = encode("int8", g);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(after, before & ~0x3fu);
  EXPECT_TRUE(check_payload(spec_of("int8"), DType::f32, 1000, payload.view()).ok());
}
#endif

TEST(Loops, AreListedFromPortableToFastest) {
  const auto loops = kernels::cpu::all_loops();
  ASSERT_GE(loops.size(), 1u);
  EXPECT_STREQ(loops[0]->name, "portable");
  EXPECT_EQ(&kernels::cpu::best_loops(), loops.back());
}

}  // namespace
}  // namespace gradgate::test
