// The list of golden payloads: what they are made from. Shared by the test and by the program that writes the files.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "codecs/reference.h"
#include "tests/support/gen.h"
#include "tests/support/specs.h"

namespace gradgate::test {

struct GoldenCase {
  const char* spec;
  DType dtype;
  Gen gen;
  size_t n;
  bool feedback;
};

inline constexpr Seed kGoldenSeed{0x0123456789abcdefull, 3, 5, 2};
inline constexpr size_t kKeepBytes = 1300;  // larger payloads are kept as their hash

inline std::vector<GoldenCase> golden_cases() {
  std::vector<GoldenCase> cases;
  for (const char* spec : kSpecs) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      if (!codec_takes(spec_of(spec), dtype)) continue;
      for (const Gen gen : kAllGens) {
        for (const size_t n : {size_t{300}, size_t{40961}}) {
          if (n == 300 && gen != Gen::gaussian && gen != Gen::non_finite && gen != Gen::tiny) continue;
          cases.push_back({spec, dtype, gen, n, takes_feedback(spec_of(spec)) && n != 300});
        }
      }
    }
  }
  return cases;
}

inline std::string golden_name(const GoldenCase& c) {
  return test_name(c.spec) + "-" + dtype_name(c.dtype) + "-" + gen_name(c.gen) + "-" + std::to_string(c.n) +
         (c.feedback ? "-ef" : "");
}

inline uint64_t fnv64(const void* data, size_t bytes) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3ull;
  return hash;
}

/// One line of index.txt: name, bytes, hash of the payload, hash of the residual afterwards.
inline std::string golden_line(const GoldenCase& c, const void* payload, size_t bytes,
                               const std::vector<float>& residual) {
  char line[200];
  std::snprintf(line, sizeof line, "%s %zu %016llx %016llx", golden_name(c).c_str(), bytes,
                static_cast<unsigned long long>(fnv64(payload, bytes)),
                static_cast<unsigned long long>(fnv64(residual.data(), residual.size() * 4)));
  return line;
}

inline Gradient golden_gradient(const GoldenCase& c) { return Gradient::of(c.gen, c.n, 2024, c.dtype); }
inline std::vector<float> golden_residual(const GoldenCase& c) {
  return c.feedback ? generate(c.gen, c.n, 2025) : std::vector<float>{};
}

}  // namespace gradgate::test
