#include "integration/cli/allreduce_check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "codecs/codecs.h"
#include "codecs/reference.h"
#include "gradgate/exchange.h"
#include "integration/cli/ranks.h"
#include "integration/cli/test_data.h"
#include "integration/comm/half.h"
#include "integration/session_impl.h"

namespace gradgate::cli {
namespace {

constexpr size_t kWindow = 65536;                // elements looked at together; a multiple of every shard alignment
constexpr size_t kReferenceElements = 1 << 20;   // the scalar reference is slow: at most about so many elements of a vector

std::vector<float> widen(const void* data, size_t count, DType dtype) { return reference::widen(ConstVec(data, count, dtype)); }

// What a rank put in, in its dtype.
std::vector<std::byte> input(int rank, int ranks, DType dtype, size_t first, size_t count) {
  std::vector<std::byte> values(count * dtype_bytes(dtype));
  fill_exact(rank, ranks, first, {values.data(), count, dtype});
  return values;
}

float round_to(DType dtype, float x) {
  if (dtype == DType::f32) return x;
  const uint16_t rounded = dtype == DType::bf16 ? reference::bf16_of(x) : reference::f16_of(x);
  return widen(&rounded, 1, dtype)[0];
}

// The dense exchange: scale by 1/ranks in the gradient's dtype, sum in f32 in rank order, round once.
std::vector<float> dense_result(const std::vector<std::vector<float>>& inputs, DType dtype) {
  const float scale = static_cast<float>(1.0 / static_cast<double>(inputs.size()));
  std::vector<float> sum(inputs[0].size());
  for (size_t i = 0; i < sum.size(); ++i) {
    sum[i] = round_to(dtype, inputs[0][i] * scale);
    for (size_t r = 1; r < inputs.size(); ++r) sum[i] += round_to(dtype, inputs[r][i] * scale);
    sum[i] = round_to(dtype, sum[i]);
  }
  return sum;
}

// Greatest possible error of a codec for elements of at most these magnitudes, one by one (docs/format.md §3).
std::vector<double> codec_bounds(const CodecSpec& spec, const std::vector<double>& magnitude, double largest) {
  const size_t count = magnitude.size();
  std::vector<double> bounds(count);
  const auto each = [&](auto bound) {
    for (size_t i = 0; i < count; ++i) bounds[i] = bound(magnitude[i]);
  };
  // The bound is the same for all elements of a block: a function of its greatest magnitude and of their sum.
  const auto blocks = [&](size_t length, auto bound) {
    for (size_t begin = 0; begin < count; begin += length) {
      const size_t end = std::min(count, begin + length);
      double greatest = 0, sum = 0;
      for (size_t i = begin; i < end; ++i) greatest = std::max(greatest, magnitude[i]), sum += magnitude[i];
      for (size_t i = begin; i < end; ++i) bounds[i] = bound(greatest, sum, magnitude[i]);
    }
  };
  constexpr double kRounded = 1 + 0x1p-18;  // scale, code and value are f32
  switch (spec.id) {
    case CodecId::none: break;
    case CodecId::bf16: each([](double x) { return x * 0x1p-8; }); break;
    case CodecId::fp16: each([&](double x) { return std::max(x * 0x1.02p-11, largest * 0x1p-39); }); break;
    case CodecId::int8:  // half a step, stochastic a whole one
      blocks(256, [&](double a, double, double) { return a / (spec.param1 == 0 ? 254 : 127) * kRounded; });
      break;
    case CodecId::fp8:
      blocks(256, [&](double a, double, double x) {
        return (spec.param1 == 0 ? std::max(x * 0x1p-4, a / 448 * 0x1p-10) : std::max(x * 0x1p-3, a / 57344 * 0x1p-17)) * kRounded;
      });
      break;
    case CodecId::int4:  // rotated elements are at most the sum of the magnitudes
      blocks(128, [&](double a, double sum, double) { return (spec.param1 % 2 == 0 ? a : sum) / (spec.param1 < 2 ? 14 : 7) * kRounded; });
      break;
    case CodecId::onebit: blocks(1024, [&](double a, double, double) { return a * kRounded; }); break;
    case CodecId::topk:
    case CodecId::randk:
    case CodecId::chunk_topk:  // left out, or rounded to bf16, or to a step of the greatest entry
      each([&](double x) { return std::max(x * (1 + 0x1p-8), spec.value == DType::u8 ? largest / 254 * kRounded : 0); });
      break;
  }
  return bounds;
}

// Greatest possible |result − exact average| of a compressed exchange, element by element. In a two_shot each value passes the codec twice, as part of a rank's
// payload and as part of the sum; in an all_gather once, which the same bounds cover. `roundings`: how often a sum is rounded before it is the codec's.
std::vector<double> exchange_bounds(const CodecSpec& spec, const std::vector<std::vector<float>>& inputs, DType dtype, double roundings) {
  const size_t count = inputs[0].size();
  const double ranks = static_cast<double>(inputs.size());
  std::vector<double> sum(count), bounds(count), arriving(count), one(count);
  for (const std::vector<float>& input : inputs) {
    for (size_t i = 0; i < count; ++i) sum[i] += one[i] = std::fabs(input[i]);
    const std::vector<double> first = codec_bounds(spec, one, kLargestExact);
    for (size_t i = 0; i < count; ++i) bounds[i] += first[i];
  }
  for (size_t i = 0; i < count; ++i) arriving[i] = (sum[i] + bounds[i]) * (1 + ranks * 0x1p-24);
  const std::vector<double> second = codec_bounds(spec, arriving, 2 * ranks * kLargestExact);
  for (size_t i = 0; i < count; ++i) bounds[i] += second[i] * roundings * (1 + roundings * 0x1p-8);
  // f32 arithmetic on the way, and the last rounding to the gradient's dtype.
  const double last = dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : 0x1p-24;
  const double least = dtype == DType::f16 ? 0x1p-25 : 0;  // half the spacing of its subnormals
  for (size_t i = 0; i < count; ++i) bounds[i] = (bounds[i] * (1 + last) + sum[i] * (last + (ranks + 4) * 0x1p-24)) / ranks + least;
  return bounds;
}

// The scalar reference of a two_shot exchange for elements first … first+count-1, which lie in the shard of `owner` and begin at a multiple of the
// codec's unit.
std::vector<float> reference_result(const CodecSpec& spec, DType dtype, int owner, int ranks, size_t first, size_t count) {
  std::vector<std::vector<std::byte>> payloads(static_cast<size_t>(ranks));
  std::vector<ConstBytes> views(static_cast<size_t>(ranks));
  std::vector<float> residual(spec.feedback ? count : 0);
  const auto fresh = [&]() -> float* {
    std::fill(residual.begin(), residual.end(), 0.0f);
    return spec.feedback ? residual.data() : nullptr;
  };
  const auto seed = [&](int stream) { return Seed{.stream = static_cast<uint32_t>(stream), .first = first}; };
  for (int r = 0; r < ranks; ++r) {
    if (r == owner) continue;
    const std::vector<std::byte> values = input(r, ranks, dtype, first, count);
    payloads[static_cast<size_t>(r)] = reference::encode(spec, ConstVec(values.data(), count, dtype), fresh(), false, seed(r), nullptr);
    views[static_cast<size_t>(r)] = payloads[static_cast<size_t>(r)];
  }
  const std::vector<std::byte> own = input(owner, ranks, dtype, first, count);
  const std::vector<std::byte> sum =
      reference::reduce_encode(spec, views, static_cast<size_t>(owner), ConstVec(own.data(), count, dtype), fresh(), seed(ranks + owner), nullptr);
  std::vector<std::byte> out(count * dtype_bytes(dtype));
  reference::decode(spec, dtype, sum.data(), {out.data(), count, dtype}, static_cast<float>(1.0 / ranks), Into::store);
  return widen(out.data(), count, dtype);
}

// The same of an all_gather.
std::vector<float> gathered_result(const CodecSpec& spec, DType dtype, int ranks, size_t first, size_t count) {
  std::vector<std::vector<std::byte>> payloads;
  for (int r = 0; r < ranks; ++r) {
    std::vector<float> residual(spec.feedback ? count : 0);
    const std::vector<std::byte> values = input(r, ranks, dtype, first, count);
    payloads.push_back(
        reference::encode(spec, ConstVec(values.data(), count, dtype), spec.feedback ? residual.data() : nullptr, false,
                          Seed{.stream = static_cast<uint32_t>(r), .first = first}, nullptr));
  }
  const std::vector<ConstBytes> views(payloads.begin(), payloads.end());
  std::vector<std::byte> out(count * dtype_bytes(dtype));
  reference::decode_sum(spec, dtype, views, {out.data(), count, dtype}, static_cast<float>(1.0 / ranks));
  return widen(out.data(), count, dtype);
}

// The same of an all_reduce of payloads: the sums of their values, in rank order and the values' dtype.
std::vector<float> summed_result(const CodecSpec& spec, DType dtype, int ranks, size_t first, size_t count) {
  std::vector<std::vector<std::byte>> payloads;
  for (int r = 0; r < ranks; ++r) {
    std::vector<float> residual(spec.feedback ? count : 0);
    const std::vector<std::byte> values = input(r, ranks, dtype, first, count);
    payloads.push_back(reference::encode(spec, ConstVec(values.data(), count, dtype), spec.feedback ? residual.data() : nullptr, false,
                                         Seed{.stream = 0xffffffffu, .first = first}, nullptr));
  }
  const codecs::Addends adds = codecs::addends_of(spec, count);
  std::vector<float> sum(adds.count);
  for (size_t r = 0; r < payloads.size(); ++r) {
    const std::vector<float> values = widen(payloads[r].data() + adds.offset, adds.count, adds.dtype);
    for (size_t i = 0; i < adds.count; ++i) sum[i] = r == 0 ? values[i] : sum[i] + values[i];
  }
  std::byte* sums = payloads[0].data() + adds.offset;
  for (size_t i = 0; i < adds.count; ++i) {
    const uint16_t half = comm::float_to_bf16(sum[i]);
    if (adds.dtype == DType::f32) std::memcpy(sums + 4 * i, &sum[i], 4);
    if (adds.dtype == DType::bf16) std::memcpy(sums + 2 * i, &half, 2);
  }
  std::vector<std::byte> out(count * dtype_bytes(dtype));
  reference::decode(spec, dtype, payloads[0].data(), {out.data(), count, dtype}, static_cast<float>(1.0 / ranks), Into::store);
  return widen(out.data(), count, dtype);
}

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

class Checker {
 public:
  Checker(const NamedCodec& codec, DType dtype, size_t count, std::span<const std::byte* const> outputs, int ranks)
      : codec_(codec), dtype_(dtype), count_(count), outputs_(outputs), ranks_(ranks == 0 ? static_cast<int>(outputs.size()) : ranks), bad_(count) {}

  AllReduceCheck run() {
    dense_ = ranks_ == 1 || (codec_.exchange == Exchange::all_reduce && codec_.spec.id == CodecId::none);
    for (size_t first = 0; first < count_; first += kWindow) check_window(first, std::min(kWindow, count_ - first));
    if (!dense_) check_reference();
    result_.wrong += static_cast<uint64_t>(std::count(bad_.begin(), bad_.end(), true));
    return result_;
  }

 private:
  const std::byte* at(int rank, size_t first) const { return outputs_[static_cast<size_t>(rank)] + first * dtype_bytes(dtype_); }

  void check_window(size_t first, size_t count) {
    std::vector<std::vector<float>> inputs;
    for (int r = 0; r < ranks_; ++r) inputs.push_back(widen(input(r, ranks_, dtype_, first, count).data(), count, dtype_));
    const std::vector<float> got = widen(at(0, first), count, dtype_);
    const std::vector<float> dense = dense_ ? dense_result(inputs, dtype_) : std::vector<float>();
    const std::vector<double> bounds = dense_ ? std::vector<double>() : exchange_bounds(codec_.spec, inputs, dtype_, backend_rounds() ? ranks_ - 1 : 1);
    for (size_t i = 0; i < count; ++i) {
      double sum = 0;
      for (const std::vector<float>& values : inputs) sum += values[i];
      const double error = std::fabs(got[i] - sum / ranks_);
      if (!(error <= result_.max_error) && !std::isnan(result_.max_error)) result_.max_error = error;
      if (dense_ ? !same_bits(got[i], dense[i]) : !(error <= bounds[i])) bad_[first + i] = true;
    }
    const size_t element = dtype_bytes(dtype_);
    for (int r = 1; r < static_cast<int>(outputs_.size()); ++r) {  // counted apart: one rank's element is right, another's is not
      if (std::memcmp(at(0, first), at(r, first), count * element) == 0) continue;
      for (size_t i = 0; i < count; ++i) result_.wrong += std::memcmp(at(0, first + i), at(r, first + i), element) != 0;
    }
  }

  // A backend that adds values of 16 bits may round after every addition, and in its own order.
  bool backend_rounds() const { return !dense_ && codec_.exchange == Exchange::all_reduce && codecs::addends_of(codec_.spec, count_).dtype != DType::f32; }

  void check_reference() {
    if (backend_rounds()) return;
    if (codec_.exchange == Exchange::hierarchical) return;  // bounds and equality of ranks say it all
    if (!codec_travels_by(codec_.spec, Exchange::two_shot)) return compare(0, 0, count_);  // chosen over the whole vector
    const size_t unit = shard_alignment(codec_.spec), ranks = static_cast<size_t>(ranks_);
    const size_t per_rank = (count_ + ranks - 1) / ranks, shard = (per_rank + unit - 1) / unit * unit;
    const size_t window = std::max(unit, kReferenceElements / 2 / ranks / unit * unit);
    // The elements of fp16 depend on all of the shard, or of the vector: a window of it is something else.
    if (codec_.spec.id == CodecId::fp16 && (shard > window || codec_.exchange == Exchange::all_gather)) return;
    for (int owner = 0; owner < ranks_; ++owner) {
      const size_t begin = std::min(count_, static_cast<size_t>(owner) * shard), end = std::min(count_, begin + shard);
      compare(owner, begin, std::min(end, begin + window));
      const size_t rest = std::min(end, begin + window);  // what the first window left
      const size_t tail = end - rest > window ? begin + (end - window - begin) / unit * unit : rest;
      compare(owner, tail, end);
    }
  }
  void compare(int owner, size_t begin, size_t end) {
    if (begin == end) return;
    const std::vector<float> expected = codec_.exchange == Exchange::all_gather
                                            ? gathered_result(codec_.spec, dtype_, ranks_, begin, end - begin)
                                        : codec_.exchange == Exchange::all_reduce
                                            ? summed_result(codec_.spec, dtype_, ranks_, begin, end - begin)
                                            : reference_result(codec_.spec, dtype_, owner, ranks_, begin, end - begin);
    const std::vector<float> got = widen(at(0, begin), end - begin, dtype_);
    for (size_t i = 0; i < expected.size(); ++i) {
      if (!same_bits(expected[i], got[i])) bad_[begin + i] = true;
    }
  }

  const NamedCodec& codec_;
  DType dtype_;
  size_t count_;
  std::span<const std::byte* const> outputs_;
  int ranks_;
  bool dense_ = false;
  std::vector<bool> bad_;
  AllReduceCheck result_;
};

}  // namespace

AllReduceCheck check_all_reduce(const NamedCodec& codec, DType dtype, size_t count, std::span<const std::byte* const> outputs, int ranks) {
  return Checker(codec, dtype, count, outputs, ranks).run();
}

AllReduceCheck check_across(Communicator& comm, const NamedCodec& codec, DType dtype, size_t count, const std::byte* output, double timeout_s) {
  const auto ranks = static_cast<size_t>(comm.size());
  const size_t bytes = count * dtype_bytes(dtype), element = dtype_bytes(dtype);
  // The scalar reference takes about as long as this; the others wait for it.
  const auto deadline = [&] { return Deadline::after(timeout_s + 1e-6 * static_cast<double>(count * ranks)); };
  const uint64_t hash = fnv1a64(output, bytes);
  std::vector<uint64_t> hashes(ranks);
  require(comm.all_gather(&hash, hashes.data(), sizeof hash, DType::u8, {}, deadline()), comm, "comparing results");
  double different = 0;
  if (std::count(hashes.begin(), hashes.end(), hash) != static_cast<ptrdiff_t>(ranks)) {
    std::vector<std::byte> window(std::min(bytes, kWindow * element));
    for (size_t first = 0; first < bytes; first += window.size()) {
      const size_t size = std::min(window.size(), bytes - first);
      if (comm.rank() == 0) std::memcpy(window.data(), output + first, size);
      require(comm.broadcast(window.data(), size, DType::u8, 0, {}, deadline()), comm, "comparing results");
      for (size_t i = 0; i < size; i += element) different += std::memcmp(window.data() + i, output + first + i, element) != 0;
    }
  }
  double mine[2] = {different, 0};
  if (comm.rank() == 0) {
    const AllReduceCheck check = check_all_reduce(codec, dtype, count, {&output, 1}, comm.size());
    mine[0] += static_cast<double>(check.wrong);
    mine[1] = check.max_error;
  }
  std::vector<double> all(2 * ranks);
  require(comm.all_gather(mine, all.data(), 2, DType::f64, {}, deadline()), comm, "comparing results");
  AllReduceCheck result{0, all[1]};
  for (size_t r = 0; r < ranks; ++r) result.wrong += static_cast<uint64_t>(all[2 * r]);
  return result;
}

}  // namespace gradgate::cli
