#include "integration/cli/demo_runs.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>

#include "integration/cli/error.h"

namespace gradgate::cli {
namespace {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Throws RunError, "rank 1: …", where `status` is not ok.
void check(const Status& status, const Communicator& comm, const char* text) {
  if (!status.ok())
    throw RunError("rank " + std::to_string(comm.rank()) + ": " + (text[0] != '\0' ? text : status.message()));
}

std::vector<CodecSpec> parse_specs(const std::vector<std::string>& texts) {
  std::vector<CodecSpec> specs;
  for (const std::string& text : texts) {
    CodecSpec spec;
    Message why;
    if (!parse_codec(text, &spec, &why).ok()) throw RunError(text + ": " + why.text);
    specs.push_back(spec);
  }
  return specs;
}

/// One session for one rank, with the whole gradient as one bucket. `codecs` empty: dense.
std::unique_ptr<Session> make_session(Communicator& comm, const DemoSetup& setup, Mode mode,
                                      std::span<const CodecSpec> codecs, const digits::Trainer& trainer) {
  SessionOptions options;
  options.mode = mode;
  options.codecs = codecs;
  options.seed = setup.seed;
  options.timeout_s = setup.timeout_s;
  std::unique_ptr<Session> session;
  Message why;
  check(Session::create(comm, options, &session, &why), comm, why.text);
  std::vector<ParamSlice> slices;
  for (const digits::ParameterSlice& p : trainer.parameters())
    slices.push_back({static_cast<uint64_t>(p.id), p.offset, p.count});
  const BucketLayout bucket{DType::f32, slices};
  check(session->set_layout({&bucket, 1}), comm, session->last_error());
  return session;
}

/// The network of one rank, and where its gradient is reduced: in host memory, or, over a communicator of devices, in a
/// copy in device memory.
class RankTraining {
 public:
  RankTraining(Communicator& comm, const DemoSetup& setup)
      : comm_(comm),
        timeout_s_(setup.timeout_s),
        trainer_(static_cast<size_t>(comm.rank()), static_cast<size_t>(comm.size()), setup.seed, setup.recipe) {
    if (comm.on_device()) device_.emplace(trainer_.gradient().size_bytes());
  }

  digits::Trainer& trainer() { return trainer_; }

  /// One step: gradient, average, update.
  void step(Session& session, uint64_t step) {
    trainer_.compute_gradient(step);
    const std::span<float> gradient = trainer_.gradient();
    if (device_) {
      reduce_on_device(session, gradient);
    } else {
      check(session.all_reduce(0, {gradient.data(), gradient.size(), DType::f32}), comm_, session.last_error());
    }
    trainer_.apply(gradient);
  }

 private:
  struct OnDevice {
    explicit OnDevice(size_t bytes) : gradient(bytes) {}
    DeviceStream stream;
    DeviceMemory gradient;
  };

  void reduce_on_device(Session& session, std::span<float> gradient) {
    const Stream stream = device_->stream.get();
    const auto copy = [&](void* to, const void* from) {
      require_cuda_ok(require_cuda().copy(to, from, gradient.size_bytes(), stream.handle), "a copy");
    };
    const auto wait = [&] {
      require(comm_.wait(stream, Deadline::after(timeout_s_)), comm_, "waiting for the gradient");
    };
    copy(device_->gradient.data(), gradient.data());
    check(session.all_reduce(0, {device_->gradient.data(), gradient.size(), DType::f32}, stream), comm_,
          session.last_error());
    check(session.join(stream), comm_, session.last_error());
    wait();  // before the copy, which would wait in CUDA, where no deadline ends it
    copy(gradient.data(), device_->gradient.data());
    wait();
  }

  Communicator& comm_;
  double timeout_s_;
  digits::Trainer trainer_;
  std::optional<OnDevice> device_;
};

StepTime summarize(std::vector<double> seconds) {
  StepTime t;
  t.samples = static_cast<int>(seconds.size());
  if (seconds.empty()) return t;
  std::sort(seconds.begin(), seconds.end());
  const auto at = [&](double q) {
    return seconds[static_cast<size_t>(q * static_cast<double>(seconds.size() - 1) + 0.5)];
  };
  t.median_s = at(0.5);
  t.low_s = at(0.1);
  t.high_s = at(0.9);
  return t;
}

bool all_equal(const std::vector<uint64_t>& hashes) {
  return std::all_of(hashes.begin(), hashes.end(), [&](uint64_t h) { return h == hashes[0]; });
}

}  // namespace

std::vector<TrainingResult> train_per_codec(Ranks& ranks, const DemoSetup& setup, const DemoProgress& progress) {
  const std::vector<CodecSpec> specs = parse_specs(setup.codecs);
  std::vector<TrainingResult> results;
  for (size_t c = 0; c < specs.size(); ++c) {
    const bool dense = specs[c].id == CodecId::none;
    TrainingResult result;
    result.codec = setup.codecs[c];
    std::vector<uint64_t> hashes(static_cast<size_t>(setup.ranks));
    ranks.run({}, [&](Communicator& comm, Communicator&) {
      const int r = comm.rank();
      RankTraining training(comm, setup);
      digits::Trainer& trainer = training.trainer();
      const auto session = make_session(comm, setup, dense ? Mode::off : Mode::on, {&specs[c], 1}, trainer);
      for (uint64_t step = 0; step < setup.recipe.steps; ++step) {
        training.step(*session, step);
        if (r == 0 && step % 10 == 0)
          progress("training with " + result.codec,
                   static_cast<double>(step) / static_cast<double>(setup.recipe.steps));
      }
      check(session->synchronize(), comm, session->last_error());
      hashes[static_cast<size_t>(r)] = trainer.weights_hash();
      if (r == 0) {
        result.accuracy = trainer.accuracy();
        const SessionStats stats = session->stats();
        result.wire_ratio = static_cast<double>(stats.dense_bytes) / static_cast<double>(stats.wire_bytes);
      }
    });
    result.replicas_equal = all_equal(hashes);
    results.push_back(result);
  }
  return results;
}

LinkResult run_link(Ranks& ranks, const DemoSetup& setup, const std::optional<NamedLink>& link,
                    const DemoProgress& progress) {
  const std::vector<CodecSpec> specs = parse_specs(setup.codecs);
  const size_t size = static_cast<size_t>(setup.ranks), configs = specs.size() + 1;  // the last one is auto
  LinkResult result;
  std::vector<uint64_t> hashes(size);
  // seconds[config][sample][rank]; every rank writes its own column.
  const size_t samples = static_cast<size_t>(setup.rounds) * static_cast<size_t>(setup.window - kWindowDiscard);
  std::vector<double> seconds(configs * samples * size);

  ranks.run({.link = link}, [&](Communicator& comm, Communicator& plain) {
    const int r = comm.rank();
    RankTraining training(comm, setup);
    digits::Trainer& trainer = training.trainer();

    // The training under the gate: start-up, verification and hold are part of it.
    const auto automatic = make_session(comm, setup, Mode::automatic, specs, trainer);
    const double start = seconds_now();
    int settled = -1;
    for (uint64_t step = 0; step < setup.recipe.steps; ++step) {
      training.step(*automatic, step);
      if (settled < 0 && std::string_view(automatic->phase()) == "hold") {
        settled = static_cast<int>(step) + 1;
        if (r == 0) result.settle_s = seconds_now() - start;
      }
      if (r == 0 && step % 10 == 0)
        progress("training under the gate", 0.6 * static_cast<double>(step) / static_cast<double>(setup.recipe.steps));
    }
    check(automatic->synchronize(), comm, automatic->last_error());
    hashes[static_cast<size_t>(r)] = trainer.weights_hash();
    if (r == 0) {
      result.accuracy = trainer.accuracy();
      result.settle_steps = settled;
      result.gate_s = automatic->stats().gate_s;
      result.phase = automatic->phase();
      result.chosen = format_codec(automatic->current(0).codec).text;
      result.explanation = automatic->explain(0);
    }

    // Short windows, all in turn and in another order each round, so that a slow second of the machine hits all alike.
    std::vector<std::unique_ptr<Session>> sessions;
    for (const CodecSpec& spec : specs)
      sessions.push_back(
          make_session(comm, setup, spec.id == CodecId::none ? Mode::off : Mode::on, {&spec, 1}, trainer));
    uint64_t step = setup.recipe.steps;
    std::vector<size_t> order(configs);
    std::iota(order.begin(), order.end(), size_t{0});
    std::mt19937 shuffler(static_cast<std::mt19937::result_type>(setup.seed));  // alike on all ranks
    for (int round = 0; round < setup.rounds; ++round) {
      std::shuffle(order.begin(), order.end(), shuffler);
      for (size_t turn = 0; turn < configs; ++turn) {
        const size_t c = order[turn];
        Session& session = c < specs.size() ? *sessions[c] : *automatic;
        for (int i = 0; i < setup.window; ++i, ++step) {
          require(plain.barrier({}, Deadline::after(setup.timeout_s)), plain, "barrier");
          const double before = seconds_now();
          training.step(session, step);
          const double took = seconds_now() - before;
          if (i < kWindowDiscard) continue;
          const size_t sample = static_cast<size_t>(round * (setup.window - kWindowDiscard) + i - kWindowDiscard);
          seconds[(c * samples + sample) * size + static_cast<size_t>(r)] = took;
        }
        if (r == 0)
          progress("timing " + (c < specs.size() ? setup.codecs[c] : std::string("auto")),
                   0.6 + 0.4 * static_cast<double>(static_cast<size_t>(round) * configs + turn + 1) /
                             static_cast<double>(static_cast<size_t>(setup.rounds) * configs));
      }
    }
  });

  result.replicas_equal = all_equal(hashes);
  for (size_t c = 0; c < configs; ++c) {
    std::vector<double> slowest;
    for (size_t s = 0; s < samples; ++s) {
      const auto* row = &seconds[(c * samples + s) * size];
      slowest.push_back(*std::max_element(row, row + size));
    }
    (c < specs.size() ? result.fixed.emplace_back() : result.automatic) = summarize(std::move(slowest));
  }
  return result;
}

}  // namespace gradgate::cli
