#include "integration/cli/demo_runs.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "integration/cli/error.h"

namespace gradgate::cli {
namespace {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Runs `body(rank)` on one thread per rank; the first error (by rank) is thrown when all threads have ended. A body
/// that throws aborts the group, so that nobody waits for it.
void on_ranks(ThreadGroup& group, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(group.size()));
  std::vector<std::thread> threads;
  std::mutex first;
  std::string cause;
  for (int r = 0; r < group.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (const std::exception& e) {
        {
          const std::lock_guard lock(first);
          if (cause.empty()) cause = "rank " + std::to_string(r) + ": " + e.what();
        }
        group.rank(r).abort();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  if (!cause.empty()) throw RunError(cause);
}

void check(const Status& status, const char* text) {
  if (!status.ok()) throw RunError(text != nullptr && text[0] != '\0' ? text : status.message());
}

std::unique_ptr<ThreadGroup> make_group(int ranks) {
  std::unique_ptr<ThreadGroup> group;
  check(ThreadGroup::create(ranks, &group), "");
  return group;
}

std::vector<CodecSpec> parse_specs(const std::vector<std::string>& texts) {
  std::vector<CodecSpec> specs;
  for (const std::string& text : texts) {
    CodecSpec spec;
    Message why;
    check(parse_codec(text, &spec, &why), why.text);
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
  check(Session::create(comm, options, &session, &why), why.text);
  std::vector<ParamSlice> slices;
  for (const digits::ParameterSlice& p : trainer.parameters())
    slices.push_back({static_cast<uint64_t>(p.id), p.offset, p.count});
  const BucketLayout bucket{DType::f32, slices};
  check(session->set_layout({&bucket, 1}), session->last_error());
  return session;
}

/// One step: gradient, average, update.
void train_step(digits::Trainer& trainer, Session& session, uint64_t step) {
  trainer.compute_gradient(step);
  const std::span<float> gradient = trainer.gradient();
  check(session.all_reduce(0, {gradient.data(), gradient.size(), DType::f32}), session.last_error());
  trainer.apply(gradient);
}

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

std::vector<TrainingResult> train_per_codec(const DemoSetup& setup, const DemoProgress& progress) {
  const std::vector<CodecSpec> specs = parse_specs(setup.codecs);
  std::vector<TrainingResult> results;
  for (size_t c = 0; c < specs.size(); ++c) {
    const bool dense = specs[c].id == CodecId::none;
    TrainingResult result;
    result.codec = setup.codecs[c];
    std::vector<uint64_t> hashes(static_cast<size_t>(setup.ranks));
    const auto group = make_group(setup.ranks);
    on_ranks(*group, [&](int r) {
      digits::Trainer trainer(static_cast<size_t>(r), static_cast<size_t>(setup.ranks), setup.seed, setup.recipe);
      const auto session = make_session(group->rank(r), setup, dense ? Mode::off : Mode::on, {&specs[c], 1}, trainer);
      for (uint64_t step = 0; step < setup.recipe.steps; ++step) {
        train_step(trainer, *session, step);
        if (r == 0 && step % 10 == 0)
          progress("training with " + result.codec,
                   static_cast<double>(step) / static_cast<double>(setup.recipe.steps));
      }
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

LinkResult run_link(const DemoSetup& setup, const LinkSpec* link, const DemoProgress& progress) {
  const std::vector<CodecSpec> specs = parse_specs(setup.codecs);
  const size_t ranks = static_cast<size_t>(setup.ranks), configs = specs.size() + 1;  // the last one is auto
  LinkResult result;
  std::vector<uint64_t> hashes(ranks);
  // seconds[config][sample][rank]; every rank writes its own column.
  const size_t samples = static_cast<size_t>(setup.rounds) * static_cast<size_t>(setup.window - kWindowDiscard);
  std::vector<double> seconds(configs * samples * ranks);
  const auto group = make_group(setup.ranks);

  on_ranks(*group, [&](int r) {
    std::unique_ptr<Communicator> shaped;
    if (link != nullptr) check(make_shaped(group->rank(r), *link, ClockKind::real, &shaped), "");
    Communicator& comm = link != nullptr ? *shaped : group->rank(r);
    digits::Trainer trainer(static_cast<size_t>(r), ranks, setup.seed, setup.recipe);

    // The training under the gate: start-up, verification and hold are part of it.
    const auto automatic = make_session(comm, setup, Mode::automatic, specs, trainer);
    const double start = seconds_now();
    int settled = -1;
    for (uint64_t step = 0; step < setup.recipe.steps; ++step) {
      train_step(trainer, *automatic, step);
      if (settled < 0 && std::string_view(automatic->phase()) == "hold") {
        settled = static_cast<int>(step) + 1;
        if (r == 0) result.settle_s = seconds_now() - start;
      }
      if (r == 0 && step % 10 == 0)
        progress("training under the gate", 0.6 * static_cast<double>(step) / static_cast<double>(setup.recipe.steps));
    }
    hashes[static_cast<size_t>(r)] = trainer.weights_hash();
    if (r == 0) {
      result.accuracy = trainer.accuracy();
      result.settle_steps = settled;
      result.gate_s = automatic->stats().gate_s;
      result.phase = automatic->phase();
      result.chosen = format_codec(automatic->current(0).codec).text;
      result.explanation = automatic->explain(0);
    }

    // Interleaved windows, in turn, so that a slow second of the machine hits all of them alike.
    std::vector<std::unique_ptr<Session>> sessions;
    for (const CodecSpec& spec : specs)
      sessions.push_back(
          make_session(comm, setup, spec.id == CodecId::none ? Mode::off : Mode::on, {&spec, 1}, trainer));
    uint64_t step = setup.recipe.steps;
    for (int round = 0; round < setup.rounds; ++round) {
      for (size_t c = 0; c < configs; ++c) {
        Session& session = c < specs.size() ? *sessions[c] : *automatic;
        for (int i = 0; i < setup.window; ++i, ++step) {
          check(comm.barrier({}, Deadline::after(setup.timeout_s)), comm.last_error());
          const double before = seconds_now();
          train_step(trainer, session, step);
          const double took = seconds_now() - before;
          if (i < kWindowDiscard) continue;
          const size_t sample = static_cast<size_t>(round * (setup.window - kWindowDiscard) + i - kWindowDiscard);
          seconds[(c * samples + sample) * ranks + static_cast<size_t>(r)] = took;
        }
        if (r == 0)
          progress("timing " + (c < specs.size() ? setup.codecs[c] : std::string("auto")),
                   0.6 + 0.4 * static_cast<double>(static_cast<size_t>(round) * configs + c + 1) /
                             static_cast<double>(static_cast<size_t>(setup.rounds) * configs));
      }
    }
  });

  result.replicas_equal = all_equal(hashes);
  for (size_t c = 0; c < configs; ++c) {
    std::vector<double> slowest;
    for (size_t s = 0; s < samples; ++s) {
      const auto* row = &seconds[(c * samples + s) * ranks];
      slowest.push_back(*std::max_element(row, row + ranks));
    }
    (c < specs.size() ? result.fixed.emplace_back() : result.automatic) = summarize(std::move(slowest));
  }
  return result;
}

}  // namespace gradgate::cli
