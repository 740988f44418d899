// Writes the golden files anew from the scalar reference: golden_make <tests/golden>. Run it only when the format
// changes on purpose (its version then changes too), and read the difference.
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "tests/golden/golden.h"

namespace gradgate::test {
namespace {

void write(const std::filesystem::path& path, const void* data, size_t bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  if (!file) throw std::string("cannot write ") + path.string();
}

void make_payloads(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  std::string index =
      "# name = spec-dtype-generator-count[-ef]; bytes; FNV-1a 64 of the payload; FNV-1a 64 of the residual "
      "afterwards\n";
  for (const GoldenCase& c : golden_cases()) {
    const Gradient g = golden_gradient(c);
    std::vector<float> e = golden_residual(c);
    const std::vector<std::byte> payload =
        reference::encode(spec_of(c.spec), g.view(), c.feedback ? e.data() : nullptr, false, kGoldenSeed, nullptr);
    index += golden_line(c, payload.data(), payload.size(), e) + "\n";
    if (payload.size() <= kKeepBytes && c.n == 300)
      write(folder / (golden_name(c) + ".bin"), payload.data(), payload.size());
  }
  write(folder / "index.txt", index.data(), index.size());
}

// Payloads that must be refused: <spec>-<count>-<fault>[-<what>].bin, for f32 gradients.
void make_bad(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  std::string index = "# file; spec; count; fault that check_payload must report\n";
  const auto add = [&](const char* spec, size_t n, PayloadFault fault, const char* what, auto spoil) {
    const std::vector<float> g = generate(Gen::gaussian, n, 9);
    std::vector<std::byte> payload =
        reference::encode(spec_of(spec), {g.data(), n, DType::f32}, nullptr, false, {}, nullptr);
    spoil(payload);
    const std::string name = test_name(spec) + "-" + what + ".bin";
    write(folder / name, payload.data(), payload.size());
    index += name + " " + spec + " " + std::to_string(n) + " " + std::to_string(static_cast<int>(fault)) + "\n";
  };
  const auto set = [](size_t at, std::initializer_list<int> bytes) {
    return [at, bytes = std::vector<int>(bytes)](std::vector<std::byte>& p) {
      for (size_t i = 0; i < bytes.size(); ++i) p[at + i] = static_cast<std::byte>(bytes[i]);
    };
  };
  add("int8", 40, PayloadFault::size, "truncated", [](auto& p) { p.resize(p.size() - 16); });
  add("int8", 40, PayloadFault::size, "extended", [](auto& p) { p.resize(p.size() + 16); });
  add("int8", 40, PayloadFault::size, "header-cut", [](auto& p) { p.resize(20); });
  add("int8", 40, PayloadFault::magic, "magic", set(0, {'P', 'N', 'G'}));
  add("int8", 40, PayloadFault::version, "version-2", set(4, {2}));
  add("int8", 40, PayloadFault::codec, "codec-of-bf16", set(5, {1}));
  add("bf16", 40, PayloadFault::value_dtype, "value-f32", set(6, {0}));
  add("none", 40, PayloadFault::value_dtype, "value-f64", set(6, {3}));
  add("int8", 40, PayloadFault::count, "count-41", set(8, {41}));
  add("int8", 40, PayloadFault::count, "count-2-to-63", set(15, {0x80}));
  add("int8", 40, PayloadFault::parameter, "block-512", set(16, {0, 2}));
  add("chunk-topk:2/32", 40, PayloadFault::parameter, "other-c", set(16, {3}));
  add("int8", 40, PayloadFault::flags, "code-without-error", set(7, {0x40}));
  add("int8", 40, PayloadFault::flags, "error-without-code", set(7, {0x01}));
  add("int8", 40, PayloadFault::flags, "unknown-flag", set(7, {0x04}));
  add("int8", 40, PayloadFault::check, "check", set(28, {1, 2, 3, 4}));
  // 40 elements, 2 of 32 and 2 of the remaining 8: indices at 48.
  add("chunk-topk:2/32", 40, PayloadFault::index, "index-32", set(50, {32, 0}));
  add("chunk-topk:2/32", 40, PayloadFault::index, "index-65535", set(50, {255, 255}));
  add("chunk-topk:2/32", 40, PayloadFault::index, "index-twice", set(48, {3, 0, 3, 0}));
  add("chunk-topk:2/32", 40, PayloadFault::index, "index-falls", set(48, {9, 0, 3, 0}));
  add("chunk-topk:2/32", 40, PayloadFault::index, "index-past-the-tail", set(54, {8, 0}));
  write(folder / "index.txt", index.data(), index.size());
}

}  // namespace
}  // namespace gradgate::test

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: golden_make <folder>, the folder tests/golden of the source tree\n");
    return 2;
  }
  try {
    gradgate::test::make_payloads(std::filesystem::path(argv[1]) / "payloads");
    gradgate::test::make_bad(std::filesystem::path(argv[1]) / "bad");
  } catch (const std::string& why) {
    std::fprintf(stderr, "golden_make: %s\n", why.c_str());
    return 1;
  }
  return 0;
}
