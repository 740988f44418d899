#include "integration/cli/bench_run.h"

#include <bit>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>

#include "codecs/reference.h"
#include "gradgate/exchange.h"
#include "gradgate/pinned_pool.h"
#include "integration/cli/buffer.h"
#include "integration/cli/error.h"
#include "integration/cli/test_data.h"
#include "kernels/cpu/floors.h"

namespace gradgate::cli {
namespace {

constexpr size_t kColdBytes = size_t{256} << 20;   // a gradient of this size has left every cache by itself
constexpr size_t kFlushBytes = size_t{128} << 20;  // read before each timed call of a smaller one
constexpr uint64_t kGradientSeed = 1, kResidualSeed = 2, kSummedSeed = 3;

double seconds_of(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

CodecSpec with_feedback(CodecSpec spec, bool feedback) {
  spec.feedback = feedback;
  return spec;
}

class Bench {
  struct Summed {
    CodecSpec spec;
    std::vector<Buffer> payloads;
    std::vector<ConstBytes> views;
  };

 public:
  Bench(const BenchSetup& setup, Progress& progress)
      : setup_(setup), progress_(progress), executor_(start(setup.threads)), gradient_(bytes()), out_(bytes()), residual_(setup.count * sizeof(float)) {
    if (bytes() < kColdBytes) flush_ = Buffer(kFlushBytes);
    flush_.touch();
    out_.touch();
    data_.fill(kGradientSeed, 0, vec(gradient_));
    data_.fill(kResidualSeed, 0, {residual_.data(), setup.count, DType::f32});
    size_t payload = 0, workspace = 0, scratch = 0;
    for (const NamedCodec& codec : setup.codecs) {
      payload = std::max(payload, payload_bytes(codec.spec, setup.dtype, setup.count));
      workspace = std::max(workspace, workspace_bytes(with_feedback(codec.spec, has_feedback(codec.spec)), setup.dtype, setup.count, executor_.width));
      if (setup.exchange) scratch = std::max(scratch, exchange_shadow_bytes(shape(codec.candidate())));
    }
    if (setup.exchange && setup.dtype == DType::f32) scratch = std::max(scratch, exchange_shadow_bytes(shape(default_candidate(bf16()))));
    payload_ = Buffer(payload);
    if (setup.floors) prepare_sums(&workspace);
    workspace_ = Buffer(workspace);
    scratch_ = Buffer(scratch);
    const Status status = ThreadGroup::create(1, &clock_);  // for its clock only
    if (!status.ok()) throw RunError(std::string("thread group: ") + status.message());
  }

  BenchResult run() {
    BenchResult result;
    std::optional<NthElementPeer> nth;
    if (setup_.peers) nth.emplace(floats()), result.peers.push_back({"std::nth_element 1 %", {}, {}, 0});
    for (const NamedCodec& codec : setup_.codecs) {
      CodecTimes times;
      times.codec = codec;
      times.payload = payload_bytes(codec.spec, setup_.dtype, setup_.count);
      result.codecs.push_back(std::move(times));
    }
    for (size_t round = 0; round <= setup_.rounds; ++round) {  // round 0 warms up
      keep_ = round > 0;
      last_ = round == setup_.rounds;
      show("round " + std::to_string(round) + " of " + std::to_string(setup_.rounds));
      floors(&result);
      for (CodecTimes& times : result.codecs) measure(&times);
      if (nth) time(&result.peers[0].encode_s, [&] { nth->choose(); });
      if (setup_.exchange && setup_.dtype == DType::f32) measure_exchange(default_candidate(bf16()), &result.bf16);
    }
    if (setup_.peers) {
      show("peers: torch");
      const PeerSums expected = expected_sums(floats());
      result.peers[0].wrong = nth->sum() != expected.topk;
      if (chosen_sum() != expected.topk) throw RunError("--peers: topk and its peers choose different elements");
      const TorchRun run{setup_.python, Device::cpu, setup_.rounds, setup_.threads, flush_.size()};
      for (PeerTimes& peer : torch_peers(run, floats(), expected, &result.peers_note))
        result.peers.push_back(std::move(peer));
    }
    return result;
  }

 private:
  std::span<const float> floats() const { return {gradient_.as<float>(), setup_.count}; }

  // The magnitudes that topk sends, by their bits: what its peers are compared with.
  uint64_t chosen_sum() {
    const CodecSpec spec = peer_topk();
    Buffer payload(payload_bytes(spec, DType::f32, setup_.count)), workspace(workspace_bytes(spec, DType::f32, setup_.count, executor_.width));
    const NamedCodec codec{.spec = spec, .text = "topk:0.01"};
    check(encode(spec, {.gradient = vec(gradient_), .payload = payload.bytes(), .workspace = workspace.bytes(), .seed = {}, .executor = executor_}), codec, "encode");
    check(decode(spec, {.payload = payload.bytes(), .out = vec(out_), .executor = executor_}), codec, "decode");
    uint64_t sum = 0;
    for (size_t i = 0; i < setup_.count; ++i) sum += std::bit_cast<uint32_t>(out_.as<float>()[i]) & 0x7fffffffu;
    return sum;
  }

  // Payloads of different gradients, as many as are added up, for every codec that travels by all_gather.
  void prepare_sums(size_t* workspace) {
    Buffer scratch(*workspace);
    for (const NamedCodec& codec : setup_.codecs) {
      if (codec_info(codec.spec.id).exchange != Exchange::all_gather) continue;
      Summed summed{codec.spec, {}, {}};
      for (size_t k = 0; k < kSummedPayloads; ++k) {
        data_.fill(kSummedSeed + k, 0, vec(out_));
        summed.payloads.emplace_back(payload_bytes(codec.spec, setup_.dtype, setup_.count));
        summed.views.push_back(summed.payloads.back().bytes());
        check(encode(with_feedback(codec.spec, false), {.gradient = vec(out_), .payload = summed.payloads.back().bytes(), .workspace = scratch.bytes(), .seed = {}, .executor = executor_}), codec,
              "encode");
      }
      *workspace = std::max(*workspace, decode_sum_bytes(codec.spec, setup_.dtype, setup_.count, kSummedPayloads, executor_.width));
      summed_.push_back(std::move(summed));
    }
  }

  Executor start(unsigned threads) {
    if (threads == 1) return {};  // inline and unbound, as a thread rank
    const Status status = pool_.start(threads);
    if (status.code() == StatusCode::invalid_argument) {
      throw UsageError("--threads: '" + std::to_string(threads) + "' is outside 1 ... " + std::to_string(status.detail()) + ", the cores this process may use");
    }
    if (!status.ok()) throw RunError(std::string("--threads: ") + status.message());
    return pool_.executor();
  }
  size_t bytes() const { return setup_.count * dtype_bytes(setup_.dtype); }
  Vec vec(const Buffer& buffer) const { return {buffer.data(), setup_.count, setup_.dtype}; }
  static CodecSpec bf16() { return {.id = CodecId::bf16}; }
  bool has_feedback(const CodecSpec& spec) const { return payload_bytes(with_feedback(spec, true), setup_.dtype, setup_.count) != 0; }
  ExchangeShape shape(const Candidate& candidate) const {
    return {.candidate = candidate, .count = setup_.count, .dtype = setup_.dtype, .rank = 0, .ranks = setup_.ranks, .width = executor_.width};
  }
  void show(const std::string& text) {
    step_ = text;
    progress_.show(step_);
  }

  void time(std::vector<double>* list, const std::function<void()>& call) {
    if (flush_.size() > 0) sink_ = sink_ + kernels::cpu::read_sum(flush_.bytes(), executor_);
    const double seconds = seconds_of(call);
    if (keep_) list->push_back(seconds);
  }
  void check(const Status& status, const NamedCodec& codec, const char* what) {
    if (!status.ok()) throw RunError(codec.text + ": " + what + ": " + status.message());
  }

  void floors(BenchResult* result) {
    time(&result->read_s, [&] { sink_ = sink_ + kernels::cpu::read_sum(gradient_.bytes(), executor_); });
    time(&result->copy_s, [&] { kernels::cpu::copy(out_.bytes(), gradient_.bytes(), executor_); });
    if (setup_.dtype != DType::f32) return;
    refill_residual();
    time(&result->axpy_s, [&] { kernels::cpu::axpy_inplace(1.0f, gradient_.as<float>(), residual_.as<float>(), setup_.count, executor_); });
  }

  // The same residual before every encode: a growing one would change what is measured from round to round, and could not be checked.
  void refill_residual() { data_.fill(kResidualSeed, 0, {residual_.data(), setup_.count, DType::f32}); }

  EncodeArgs encode_args(float* residual, uint32_t* threshold = nullptr) {
    return {.gradient = vec(gradient_), .residual = residual, .payload = payload_.bytes(), .workspace = workspace_.bytes(), .seed = {}, .executor = executor_, .threshold = threshold};
  }

  void measure(CodecTimes* times) {
    const CodecSpec plain = with_feedback(times->codec.spec, false);
    if (has_feedback(plain)) {
      refill_residual();
      Status status;
      time(&times->encode_feedback_s, [&] { status = encode(with_feedback(plain, true), encode_args(residual_.as<float>(), &times->threshold[1])); });
      check(status, times->codec, "encode with feedback");
      if (last_) verify_feedback(with_feedback(plain, true), times);
    }
    Status status;
    if (setup_.floors && plain.id == CodecId::topk) {
      time(&times->encode_first_s, [&] { status = encode(plain, encode_args(nullptr)); });
      check(status, times->codec, "first encode");
    }
    if (setup_.floors && executor_.width > 1) {
      EncodeArgs args = encode_args(nullptr, &times->threshold[0]);
      args.executor = {};
      time(&times->encode_one_s, [&] { status = encode(plain, args); });
      check(status, times->codec, "encode by one thread");
    }
    time(&times->encode_s, [&] { status = encode(plain, encode_args(nullptr, &times->threshold[0])); });
    check(status, times->codec, "encode");
    time(&times->decode_s, [&] {
      status = decode(plain, {.payload = payload_.bytes().first(times->payload), .gradient = setup_.dtype, .out = vec(out_), .executor = executor_});
    });
    check(status, times->codec, "decode");
    if (last_) verify(plain, times);
    for (const Summed& summed : summed_) {
      if (summed.spec == times->codec.spec) measure_sum(summed, times);
    }
    if (setup_.exchange) measure_exchange(times->codec.candidate(), &times->exchange);
  }

  void measure_sum(const Summed& summed, CodecTimes* times) {
    Status status;
    time(&times->sum_s, [&] {
      status = decode_sum(summed.spec, {.payloads = summed.views, .gradient = setup_.dtype, .out = vec(out_), .workspace = workspace_.bytes(), .executor = executor_});
    });
    check(status, times->codec, "sum of payloads");
    if (!last_) return;
    show("verifying " + times->codec.text + ": sum of payloads");
    std::vector<std::byte> expected(bytes());
    reference::decode_sum(summed.spec, setup_.dtype, summed.views, {expected.data(), setup_.count, setup_.dtype}, 1.0f);
    times->wrong += differing_bytes(expected.data(), out_.data(), bytes());
  }

  // The codec work of this rank's part in an exchange of the codec as the user wrote it.
  void measure_exchange(const Candidate& candidate, ExchangeWork* work) {
    const CodecSpec& spec = candidate.codec;
    const ExchangeShape exchange = shape(candidate);
    work->wire_bytes = exchange_wire_bytes(exchange);
    const ExchangeArgs args{.shape = exchange,
                            .gradient = vec(gradient_),
                            .residual = spec.feedback ? residual_.as<float>() : nullptr,
                            .feedback = spec.feedback ? Feedback::apply : Feedback::none,
                            .workspace = {},
                            .seed = {},
                            .executor = executor_};
    ExchangeTimes spent;
    std::vector<double> ignored;
    Status status;
    time(&ignored, [&] { status = shadow_exchange(clock_->rank(0), args, scratch_.bytes(), {}, &spent); });
    if (!status.ok()) throw RunError(std::string(format_candidate(candidate).text) + ": exchange: " + status.message());
    if (keep_) work->seconds.push_back(spent.encode_s + spent.decode_s);
  }

  // Whole payload, whole output: what was timed last is what is compared.
  void verify(const CodecSpec& spec, CodecTimes* times) {
    show("verifying " + times->codec.text);
    const std::vector<std::byte> expected = reference::encode(spec, vec(gradient_), nullptr, false, Seed{}, nullptr);
    if (expected.size() != times->payload) ++times->wrong;
    times->wrong += differing_bytes(expected.data(), payload_.data(), std::min(expected.size(), times->payload));
    std::vector<std::byte> decoded(bytes());
    reference::decode(spec, setup_.dtype, expected.data(), {decoded.data(), setup_.count, setup_.dtype}, 1.0f, Into::store);
    times->wrong += differing_bytes(decoded.data(), out_.data(), bytes());
    if (setup_.dtype == DType::f32) {
      times->error = compare({gradient_.as<float>(), setup_.count}, {out_.as<float>(), setup_.count});
    } else {
      times->error = compare(reference::widen(vec(gradient_)), reference::widen(vec(out_)));
    }
  }
  void verify_feedback(const CodecSpec& spec, CodecTimes* times) {
    show("verifying " + times->codec.text + " with feedback");
    std::vector<float> residual(setup_.count);
    data_.fill(kResidualSeed, 0, {residual.data(), setup_.count, DType::f32});
    const std::vector<std::byte> expected = reference::encode(spec, vec(gradient_), residual.data(), false, Seed{}, nullptr);
    times->wrong += differing_bytes(expected.data(), payload_.data(), expected.size());
    times->wrong += differing_bytes(reinterpret_cast<const std::byte*>(residual.data()), residual_.data(), residual_.size());
  }

  const BenchSetup& setup_;
  Progress& progress_;
  GradientLike data_;
  PinnedPool pool_;
  Executor executor_;
  Buffer gradient_, out_, residual_, payload_, workspace_, scratch_, flush_;
  std::vector<Summed> summed_;
  std::unique_ptr<ThreadGroup> clock_;
  std::string step_;
  volatile uint64_t sink_ = 0;  // keeps the read floor from being optimised away
  bool keep_ = false, last_ = false;
};

}  // namespace

uint64_t differing_bytes(const std::byte* a, const std::byte* b, size_t count) {
  if (count == 0 || std::memcmp(a, b, count) == 0) return 0;
  uint64_t wrong = 0;
  for (size_t i = 0; i < count; ++i) wrong += a[i] != b[i];
  return wrong;
}

BenchResult run_bench(const BenchSetup& setup, Progress& progress) {
  const BenchResult result = Bench(setup, progress).run();
  progress.clear();
  return result;
}

}  // namespace gradgate::cli
