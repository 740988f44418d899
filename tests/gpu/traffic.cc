// Launches every kernel once on a large vector and prints what each call was, for tools/gpu-traffic: run under an
// emulator that counts what the kernels do, it shows bytes moved against the floor that the payload's size sets.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "gradgate/device.h"
#include "tests/support/gen.h"
#include "tests/support/specs.h"

namespace {

using namespace gradgate;

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "gpu_traffic: %s\n", what);
  std::exit(1);
}

std::byte* device_memory(size_t bytes, const void* from = nullptr) {
  void* p = nullptr;
  require(cudaMalloc(&p, bytes == 0 ? 1 : bytes) == cudaSuccess, "cudaMalloc");
  require(from == nullptr || cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess, "cudaMemcpy");
  return static_cast<std::byte*>(p);
}

struct Traffic {
  size_t count;
  DType dtype;

  // One line before each call: spec, dtype, operation, elements, floor in bytes, launches so far.
  void begin(const char* spec, const char* what, double floor) const {
    require(cudaDeviceSynchronize() == cudaSuccess, "a kernel failed");
    size_t launches = 0;
    if (const char* path = std::getenv("GRADGATE_TRAFFIC_PROFILE")) {
      std::ifstream profile(path);
      for (std::string line; std::getline(profile, line);) ++launches;
    }
    std::printf("%s\t%s\t%s\t%zu\t%.0f\t%zu\n", spec, dtype_name(dtype), what, count, floor, launches);
    std::fflush(stdout);
  }

  void run(const char* text) const {
    const CodecSpec spec = test::spec_of(text);
    if (!codec_takes(spec, dtype)) return;
    const test::Gradient g = test::Gradient::of(test::Gen::gaussian, count, 1, dtype);
    const std::vector<float> e = test::generate(test::Gen::gaussian, count, 2);
    const size_t bytes = payload_bytes(spec, dtype, count), scratch = device::workspace_bytes(spec, dtype, count);
    const uint64_t zero = 0;
    std::byte *gradient = device_memory(g.bytes(), g.data()), *residual = device_memory(count * 4, e.data());
    std::byte *payloads = device_memory(bytes * 4), *payload = device_memory(bytes),
              *workspace = device_memory(scratch);
    std::byte *out = device_memory(g.bytes()), *fault = device_memory(8, &zero);
    std::byte* threshold = device_memory(4, &zero);  // of the step before, from the second encode on
    const double in = static_cast<double>(g.bytes()), wire = static_cast<double>(bytes);
    // The scale of fp16 depends on every element, so that everything is read once more before the first is rounded; but
    // not where the scale of the step before can be tried.
    const double again = spec.id == CodecId::fp16 ? 1.0 : 0.0, residual_bytes = 4.0 * static_cast<double>(count);

    device::EncodeArgs encode;
    encode.gradient = {gradient, count, dtype};
    encode.workspace = {workspace, scratch};
    encode.threshold = reinterpret_cast<uint32_t*>(threshold);
    for (int rank = 3; rank >= 0; --rank) {
      encode.payload = {payloads + bytes * static_cast<size_t>(rank), bytes};
      if (rank == 0) begin(text, "encode", in + wire);
      require(device::encode(spec, encode, nullptr).ok(), "encode");
      if (rank == 1) require(cudaDeviceSynchronize() == cudaSuccess, "encode");
    }
    if (spec.id != CodecId::none) {
      encode.residual = reinterpret_cast<float*>(residual);
      encode.payload = {payload, bytes};
      begin(text, "encode, feedback", (in + residual_bytes) * (1 + again) + residual_bytes + wire);
      require(device::encode(spec, encode, nullptr).ok(), "encode with feedback");
    }
    device::DecodeArgs decode;
    decode.payload = {payloads, bytes};
    decode.gradient = dtype;
    decode.out = {out, count, dtype};
    decode.workspace = {workspace, scratch};
    decode.fault = reinterpret_cast<uint64_t*>(fault);
    begin(text, "decode", wire + in);
    require(device::decode(spec, decode, nullptr).ok(), "decode");
    if (codec_travels_by(spec, Exchange::two_shot)) {
      device::ReduceArgs reduce;
      reduce.payloads = payloads;
      reduce.stride = bytes;
      reduce.ranks = 4;
      reduce.self = 1;
      reduce.gradient = {gradient, count, dtype};
      reduce.payload = {payload, bytes};
      reduce.workspace = {workspace, scratch};
      reduce.fault = reinterpret_cast<uint64_t*>(fault);
      begin(text, "sum of 4, encode", (3 * wire + in) * (1 + again) + wire);
      require(device::reduce_encode(spec, reduce, nullptr).ok(), "reduce_encode");
    }
    device::DecodeSumArgs sum;
    sum.payloads = payloads;
    sum.stride = bytes;
    sum.ranks = 4;
    sum.gradient = dtype;
    sum.out = {out, count, dtype};
    sum.workspace = {workspace, scratch};
    sum.fault = reinterpret_cast<uint64_t*>(fault);
    begin(text, "decode, sum of 4", 4 * wire + in);
    require(device::decode_sum(spec, sum, nullptr).ok(), "decode_sum");
    begin(text, "end", 0);
    for (std::byte* p : {gradient, residual, payloads, payload, workspace, out, fault, threshold}) cudaFree(p);
  }
};

}  // namespace

int main(int argc, char** argv) {
  setenv("GRADGATE_CUDA_LIBRARY", GRADGATE_CUDA_LIBRARY, 0);
  Message why;
  if (!device::available(&why).ok()) {
    std::fprintf(stderr, "gpu_traffic: %s\n", why.text);
    return 1;
  }
  const size_t count = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : size_t{1} << 20;
  const std::string dtype = argc > 1 ? argv[1] : "f32";
  const Traffic traffic{count, dtype == "bf16" ? DType::bf16 : dtype == "f16" ? DType::f16 : DType::f32};
  const char* const only = argc > 2 ? argv[2] : nullptr;  // one spec instead of all
  for (const char* text : {"none",
                           "bf16",
                           "fp16",
                           "int8",
                           "int8:sr",
                           "fp8",
                           "fp8:e5m2",
                           "int4",
                           "int4:sr",
                           "int4:hadamard",
                           "onebit",
                           "chunk-topk:8/1024",
                           "chunk-topk:8/1024:bf16",
                           "chunk-topk:100/1024",
                           "chunk-topk:32/4096",
                           "topk:0.01",
                           "topk:0.01:bf16",
                           "topk:0.01:int8",
                           "topk:0.001",
                           "randk:0.01"})
    if (only == nullptr || std::string(only) == text) traffic.run(text);
  return 0;
}
