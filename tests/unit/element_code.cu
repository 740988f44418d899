// Compiled by nvcc to an object and never run: the element code of every codec is the same lines for the device.
// nvcc -std=c++20 -arch=sm_90 -fmad=false -c
#include <cstdint>

#include "codecs/bf16.h"
#include "codecs/chunk_topk.h"
#include "codecs/exact_math.h"
#include "codecs/f16.h"
#include "codecs/int8.h"
#include "codecs/philox.h"

static_assert(__cplusplus >= 202002L, "some versions of CMake leave the language level out without a word");

namespace {

// One thread a block of 256: plain on purpose, it only has to name every function.
__global__ void int8_blocks(const float* x, float* e, uint32_t* scale, int8_t* code, unsigned blocks) {
  const unsigned block = blockIdx.x * blockDim.x + threadIdx.x;
  if (block >= blocks) return;
  uint32_t max = 0;
  for (int i = 0; i < 256; ++i) {
    const uint32_t m = gradgate::exact::mag(x[block * 256 + i]);
    max = m > max ? m : max;
  }
  const auto encoder = gradgate::codecs::Int8Encoder::of(max);
  const auto decoder = gradgate::codecs::Int8Decoder::of(encoder.stored);
  scale[block] = encoder.stored;
  for (int i = 0; i < 256; ++i) {
    const unsigned at = block * 256 + i;
    const int32_t q = encoder.finite ? encoder.code(x[at]) : 0;
    code[at] = static_cast<int8_t>(q);
    if (encoder.finite) e[at] = gradgate::exact::sub(x[at], decoder.value(q));
  }
}

__global__ void bf16_and_topk(const float* x, uint16_t* half, float* back, uint32_t* key, uint32_t* value, unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  half[i] = gradgate::codecs::round_bf16(x[i]);
  back[i] = gradgate::exact::canonical(gradgate::exact::add(gradgate::codecs::widen_bf16(half[i]), x[i]));
  if ((i & 1) != 0) back[i] = gradgate::codecs::widen_f16(gradgate::codecs::round_f16(x[i]));
  key[i] = gradgate::codecs::topk_key(gradgate::exact::mag(x[i]));
  value[i] = gradgate::codecs::topk_value_f32(x[i]) ^ gradgate::codecs::topk_value_bf16(x[i]);
}

__global__ void random_numbers(gradgate::Seed seed, float* u, uint32_t* words, unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const auto block = gradgate::codecs::random_block(seed, gradgate::codecs::element_block(seed.first + i));
  u[i] = gradgate::codecs::dither(gradgate::codecs::element_bits(block, seed.first + i));
  words[i] = block.word[3];
}

}  // namespace

// Keeps the kernels; a host may call it.
extern "C" void gradgate_element_code_launch(const float* x, float* e, uint32_t* u, int8_t* c, uint16_t* h,
                                             unsigned n) {
  int8_blocks<<<(n / 256 + 127) / 128, 128>>>(x, e, u, c, n / 256);
  bf16_and_topk<<<(n + 127) / 128, 128>>>(x, h, e, u, u, n);
  random_numbers<<<(n + 127) / 128, 128>>>({}, e, u, n);
}
