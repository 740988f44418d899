#include "integration/comm/dense_scale.h"

#include <algorithm>

#include "integration/comm/half.h"
#include "kernels/cpu/float_env.h"

namespace gradgate::comm {
namespace {

/// Elements per task: large enough that handing out a task does not count.
constexpr size_t kPiece = 64 * 1024;

struct Job {
  Vec gradient;
  int ranks;
  bool divide;
};

/// x · 1/N or x / N, rounded once to Real.
template <class Real>
Real scaled(Real x, Real factor, Real ranks, bool divide) noexcept {
  return divide ? x / ranks : x * factor;
}

void scale_piece(void* argument, size_t piece) noexcept {
  const kernels::cpu::IeeeScope ieee;
  const Job& job = *static_cast<const Job*>(argument);
  const size_t first = piece * kPiece, last = std::min(job.gradient.count, first + kPiece);
  const double inverse = 1.0 / job.ranks;
  const float factor = static_cast<float>(inverse), n = static_cast<float>(job.ranks);
  const bool divide = job.divide;
  switch (job.gradient.dtype) {
    case DType::f32: {
      float* g = static_cast<float*>(job.gradient.data);
      for (size_t i = first; i < last; ++i) g[i] = scaled(g[i], factor, n, divide);
      return;
    }
    case DType::f64: {
      double* g = static_cast<double*>(job.gradient.data);
      for (size_t i = first; i < last; ++i) g[i] = scaled<double>(g[i], inverse, job.ranks, divide);
      return;
    }
    case DType::bf16: {
      uint16_t* g = static_cast<uint16_t*>(job.gradient.data);
      for (size_t i = first; i < last; ++i) g[i] = float_to_bf16(scaled(bf16_to_float(g[i]), factor, n, divide));
      return;
    }
    case DType::f16: {
      uint16_t* g = static_cast<uint16_t*>(job.gradient.data);
      for (size_t i = first; i < last; ++i) g[i] = float_to_f16(scaled(f16_to_float(g[i]), factor, n, divide));
      return;
    }
    case DType::u8:
      return;
  }
}

}  // namespace

void scale_dense(Vec gradient, int ranks, bool divide, const Executor& executor) noexcept {
  Job job{gradient, ranks, divide};
  executor((gradient.count + kPiece - 1) / kPiece, scale_piece, &job);
}

}  // namespace gradgate::comm
