// The three matrix products of a fully connected layer, for few rows (a batch) and matrices of the PyTorch shape
// weights[out][in]. Bit-identical on every instruction set: each sum is formed in a fixed order (sixteen interleaved partial sums and
// a fixed tree, or one sum a lane) that is spelled in vector types, which the compiler maps to whatever registers there are.
// All matrices are dense and row-major, `in` is a multiple of 16, no alignment is asked for, nothing may overlap.
#pragma once

#include <cstddef>

namespace gradgate::digits {

constexpr size_t kLanes = 16;

struct LayerShape {
  size_t rows, in, out;
};

// y[rows][out] = x[rows][in] * weights^T + bias.
void forward_product(LayerShape shape, const float* x, const float* weights, const float* bias, float* y) noexcept;

// dx[rows][in] = dy[rows][out] * weights.
void backward_input(LayerShape shape, const float* dy, const float* weights, float* dx) noexcept;

// dweights[out][in] = dy^T * x and dbias[out] = column sums of dy, rows added in order.
void backward_weights(LayerShape shape, const float* dy, const float* x, float* dweights, float* dbias) noexcept;

// velocity = momentum * velocity + gradient; weights -= rate * velocity.
void momentum_step(size_t count, float rate, float momentum, const float* gradient, float* velocity,
                   float* weights) noexcept;

}  // namespace gradgate::digits
