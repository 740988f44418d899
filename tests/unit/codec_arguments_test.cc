// Arguments that calls refuse: the code and its detail, and that nothing was written.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/support/canary.h"
#include "tests/support/codec_calls.h"
#include "tests/support/gen.h"

namespace gradgate::test {
namespace {

// A complete, valid call whose parts a test then spoils.
struct EncodeCall {
  CodecSpec spec;
  std::vector<float> g;
  Guarded payload, residual, workspace;
  EncodeArgs args;

  EncodeCall(const char* text, size_t n)
      : spec(spec_of(text)),
        g(generate(Gen::gaussian, n, 2)),
        payload(payload_bytes(spec, DType::f32, n)),
        residual(n * 4),
        workspace(workspace_bytes(spec, DType::f32, n)) {
    args.gradient = {g.data(), n, DType::f32};
    args.residual = takes_feedback(spec) ? residual.as<float>() : nullptr;
    args.payload = {payload.data(), payload.size()};
    args.workspace = {workspace.data(), workspace.size()};
  }
  void refused(Status expected) {
    EncodeStats stats;
    stats.non_finite = 123;
    const Status got = encode(spec, args, &stats);
    EXPECT_TRUE(got == expected) << got.message() << " " << got.detail() << ", expected " << expected.message() << " "
                                 << expected.detail();
    EXPECT_TRUE(payload.untouched() && residual.untouched() && workspace.untouched());
    EXPECT_EQ(stats.non_finite, 123u);
  }
};

TEST(EncodeArguments, PayloadOneByteTooSmall_GAT11) {
  for (const char* text : kSpecs) {
    for (const size_t n : {0u, 1u, 3u, 300u, 5000u}) {
      EncodeCall call(text, n);
      call.args.payload = call.args.payload.first(call.args.payload.size() - 1);
      call.refused({StatusCode::payload_too_small, static_cast<int64_t>(call.payload.size())});
    }
  }
}

TEST(EncodeArguments, LargerPayloadBufferKeepsItsRest_GAT11) {
  for (const char* text : kSpecs) {
    EncodeCall call(text, 300);
    Guarded room(call.payload.size() + 48);
    call.args.payload = {room.data(), room.size()};
    ASSERT_TRUE(encode(call.spec, call.args).ok());
    for (size_t i = call.payload.size(); i < room.size(); ++i)
      ASSERT_EQ(room.data()[i], std::byte{Guarded::kPattern}) << text;
    EXPECT_TRUE(room.intact());
  }
}

// Small payloads are larger than what they stand for; the size says so, and the gate reads it.
TEST(EncodeArguments, PayloadsLargerThanTheGradientSaySo_GAT11) {
  EXPECT_GT(payload_bytes(spec_of("chunk-topk:3/32"), DType::f32, 3), 12u);
  EXPECT_GT(payload_bytes(spec_of("int8"), DType::f32, 1), 4u);
  const std::vector<float> g = {1.0f, -2.0f, 3.0f};
  EXPECT_EQ(round_trip("chunk-topk:3/32", g), g);
}

TEST(EncodeArguments, WorkspaceTooSmall) {
  for (const char* text : kSpecs) {
    EncodeCall call(text, 5000);
    ASSERT_GT(call.workspace.size(), 0u);
    call.args.workspace = call.args.workspace.first(call.workspace.size() - 1);
    call.refused({StatusCode::workspace_too_small, static_cast<int64_t>(call.workspace.size())});
    // More threads need more of it (but for randk, whose entries have their places); the detail says how much.
    EncodeCall wide(text, 300000);
    wide.args.executor.width = 4;
    const size_t needed = workspace_bytes(wide.spec, DType::f32, 300000, 4);
    EXPECT_EQ(needed == wide.workspace.size(), wide.spec.id == CodecId::randk) << text;
    if (needed == wide.workspace.size()) continue;
    wide.refused({StatusCode::workspace_too_small, static_cast<int64_t>(needed)});
  }
}

TEST(EncodeArguments, WrongDtypeOrPointer_DTY1) {
  for (const char* text : {"bf16", "int8", "chunk-topk:8/1024"}) {
    for (const DType dtype : {DType::f64, DType::u8, static_cast<DType>(200)}) {
      EncodeCall call(text, 300);
      call.args.gradient.dtype = dtype;
      call.refused(StatusCode::unsupported);
    }
    EncodeCall null(text, 300);
    null.args.gradient.data = nullptr;
    null.refused(StatusCode::invalid_argument);
    EncodeCall odd(text, 300);
    odd.args.gradient.data = reinterpret_cast<const char*>(odd.g.data()) + 2;
    odd.args.gradient.count = 299;
    odd.refused(StatusCode::invalid_argument);
    EncodeCall odd_residual(text, 300);
    odd_residual.args.residual = reinterpret_cast<float*>(odd_residual.residual.data() + 1);
    odd_residual.refused(StatusCode::invalid_argument);
    EncodeCall shifted(text, 300);
    Guarded room(shifted.payload.size(), 8);
    shifted.args.payload = {room.data(), room.size()};
    shifted.refused(StatusCode::invalid_argument);
    EXPECT_TRUE(room.untouched());
  }
  for (const DType dtype : {DType::bf16, DType::f16}) {  // nothing to gain
    EncodeCall bf16("bf16", 300);
    bf16.args.gradient.dtype = dtype;
    bf16.refused(StatusCode::unsupported);
  }
}

TEST(EncodeArguments, InvalidSpecAndFeedbackWithoutResidualToKeep) {
  EncodeCall call("int8", 300);
  call.spec.param0 = 7;
  call.refused(StatusCode::invalid_argument);
  EncodeCall none("none", 300);
  none.args.residual = none.residual.as<float>();
  none.refused(StatusCode::invalid_argument);
}

// Random numbers are counted in groups of 256: a vector begins at one.
TEST(EncodeArguments, PlaceInTheTensorIsAMultipleOf256) {
  for (const char* text : {"int8", "int8:sr"}) {
    EncodeCall call(text, 300);
    call.args.seed.first = 100;
    call.refused(StatusCode::invalid_argument);
    call.args.seed.first = 512;
    EXPECT_TRUE(encode(call.spec, call.args).ok());
  }
}

TEST(EncodeArguments, OverlapIsRefused) {
  EncodeCall call("int8", 4096);
  call.args.gradient = {call.payload.data() + 16, 1024, DType::f32};
  call.refused(StatusCode::invalid_argument);
  EncodeCall residual("int8", 4096);
  residual.args.residual = reinterpret_cast<float*>(residual.payload.data() + 64);
  residual.args.gradient.count = 1024;
  residual.refused(StatusCode::invalid_argument);
  EncodeCall own("int8", 4096);
  own.args.residual = own.g.data();
  own.refused(StatusCode::invalid_argument);
}

TEST(DecodeArguments, WrongOutput_DTY1) {
  const std::vector<float> g = generate(Gen::gaussian, 300, 1);
  for (const char* text : {"bf16", "int8", "chunk-topk:8/1024"}) {
    const Payload payload = encode(text, g);
    Guarded out(300 * 8);
    DecodeArgs args;
    args.payload = payload.view();
    for (const DType dtype : {DType::f64, DType::u8}) {
      args.out = {out.data(), 300, dtype};
      EXPECT_EQ(decode(spec_of(text), args), StatusCode::unsupported);
    }
    args.out = {nullptr, 300, DType::f32};
    EXPECT_EQ(decode(spec_of(text), args), StatusCode::invalid_argument);
    args.out = {out.data() + 1, 300, DType::f32};
    EXPECT_EQ(decode(spec_of(text), args), StatusCode::invalid_argument);
    args.out = {out.data(), 299, DType::f32};
    EXPECT_EQ(decode(spec_of(text), args).code(), StatusCode::bad_payload);
    args.out = {out.data(), 300, DType::f32};
    args.gradient = DType::f64;
    EXPECT_EQ(decode(spec_of(text), args), StatusCode::unsupported);
    EXPECT_TRUE(out.untouched());
  }
}

TEST(DecodeArguments, NoneCopiesOnlyItsOwnDtype_DTY1) {
  const double values[] = {1.0 / 3, 0x1p-30, 1e300};
  const CodecSpec spec = spec_of("none");
  const Payload payload = encode("none", {values, 3, DType::f64});
  Guarded out(24);
  DecodeArgs args;
  args.payload = payload.view();
  args.gradient = DType::f64;
  args.out = {out.data(), 3, DType::f32};
  EXPECT_EQ(decode(spec, args), StatusCode::invalid_argument);
  args.out = {out.data(), 3, DType::f64};
  args.scale = 0.5f;
  EXPECT_EQ(decode(spec, args), StatusCode::unsupported);
  args.scale = 1.0f;
  args.into = Into::add;
  EXPECT_EQ(decode(spec, args), StatusCode::unsupported);
  EXPECT_TRUE(out.untouched());
  args.into = Into::store;
  ASSERT_TRUE(decode(spec, args).ok());
  EXPECT_EQ(std::memcmp(out.data(), values, 24), 0);
}

TEST(ReduceArguments, AreChecked) {
  const CodecSpec spec = spec_of("int8");
  const std::vector<float> g = generate(Gen::gaussian, 300, 1);
  const Payload a = encode("int8", g);
  Guarded payload(a.size());
  std::vector<std::byte> workspace(workspace_bytes(spec, DType::f32, 300));
  const ConstBytes payloads[] = {a.view(), {}};
  ReduceArgs args;
  args.payloads = payloads;
  args.self = 2;
  args.gradient = {g.data(), 300, DType::f32};
  args.payload = {payload.data(), payload.size()};
  args.workspace = workspace;
  EXPECT_EQ(reduce_encode(spec, args), StatusCode::invalid_argument);  // no such rank
  args.self = 1;
  args.workspace = args.workspace.first(10);
  EXPECT_EQ(reduce_encode(spec, args).code(), StatusCode::workspace_too_small);
  args.workspace = workspace;
  args.payload = args.payload.first(payload.size() - 1);
  EXPECT_TRUE(reduce_encode(spec, args) == Status(StatusCode::payload_too_small, static_cast<int64_t>(payload.size())));
  EXPECT_TRUE(payload.untouched());
  const double d[3] = {};
  args.gradient = {d, 3, DType::f64};
  args.payload = {payload.data(), payload.size()};
  EXPECT_EQ(reduce_encode(spec_of("none"), args), StatusCode::unsupported);
  EXPECT_TRUE(payload.untouched());
}

TEST(DecodeSumArguments, AreChecked) {
  const CodecSpec spec = spec_of("int8");
  const std::vector<float> g = generate(Gen::gaussian, 300, 1);
  Payload a = encode("int8", g), b = encode("int8", g);
  Guarded out(300 * 4);
  std::vector<std::byte> workspace(decode_sum_bytes(spec, DType::f32, 300, 2));
  ASSERT_FALSE(workspace.empty());
  const ConstBytes payloads[] = {a.view(), b.view()};
  DecodeSumArgs args;
  args.out = {out.data(), 300, DType::f32};
  args.workspace = workspace;
  EXPECT_EQ(decode_sum(spec, args), StatusCode::invalid_argument) << "no payloads";
  args.payloads = payloads;
  args.workspace = args.workspace.first(workspace.size() - 1);
  EXPECT_TRUE(decode_sum(spec, args) ==
              Status(StatusCode::workspace_too_small, static_cast<int64_t>(workspace.size())));
  args.workspace = workspace;
  args.out.dtype = DType::f64;
  EXPECT_EQ(decode_sum(spec, args), StatusCode::unsupported);
  args.out = {nullptr, 300, DType::f32};
  EXPECT_EQ(decode_sum(spec, args), StatusCode::invalid_argument);
  args.out = {out.data(), 299, DType::f32};
  EXPECT_EQ(decode_sum(spec, args).code(), StatusCode::bad_payload);
  args.out = {out.data(), 300, DType::f32};
  b.put<uint8_t>(16, 3);  // the second payload is damaged: the first is not written either
  EXPECT_TRUE(decode_sum(spec, args) == Status(StatusCode::bad_payload, static_cast<int64_t>(PayloadFault::parameter)));
  EXPECT_TRUE(out.untouched());
  CodecSpec bad = spec;
  bad.param0 = 1;
  EXPECT_EQ(decode_sum(bad, args), StatusCode::invalid_argument);
}

TEST(FoldArguments, AreChecked) {
  Guarded g(64), e(64);
  EXPECT_EQ(fold_residual({g.data(), 4, DType::f64}, e.as<float>(), {}), StatusCode::unsupported);
  EXPECT_EQ(fold_residual({g.data(), 4, DType::f32}, nullptr, {}), StatusCode::invalid_argument);
  EXPECT_EQ(fold_residual({g.data(), 4, DType::f32}, g.as<float>() + 2, {}), StatusCode::invalid_argument);
  EXPECT_EQ(fold_residual({g.data() + 1, 4, DType::f32}, e.as<float>(), {}), StatusCode::invalid_argument);
  EXPECT_TRUE(g.untouched() && e.untouched());
  EXPECT_TRUE(fold_residual({nullptr, 0, DType::f32}, nullptr, {}).ok());
}

TEST(EmptyVector, IsAHeaderThatDecodesToNothing_SHP1) {
  for (const char* text : kSpecs) {
    std::vector<float> e;
    const Payload payload = encode(text, {nullptr, 0, DType::f32});
    EXPECT_EQ(payload.size(), 32u);
    EXPECT_TRUE(decode(text, payload, 0).empty());
  }
}

}  // namespace
}  // namespace gradgate::test
