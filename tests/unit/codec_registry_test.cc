// Texts, sizes and the list of codecs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <clocale>
#include <set>
#include <string>

#include "gradgate/codec.h"
#include "tests/support/specs.h"

namespace gradgate::test {
namespace {

using ::testing::HasSubstr;

TEST(CodecText, CanonicalTextsComeBack) {
  for (const char* text : {"none", "bf16", "bf16:ef", "int8", "int8:ef", "chunk-topk:8/1024", "chunk-topk:8/1024:bf16",
                           "chunk-topk:8/1024:noef", "chunk-topk:32768/32768:bf16:noef", "chunk-topk:1/32", "topk:0.01",
                           "chunk-topk:8/1024:int8", "topk:0.01:int8:noef", "randk:0.01", "randk:0.5:bf16:noef",
                           "topk:1", "topk:0.001:bf16:noef", "topk:1e-05", "topk:0.30000000000000004"}) {
    EXPECT_STREQ(format_codec(spec_of(text)).text, text);
    EXPECT_LE(std::string(text).size(), 47u);
  }
}

TEST(CodecText, DefaultsMayBeNamed) {
  EXPECT_STREQ(format_codec(spec_of("int8:noef")).text, "int8");
  EXPECT_STREQ(format_codec(spec_of("none:noef")).text, "none");
  EXPECT_STREQ(format_codec(spec_of("int4:sr:hadamard:ef")).text, "int4:hadamard:sr");
  EXPECT_STREQ(format_codec(spec_of("int4:sr:noef")).text, "int4:sr:noef");
  EXPECT_STREQ(format_codec(spec_of("fp8:e5m2:ef")).text, "fp8:e5m2:ef");
  EXPECT_STREQ(format_codec(spec_of("chunk-topk:8/1024:ef")).text, "chunk-topk:8/1024");
  EXPECT_STREQ(format_codec(spec_of("chunk-topk:8/1024:f32:ef")).text, "chunk-topk:8/1024");
}

TEST(CodecText, ParsedFields) {
  CodecSpec expected;
  expected.id = CodecId::chunk_topk;
  expected.value = DType::bf16;
  expected.feedback = true;
  expected.param0 = 8;
  expected.param1 = 1024;
  EXPECT_TRUE(spec_of("chunk-topk:8/1024:bf16") == expected);
  EXPECT_FALSE(spec_of("int8").feedback);
  EXPECT_TRUE(spec_of("int8:ef").feedback);
}

// QNT-9, CLI-4: the whole string counts; the message names the part, its value and what is accepted.
TEST(CodecText, NonsenseIsRefusedByName_QNT9) {
  const struct {
    const char *text, *says;
  } cases[] = {
      {"", "''"},
      {"int", "'int' is not known; there are none, bf16, int8, chunk-topk"},
      {"INT8", "'INT8'"},
      {"int8 ", "'int8 '"},
      {" int8", "' int8'"},
      {"int8:", "nothing follows"},
      {"int8::ef", "empty parameter"},
      {"int8:256", "'256'"},
      {"int8:ef:ef", "'ef'"},
      {"int8:EF", "'EF'"},
      {"int8:sr:", "nothing follows"},
      {"int8:sr:sr", "parameter 'sr' stands there twice; int8 takes :sr, :ef or :noef"},
      {"int4:stochastic", "parameter 'stochastic' is not known; int4 takes :hadamard, :sr, :ef or :noef"},
      {"int4:hadamard::sr", "parameter ''"},
      {"fp8:e4m3", "fp8 takes :e5m2, :ef or :noef"},
      {"onebit:1024", "'1024'"},
      {"none:ef", "takes no :ef"},
      {"bf16:f32", "'f32'"},
      {"chunk-topk", "8/1024"},
      {"chunk-topk:8", "'8' is not c/B"},
      {"chunk-topk:0/1024", "c is '0', must be a whole number from 1 to B = 1024"},
      {"chunk-topk:-1/1024", "c is '-1'"},
      {"chunk-topk:1025/1024", "c is '1025'"},
      {"chunk-topk:+8/1024", "c is '+8'"},
      {"chunk-topk:08/1024", "c is '08'"},
      {"chunk-topk:8.0/1024", "c is '8.0'"},
      {"chunk-topk:/1024", "c is ''"},
      {"chunk-topk:8/0", "B is '0', must be a power of two from 32 to 32768"},
      {"chunk-topk:8/-1", "B is '-1'"},
      {"chunk-topk:1/1", "B is '1'"},
      {"chunk-topk:1/3", "B is '3'"},
      {"chunk-topk:8/1000", "B is '1000'"},
      {"chunk-topk:8/65536", "B is '65536'"},
      {"chunk-topk:8/2147483648", "B is '2147483648'"},
      {"chunk-topk:8/18446744073709551616", "B is '18446744073709551616'"},
      {"chunk-topk:8/4294968320", "B is '4294968320'"},  // 2^32 + 1024
      {"chunk-topk:8/1024x", "B is '1024x'"},
      {"chunk-topk:8/1024:f16", "value type is 'f16', must be f32, bf16 or int8"},
      {"chunk-topk:8/1024:bf16:f32", "'bf16:f32'"},
      {"chunk-topk:8/1024:", "value type is ''"},
      {"chunk-topk:8/1024:ef:bf16", "'ef:bf16'"},
      {"topk", "ratio is '', must be a number above 0 and up to 1, as in topk:0.01"},
      {"topk:0", "ratio is '0'"},
      {"topk:1.0001", "ratio is '1.0001'"},
      {"topk:-0.1", "ratio is '-0.1'"},
      {"topk:+0.1", "ratio is '+0.1'"},
      {"topk:nan", "ratio is 'nan'"},
      {"topk:inf", "ratio is 'inf'"},
      {"topk:0,01", "ratio is '0,01'"},
      {"topk: 0.01", "ratio is ' 0.01'"},
      {"topk:0.01x", "ratio is '0.01x'"},
      {"topk:1e-400", "ratio is '1e-400'"},
      {"topk:0x1p-4", "ratio is '0x1p-4'"},
      {"randk:0.01:int8", "randk: value type is 'int8', must be f32 or bf16"},
      {"randk:2", "randk: ratio is '2'"},
      {"topk:0.01:f64", "topk: value type is 'f64', must be f32, bf16 or int8"},
      {"topk:0.01:", "value type is ''"},
  };
  for (const auto& c : cases) {
    CodecSpec spec = spec_of("bf16:ef");
    Message why;
    EXPECT_EQ(parse_codec(c.text, &spec, &why), StatusCode::invalid_argument) << c.text;
    EXPECT_THAT(why.text, HasSubstr(c.says)) << c.text;
    EXPECT_TRUE(spec == spec_of("bf16:ef")) << c.text << " changed the spec";
    EXPECT_EQ(parse_codec(c.text, &spec, nullptr), StatusCode::invalid_argument);
  }
}

TEST(CodecText, LongNonsenseFitsTheMessage) {
  const std::string text(100000, 'x');
  CodecSpec spec;
  Message why;
  EXPECT_FALSE(parse_codec(text, &spec, &why).ok());
  EXPECT_THAT(why.text, HasSubstr("there are"));
  EXPECT_FALSE(parse_codec("chunk-topk:" + text, &spec, &why).ok());
  EXPECT_LT(std::string(why.text).size(), 300u);
}

TEST(CodecText, EmbeddedZeroIsPartOfTheText) {
  CodecSpec spec;
  EXPECT_FALSE(parse_codec(std::string_view("int8\0", 5), &spec, nullptr).ok());
}

TEST(CodecText, SpecsMadeByHandAreChecked) {
  CodecSpec spec = spec_of("chunk-topk:8/1024");
  spec.param0 = 0;
  EXPECT_EQ(payload_bytes(spec, DType::f32, 100), 0u);
  spec = spec_of("int8");
  spec.param1 = 3;
  EXPECT_FALSE(codec_takes(spec, DType::f32));
  spec = spec_of("none");
  spec.feedback = true;
  EXPECT_FALSE(codec_takes(spec, DType::f32));
  spec = {};
  spec.id = static_cast<CodecId>(77);
  EXPECT_EQ(payload_bytes(spec, DType::f32, 100), 0u);
  EXPECT_STREQ(format_codec(spec).text, "?");
  EXPECT_STREQ(codec_info(spec.id).name, "?");
}

// Every line of the list has a name that parses, an order of fidelity, and a place among the specs that the other tests
// run over.
TEST(CodecList, IsClosed) {
  std::set<std::string> names, tested;
  std::set<int> ids, fidelities;
  for (const char* text : kSpecs) tested.insert(codec_info(spec_of(text).id).name);
  for (const CodecInfo& info : codec_infos()) {
    EXPECT_TRUE(names.insert(info.name).second);
    EXPECT_TRUE(ids.insert(static_cast<int>(info.id)).second);
    EXPECT_TRUE(fidelities.insert(info.fidelity).second);
    EXPECT_STREQ(codec_info(info.id).name, info.name);
    EXPECT_EQ(tested.count(info.name), 1u) << info.name << " is in no test";
    EXPECT_EQ(std::string(info.grammar).rfind(info.name, 0), 0u);
    EXPECT_NE(std::string(info.summary), "");
  }
  EXPECT_EQ(codec_infos().size(), names.size());
  EXPECT_EQ(codec_info(CodecId::none).fidelity, 0);
}

// From exact to lossy, variants in their places.
TEST(CodecList, FidelityOrdersVariantsToo) {
  constexpr const char* kOrder[] = {"none",      "fp16",
                                    "bf16",      "int8",
                                    "int8:sr",   "fp8",
                                    "fp8:e5m2",  "int4:hadamard",
                                    "int4",      "int4:hadamard:sr",
                                    "int4:sr",   "chunk-topk:8/1024",
                                    "topk:0.01", "randk:0.01",
                                    "onebit"};
  for (size_t i = 1; i < std::size(kOrder); ++i)
    EXPECT_LT(codec_fidelity(spec_of(kOrder[i - 1])), codec_fidelity(spec_of(kOrder[i]))) << kOrder[i];
  for (const CodecInfo& info : codec_infos()) {
    CodecSpec plain;
    plain.id = info.id;
    EXPECT_EQ(codec_fidelity(plain), info.fidelity) << info.name;
  }
  EXPECT_EQ(codec_fidelity(spec_of("int8:ef")), codec_fidelity(spec_of("int8"))) << "feedback changes no single error";
}

TEST(CodecList, TakesWhatTheTableSays) {
  const auto takes = [](const char* text) {
    std::string all;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::u8}) {
      if (codec_takes(spec_of(text), dtype)) all += std::string(dtype_name(dtype)) + " ";
    }
    return all;
  };
  EXPECT_EQ(takes("none"), "f32 bf16 f16 f64 ");
  EXPECT_EQ(takes("bf16"), "f32 ");
  EXPECT_EQ(takes("fp16"), "f32 ");
  for (const char* text : {"int8", "int8:sr", "fp8", "int4", "onebit"}) EXPECT_EQ(takes(text), "f32 bf16 f16 ");
  EXPECT_EQ(takes("chunk-topk:8/1024"), "f32 bf16 f16 ");
  EXPECT_EQ(takes("topk:0.01"), "f32 bf16 f16 ");
}

// QNT-8: the ratio that is advertised is the one on the wire, headers and scales included. Literal sizes from the table
// of docs/format.md.
TEST(PayloadBytes, AreWhatTheFormatSays_QNT8) {
  EXPECT_EQ(payload_bytes(spec_of("none"), DType::f32, 1000000), 32u + 4000000u);
  EXPECT_EQ(payload_bytes(spec_of("none"), DType::f64, 3), 32u + 32u);
  EXPECT_EQ(payload_bytes(spec_of("bf16"), DType::f32, 1000000), 32u + 2000000u);
  EXPECT_EQ(payload_bytes(spec_of("int8"), DType::f32, 1000000), 32u + 15632u + 1000000u);  // 3907 scales
  EXPECT_EQ(payload_bytes(spec_of("int8"), DType::bf16, 1000000), 32u + 15632u + 1000000u);
  EXPECT_EQ(payload_bytes(spec_of("int8"), DType::f32, 1), 32u + 16u + 16u);
  EXPECT_EQ(payload_bytes(spec_of("int8:sr"), DType::f32, 1000000),
            payload_bytes(spec_of("int8"), DType::f32, 1000000));
  EXPECT_EQ(payload_bytes(spec_of("fp8"), DType::bf16, 1000000), 32u + 15632u + 1000000u);
  EXPECT_EQ(payload_bytes(spec_of("int4"), DType::f32, 1000000), 32u + 31264u + 500032u);  // 7813 blocks
  EXPECT_EQ(payload_bytes(spec_of("int4"), DType::f32, 1), 32u + 16u + 64u);
  EXPECT_EQ(payload_bytes(spec_of("onebit"), DType::f32, 1000000), 32u + 3920u + 125008u);  // 977 blocks
  EXPECT_EQ(payload_bytes(spec_of("onebit"), DType::f32, 9), 32u + 16u + 16u);
  EXPECT_EQ(payload_bytes(spec_of("fp16"), DType::f32, 1000000), 32u + 16u + 2000000u);
  EXPECT_EQ(payload_bytes(spec_of("chunk-topk:8/1024"), DType::f32, 1 << 20), 32u + 32768u + 16384u);
  EXPECT_EQ(payload_bytes(spec_of("chunk-topk:8/1024:bf16"), DType::f32, 1 << 20), 32u + 16384u + 16384u);
  EXPECT_EQ(payload_bytes(spec_of("chunk-topk:8/1024"), DType::f32, 1024 + 5), 32u + 64u + 32u);  // 13 entries
  // topk: a count per 65,536, then k = max(1, round(ratio · n)) values and indices.
  EXPECT_EQ(payload_bytes(spec_of("topk:0.01"), DType::f32, 1000000), 32u + 64u + 40000u + 20000u);
  EXPECT_EQ(payload_bytes(spec_of("topk:0.01:bf16"), DType::f32, 1000000), 32u + 64u + 20000u + 20000u);
  EXPECT_EQ(payload_bytes(spec_of("topk:0.01"), DType::f32, 49), 32u + 16u + 16u + 16u);   // at least one
  EXPECT_EQ(payload_bytes(spec_of("topk:0.01"), DType::f32, 450), 32u + 16u + 32u + 16u);  // 4.5 rounds to 5
  EXPECT_EQ(payload_bytes(spec_of("topk:1"), DType::f32, 65537), 32u + 16u + 262160u + 131088u);
  // Beyond 2^31 elements: 64-bit arithmetic throughout.
  EXPECT_EQ(payload_bytes(spec_of("topk:0.5"), DType::f32, (size_t{1} << 32) + 2),
            32u + 262160u + (size_t{1} << 33) + 16u + (size_t{1} << 32) + 16u);
  EXPECT_EQ(payload_bytes(spec_of("bf16"), DType::bf16, 10), 0u);
  const double ratio = 4.0e6 / static_cast<double>(payload_bytes(spec_of("int8"), DType::f32, 1000000));
  EXPECT_GT(ratio, 3.93);
  EXPECT_LT(ratio, 3.94);
}

TEST(PayloadBytes, EmptyVectorIsAHeader_SHP1) {
  for (const char* text : kSpecs) EXPECT_EQ(payload_bytes(spec_of(text), DType::f32, 0), 32u) << text;
}

TEST(PayloadBytes, OverflowIsZero) {
  EXPECT_EQ(payload_bytes(spec_of("none"), DType::f32, SIZE_MAX), 0u);
  EXPECT_EQ(payload_bytes(spec_of("none"), DType::f32, SIZE_MAX / 4 + 2), 0u);
  EXPECT_EQ(payload_bytes(spec_of("bf16"), DType::f32, SIZE_MAX / 2 + 1), 0u);
  EXPECT_EQ(payload_bytes(spec_of("int8"), DType::f32, SIZE_MAX - 3), 0u);
  EXPECT_EQ(payload_bytes(spec_of("chunk-topk:32/32"), DType::f32, SIZE_MAX), 0u);
  EXPECT_EQ(payload_bytes(spec_of("topk:1"), DType::f32, SIZE_MAX), 0u);
}

TEST(PayloadBytes, NeverShrinkWithCount) {
  for (const char* text : kSpecs) {
    size_t last = 0;
    for (size_t n = 0; n < 3000; ++n) {
      const size_t bytes = payload_bytes(spec_of(text), DType::f32, n);
      EXPECT_EQ(bytes % 16, 0u);
      EXPECT_GE(bytes, last);
      last = bytes;
    }
  }
}

TEST(ShardAlignment, IsAGroupOrAChunk) {
  EXPECT_EQ(shard_alignment(spec_of("none")), 256u);
  EXPECT_EQ(shard_alignment(spec_of("int8")), 256u);
  EXPECT_EQ(shard_alignment(spec_of("chunk-topk:1/32")), 256u);
  EXPECT_EQ(shard_alignment(spec_of("chunk-topk:13/32768")), 32768u);
  EXPECT_EQ(shard_alignment(spec_of("topk:0.01")), 65536u);
}

TEST(Names, OfEverything) {
  EXPECT_STREQ(Status(StatusCode::payload_too_small, 3).message(), "payload buffer too small");
  EXPECT_STREQ(Status().message(), "ok");
  EXPECT_STREQ(Status(static_cast<StatusCode>(99)).message(), "unknown status");
  std::set<std::string> messages, faults;
  for (uint32_t c = 0; c <= 13; ++c) messages.insert(Status(static_cast<StatusCode>(c)).message());
  EXPECT_EQ(messages.size(), 14u);
  for (int f = 0; f <= 11; ++f) faults.insert(payload_fault_name(static_cast<PayloadFault>(f)));
  EXPECT_EQ(faults.size(), 12u);
  EXPECT_STREQ(dtype_name(DType::bf16), "bf16");
  EXPECT_STREQ(dtype_name(static_cast<DType>(9)), "?");
  EXPECT_STREQ(exchange_name(Exchange::two_shot), "two_shot");
}

TEST(MessageText, IsCutNotOverrun) {
  Message m;
  m.format("%s", std::string(1000, 'a').c_str());
  EXPECT_EQ(std::string(m.text).size(), sizeof m.text - 1);
}

}  // namespace
}  // namespace gradgate::test
