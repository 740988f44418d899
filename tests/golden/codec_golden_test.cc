// Payloads of this format's version stay what they are: the files were written once, every kind of loop must still give
// their bytes.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "kernels/cpu/calls.h"
#include "tests/golden/golden.h"
#include "tests/support/bytes_equal.h"
#include "tests/support/canary.h"
#include "tests/support/codec_calls.h"

namespace gradgate::test {
namespace {

const std::string kFolder = std::string(GRADGATE_SOURCE_DIR) + "/tests/golden/";

std::vector<std::byte> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<std::byte> bytes(text.size());
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    if (!line.empty() && line[0] != '#') lines.push_back(line);
  }
  return lines;
}

TEST(GoldenPayloads, AreStillMade) {
  std::map<std::string, std::string> index;
  for (const std::string& line : lines_of(kFolder + "payloads/index.txt")) index[line.substr(0, line.find(' '))] = line;
  size_t files = 0;
  std::set<std::string> codecs;
  const std::vector<GoldenCase> cases = golden_cases();
  EXPECT_EQ(index.size(), cases.size());
  for (const GoldenCase& c : cases) {
    SCOPED_TRACE(golden_name(c));
    ASSERT_EQ(index.count(golden_name(c)), 1u) << "not in index.txt";
    const CodecSpec spec = spec_of(c.spec);
    codecs.insert(codec_info(spec.id).name);
    const Gradient g = golden_gradient(c);
    for (const kernels::cpu::Loops* loops : kernels::cpu::all_loops()) {
      SCOPED_TRACE(loops->name);
      std::vector<float> e = golden_residual(c);
      Guarded payload(payload_bytes(spec, c.dtype, c.n));
      std::vector<std::byte> workspace(workspace_bytes(spec, c.dtype, c.n));
      EncodeArgs args;
      args.gradient = g.view();
      args.residual = c.feedback ? e.data() : nullptr;
      args.payload = {payload.data(), payload.size()};
      args.workspace = workspace;
      args.seed = kGoldenSeed;
      ASSERT_TRUE(encode(*loops, spec, args, nullptr).ok());
      EXPECT_EQ(golden_line(c, payload.data(), payload.size(), e), index[golden_name(c)]);
      if (payload.size() <= kKeepBytes && c.n == 300) {
        const std::vector<std::byte> file = read(kFolder + "payloads/" + golden_name(c) + ".bin");
        ASSERT_EQ(file.size(), payload.size());
        EXPECT_TRUE(bytes_equal(file.data(), payload.data(), file.size()));
        ++files;
      }
    }
  }
  EXPECT_GE(files, 30u);
  for (const CodecInfo& info : codec_infos())
    EXPECT_EQ(codecs.count(info.name), 1u) << info.name << " has no golden payload";
}

// The payloads that docs/format.md prints.
TEST(GoldenPayloads, ThoseOfThePageAreMadeToTheByte) {
  const std::vector<float> x = {127, 0.5f, 1.5f, 2.5f, 3.5f, -0.5f, -1.5f, -2.5f, 0, 1};
  size_t printed = 0;
  std::ifstream page(std::string(GRADGATE_SOURCE_DIR) + "/docs/format.md");
  for (std::string line; std::getline(page, line);) {
    if (line.rfind("```hex ", 0) != 0) continue;
    const std::string spec = line.substr(7);
    std::vector<std::byte> bytes;
    while (std::getline(page, line) && line != "```") {
      std::istringstream row(line);
      for (unsigned byte = 0; row >> std::hex >> byte;) bytes.push_back(static_cast<std::byte>(byte));
    }
    const Payload made = encode(spec.c_str(), x, nullptr, nullptr, false, Seed{0, 0, 7, 0, 0});
    ASSERT_EQ(made.size(), bytes.size()) << spec;
    EXPECT_TRUE(bytes_equal(bytes.data(), made.data(), bytes.size(), 1)) << spec;
    ++printed;
  }
  EXPECT_EQ(printed, 2u);
}

TEST(GoldenPayloads, AreStillReadAsTheyWere) {
  for (const GoldenCase& c : golden_cases()) {
    if (c.n != 300) continue;
    const CodecSpec spec = spec_of(c.spec);
    if (payload_bytes(spec, c.dtype, c.n) > kKeepBytes) continue;
    const std::vector<std::byte> file = read(kFolder + "payloads/" + golden_name(c) + ".bin");
    Guarded payload = Guarded::copy_of(file);
    const DType dtype = spec.id == CodecId::none ? c.dtype : DType::f32;
    Gradient expected = Gradient::of(std::vector<float>(c.n), dtype), got = expected;
    reference::decode(spec, c.dtype, payload.data(), expected.vec(), 0.5f, Into::store);
    DecodeArgs args;
    args.payload = {payload.data(), payload.size()};
    args.gradient = c.dtype;
    args.out = got.vec();
    args.scale = 0.5f;
    ASSERT_TRUE(decode(spec, args).ok()) << golden_name(c);
    EXPECT_TRUE(bytes_equal(expected.data(), got.data(), got.bytes(), dtype_bytes(dtype))) << golden_name(c);
  }
}

TEST(GoldenErrors, AreRefusedForTheirFault) {
  std::set<int> faults;
  for (const std::string& line : lines_of(kFolder + "bad/index.txt")) {
    SCOPED_TRACE(line);
    std::istringstream fields(line);
    std::string name, spec;
    size_t n = 0;
    int fault = 0;
    ASSERT_TRUE(fields >> name >> spec >> n >> fault);
    Guarded payload = Guarded::copy_of(read(kFolder + "bad/" + name)), out(n * 4);
    DecodeArgs args;
    args.payload = {payload.data(), payload.size()};
    args.out = {out.data(), n, DType::f32};
    EXPECT_TRUE(decode(spec_of(spec.c_str()), args) == Status(StatusCode::bad_payload, fault));
    EXPECT_TRUE(out.untouched());
    faults.insert(fault);
  }
  // Every fault but alignment (2), which is no property of a file.
  EXPECT_EQ(faults, (std::set<int>{1, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
}

}  // namespace
}  // namespace gradgate::test
