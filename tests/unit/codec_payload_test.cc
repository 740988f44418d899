// What decoders refuse (TOP-9), and error payloads.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/support/canary.h"
#include "tests/support/codec_calls.h"
#include "tests/support/gen.h"

namespace gradgate::test {
namespace {

constexpr size_t kCount = 2500;

// Decodes into a canary; expects the fault, and nothing written.
void expect_refused(const CodecSpec& spec, size_t count, ConstBytes payload, Status expected, const std::string& what) {
  for (const Into into : {Into::store, Into::add}) {
    Guarded out(count * 4);
    DecodeArgs args;
    args.payload = payload;
    args.out = {out.data(), count, DType::f32};
    args.into = into;
    const Status got = decode(spec, args);
    EXPECT_TRUE(got == expected) << what << ": " << got.message() << " " << got.detail() << ", expected "
                                 << expected.message() << " " << expected.detail();
    EXPECT_TRUE(out.untouched()) << what;
  }
  EXPECT_TRUE(check_payload(spec, DType::f32, count, payload) == expected) << what;
}
Status fault(PayloadFault f) { return {StatusCode::bad_payload, static_cast<int64_t>(f)}; }

PayloadFault fault_of_byte(size_t at) {
  if (at < 4) return PayloadFault::magic;
  if (at == 4) return PayloadFault::version;
  if (at == 5) return PayloadFault::codec;
  if (at == 6) return PayloadFault::value_dtype;
  if (at == 7) return PayloadFault::flags;
  if (at < 16) return PayloadFault::count;
  if (at < 24) return PayloadFault::parameter;
  return PayloadFault::check;
}

TEST(BadPayload, EveryBitOfTheHeaderCounts_TOP9) {
  for (const char* text : kSpecs) {
    const CodecSpec spec = spec_of(text);
    Payload good = encode(text, generate(Gen::gaussian, kCount, 1));
    for (size_t bit = 0; bit < 32 * 8; ++bit) {
      const size_t at = bit / 8;
      Payload bad = good;
      bad.put(at, static_cast<uint8_t>(good.get<uint8_t>(at) ^ (1u << (bit % 8))));
      if (at >= 24 && at < 28) {  // the step: compared by the exchange
        EXPECT_TRUE(check_payload(spec, DType::f32, kCount, bad.view()).ok());
        continue;
      }
      if (bit == 7 * 8 + 1) {  // "some x was not finite" is news, not a fault
        PayloadInfo info;
        EXPECT_TRUE(check_payload(spec, DType::f32, kCount, bad.view(), &info).ok());
        EXPECT_TRUE(info.non_finite);
        continue;
      }
      expect_refused(spec, kCount, bad.view(), fault(fault_of_byte(at)),
                     std::string(text) + " bit " + std::to_string(bit));
    }
    EXPECT_TRUE(check_payload(spec, DType::f32, kCount, good.view()).ok());
  }
}

TEST(BadPayload, EveryTruncationAndExtension_TOP9) {
  for (const char* text : kSpecs) {
    const CodecSpec spec = spec_of(text);
    const Payload good = encode(text, generate(Gen::gaussian, 300, 1));
    std::vector<std::byte> room(good.size() + 64 + 64);
    std::byte* aligned = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
    std::memcpy(aligned, good.data(), good.size());
    for (size_t size = 0; size <= good.size() + 16; ++size) {
      if (size == good.size()) continue;
      expect_refused(spec, 300, {aligned, size}, fault(PayloadFault::size),
                     std::string(text) + " size " + std::to_string(size));
    }
    expect_refused(spec, 300, {}, fault(PayloadFault::size), "null");
    for (size_t offset = 1; offset < 16; ++offset) {
      Guarded shifted(good.size(), offset);
      std::memcpy(shifted.data(), good.data(), good.size());
      expect_refused(spec, 300, {shifted.data(), good.size()}, fault(PayloadFault::alignment),
                     std::string(text) + " offset " + std::to_string(offset));
    }
  }
}

TEST(BadPayload, ForeignPayloads_TOP9) {
  const std::vector<float> g = generate(Gen::gaussian, kCount, 1);
  for (const char* made : kSpecs) {
    const Payload payload = encode(made, g);
    for (const char* wanted : kSpecs) {
      if (std::string(made) == wanted) continue;
      Guarded out(kCount * 4);
      DecodeArgs args;
      args.payload = payload.view();
      args.out = {out.data(), kCount, DType::f32};
      EXPECT_EQ(decode(spec_of(wanted), args).code(), StatusCode::bad_payload) << made << " as " << wanted;
      EXPECT_TRUE(out.untouched());
    }
    // Another count of the same payload size: int8 of 2499 elements.
    const Status other = check_payload(spec_of(made), DType::f32, kCount - 1, payload.view());
    EXPECT_EQ(other.code(), StatusCode::bad_payload) << made;
  }
  // The same size, and only the value type or the dtype differs.
  const Payload none = encode("none", g);
  EXPECT_TRUE(check_payload(spec_of("none"), DType::bf16, kCount * 2, none.view()) == fault(PayloadFault::value_dtype));
  const Payload topk = encode("chunk-topk:8/1024", g);
  EXPECT_TRUE(check_payload(spec_of("chunk-topk:8/2048"), DType::f32, kCount * 2, topk.view()).code() ==
              StatusCode::bad_payload);
}

TEST(BadPayload, Indices_TOP9) {
  const CodecSpec spec = spec_of("chunk-topk:8/1024");
  const Payload good = encode("chunk-topk:8/1024", generate(Gen::gaussian, kCount, 1));
  const size_t entries = 24, at = section1(entries * 4);
  const struct {
    size_t entry;
    uint16_t value;
    const char* what;
  } cases[] = {
      {7, 1024, "index = B"},
      {7, 65535, "the greatest index"},
      {15, 1024, "second chunk"},
      {23, 452, "length of the short chunk"},
      {16, 65535, "first of the last chunk"},
      {0, 1023, "not below the next"},
  };
  for (const auto& c : cases) {
    Payload bad = good;
    bad.put(at + c.entry * 2, c.value);
    expect_refused(spec, kCount, bad.view(), fault(PayloadFault::index), c.what);
  }
  for (size_t e = 1; e < entries; ++e) {  // the same index twice, and two in the wrong order
    if (e % 8 == 0) continue;
    Payload twice = good;
    twice.put(at + e * 2, good.get<uint16_t>(at + e * 2 - 2));
    expect_refused(spec, kCount, twice.view(), fault(PayloadFault::index), "duplicate");
    Payload swapped = good;
    swapped.put(at + e * 2, good.get<uint16_t>(at + e * 2 - 2));
    swapped.put(at + e * 2 - 2, good.get<uint16_t>(at + e * 2));
    expect_refused(spec, kCount, swapped.view(), fault(PayloadFault::index), "order");
  }
}

// Random damage anywhere: a decoder either refuses and writes nothing, or writes only its output.
TEST(BadPayload, RandomDamage) {
  Random random(7);
  for (const char* text : kSpecs) {
    const CodecSpec spec = spec_of(text);
    const Payload good = encode(text, generate(Gen::heavy_tail, kCount, 1));
    for (int round = 0; round < 400; ++round) {
      Payload bad = good;
      for (uint32_t hits = 1 + random.below(4); hits > 0; --hits) {
        const uint32_t at = random.below(static_cast<uint32_t>(good.size()));
        bad.put(at, static_cast<uint8_t>(random.next()));
      }
      Guarded out(kCount * 4);
      DecodeArgs args;
      args.payload = bad.view();
      args.out = {out.data(), kCount, DType::f32};
      const Status status = decode(spec, args);
      EXPECT_TRUE(out.intact());
      if (!status.ok()) {
        EXPECT_TRUE(out.untouched());
      }
    }
  }
}

TEST(BadPayload, OneOfManyStopsTheSum) {
  for (const char* text : kSpecs) {
    const CodecSpec spec = spec_of(text);
    if (!codec_travels_by(spec, Exchange::two_shot)) continue;
    const std::vector<float> g = generate(Gen::gaussian, kCount, 3);
    const Payload a = encode(text, g);
    Payload b = a;
    b.put<uint32_t>(0, 0);
    Guarded payload(a.size()), residual(kCount * 4);
    std::vector<std::byte> workspace(workspace_bytes(spec, DType::f32, kCount));
    const ConstBytes payloads[] = {a.view(), {}, b.view()};
    ReduceArgs args;
    args.payloads = payloads;
    args.self = 1;
    args.gradient = {g.data(), kCount, DType::f32};
    args.residual = takes_feedback(spec) ? residual.as<float>() : nullptr;
    args.payload = {payload.data(), payload.size()};
    args.workspace = workspace;
    EXPECT_TRUE(reduce_encode(spec, args) == fault(PayloadFault::magic)) << text;
    EXPECT_TRUE(payload.untouched() && residual.untouched());
  }
}

TEST(ErrorPayload, ReachesEveryDecoder) {
  for (const char* text : kSpecs) {
    const CodecSpec spec = spec_of(text);
    const size_t bytes = payload_bytes(spec, DType::f32, kCount);
    Guarded payload(bytes + 16);
    Seed seed;
    seed.step = 9;
    ASSERT_TRUE(
        encode_error(spec, DType::f32, kCount, seed, StatusCode::out_of_memory, {payload.data(), payload.size()}).ok());
    EXPECT_TRUE(payload.intact());
    for (size_t i = 32; i < bytes; ++i) ASSERT_EQ(payload.data()[i], std::byte{0}) << i;
    for (size_t i = bytes; i < bytes + 16; ++i) ASSERT_EQ(payload.data()[i], std::byte{Guarded::kPattern}) << i;
    const ConstBytes view{payload.data(), bytes};
    expect_refused(spec, kCount, view, {StatusCode::peer_failed, static_cast<int64_t>(StatusCode::out_of_memory)},
                   text);
    PayloadInfo info{};
    EXPECT_EQ(check_payload(spec, DType::f32, kCount, view, &info).code(), StatusCode::peer_failed);
    EXPECT_TRUE(info.error);
    EXPECT_EQ(info.code, StatusCode::out_of_memory);
    EXPECT_EQ(info.step, 9u);
    EXPECT_EQ(info.count, kCount);
  }
}

TEST(ErrorPayload, Arguments) {
  const CodecSpec spec = spec_of("int8");
  const size_t bytes = payload_bytes(spec, DType::f32, 10);
  Guarded payload(bytes), shifted(bytes, 8);
  EXPECT_TRUE(encode_error(spec, DType::f32, 10, {}, StatusCode::timeout, {payload.data(), bytes - 1}) ==
              Status(StatusCode::payload_too_small, static_cast<int64_t>(bytes)));
  EXPECT_EQ(encode_error(spec, DType::f32, 10, {}, StatusCode::ok, {payload.data(), bytes}),
            StatusCode::invalid_argument);
  EXPECT_EQ(encode_error(spec, DType::f64, 10, {}, StatusCode::timeout, {payload.data(), bytes}),
            StatusCode::unsupported);
  EXPECT_EQ(encode_error(spec, DType::f32, 10, {}, StatusCode::timeout, {shifted.data(), bytes}),
            StatusCode::invalid_argument);
  EXPECT_TRUE(payload.untouched() && shifted.untouched());
}

TEST(PayloadInfo, SaysWhatTheHeaderSays) {
  const Payload payload = encode("chunk-topk:8/1024:bf16", generate(Gen::gaussian, kCount, 1));
  PayloadInfo info{};
  ASSERT_TRUE(check_payload(spec_of("chunk-topk:8/1024:bf16"), DType::f32, kCount, payload.view(), &info).ok());
  EXPECT_EQ(info.id, CodecId::chunk_topk);
  EXPECT_EQ(info.value, DType::bf16);
  EXPECT_EQ(info.param0, 8u);
  EXPECT_EQ(info.param1, 1024u);
  EXPECT_FALSE(info.error || info.non_finite);
}

// The header once, byte by byte.
TEST(PayloadHeader, Bytes) {
  const CodecSpec spec = spec_of("int8");
  const std::vector<float> g(300, 1.0f);
  Payload payload(payload_bytes(spec, DType::f32, 300));
  std::vector<std::byte> workspace(workspace_bytes(spec, DType::f32, 300));
  EncodeArgs args;
  args.gradient = {g.data(), 300, DType::f32};
  args.payload = {payload.data(), payload.size()};
  args.workspace = workspace;
  args.seed.step = 0x01020304;
  ASSERT_TRUE(encode(spec, args).ok());
  const uint8_t expected[28] = {'G', 'G', 'P', '1', 1, 2, 0, 0, 0x2c, 1, 0, 0, 0, 0,
                                0,   0,   0,   1,   0, 0, 0, 0, 0,    0, 4, 3, 2, 1};
  EXPECT_EQ(std::memcmp(payload.data(), expected, sizeof expected), 0);
  uint32_t check = 0x811c9dc5u;
  for (const uint8_t b : {1, 2, 0, 0x2c, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0})
    check = (check ^ b) * 0x01000193u;
  EXPECT_EQ(payload.get<uint32_t>(28), check);
}

}  // namespace
}  // namespace gradgate::test
