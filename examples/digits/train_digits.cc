// Data-parallel training through a gradgate session, as a trainer's author would write it: four ranks as threads, one bucket.
//
//   train_digits [auto | observe | off | <codec>] [steps]      e.g. train_digits chunk-topk:6/1024
//
// The parts that matter for gradgate are in train_rank(): create a session, describe the bucket, reduce once a step.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "examples/digits/trainer.h"
#include "gradgate/gradgate.h"

namespace {

using gradgate::digits::Recipe;
using gradgate::digits::Trainer;

struct Plan {
  gradgate::Mode mode = gradgate::Mode::automatic;
  std::vector<gradgate::CodecSpec> codecs;  // with on: the codec; else: what the gate may choose besides bf16
  Recipe recipe;
};

bool parse_plan(const std::string& choice, Plan* plan) {
  gradgate::Message why;
  gradgate::CodecSpec codec;
  const bool by_mode = choice != "on" && gradgate::parse_mode(choice, &plan->mode).ok();
  if (!by_mode) plan->mode = choice == "none" ? gradgate::Mode::off : gradgate::Mode::on;
  if (!gradgate::parse_codec(by_mode ? "int8" : choice, &codec, &why).ok()) {
    std::fprintf(stderr, "train_digits: neither a mode nor a codec: %s\n", why.text);
    return false;
  }
  plan->codecs = {codec};
  return true;
}

bool train_rank(gradgate::Communicator& comm, const Plan& plan) {
  const int rank = comm.rank();
  Trainer trainer(static_cast<size_t>(rank), plan.recipe.ranks, 1, plan.recipe);

  gradgate::SessionOptions options;
  options.mode = plan.mode;
  options.codecs = plan.codecs;
  options.seed = 1;
  options.explain = [](void*, const char* line) { std::puts(line); };  // only rank 0 is ever asked to explain
  std::unique_ptr<gradgate::Session> session;
  gradgate::Message why;
  if (!gradgate::Session::create(comm, options, &session, &why).ok()) {
    std::fprintf(stderr, "rank %d: %s\n", rank, why.text);
    return false;
  }

  // Residuals belong to parameters, so a session wants to know which elements are whose.
  std::vector<gradgate::ParamSlice> slices;
  for (const auto& p : trainer.parameters()) slices.push_back({p.id, p.offset, p.count});
  const gradgate::BucketLayout bucket{gradgate::DType::f32, slices};
  gradgate::Status status = session->set_layout({&bucket, 1});

  for (uint64_t step = 0; status.ok() && step < plan.recipe.steps; ++step) {
    const double loss = trainer.compute_gradient(step);
    const auto gradient = trainer.gradient();
    status = session->all_reduce(0, {gradient.data(), gradient.size(), gradgate::DType::f32});
    if (!status.ok()) break;
    trainer.apply(gradient);
    if (rank == 0 && step % 50 == 0) {
      std::printf("step %3llu  rank 0 loss %.3f\n", static_cast<unsigned long long>(step), loss);
    }
  }
  if (!status.ok()) {
    std::fprintf(stderr, "rank %d: %s\n", rank, session->last_error());
    return false;
  }

  if (rank == 0) {
    const gradgate::SessionStats stats = session->stats();
    const bool gated = plan.mode == gradgate::Mode::automatic || plan.mode == gradgate::Mode::observe;
    if (gated) std::printf("%s\n", session->explain(0));
    std::printf("test accuracy %.2f%% after %llu steps; %llu steps compressed; sent %.1f MB where dense sends %.1f MB\n",
                100 * trainer.accuracy(), static_cast<unsigned long long>(stats.steps),
                static_cast<unsigned long long>(stats.compressed_buckets), static_cast<double>(stats.wire_bytes) * 1e-6,
                static_cast<double>(stats.dense_bytes) * 1e-6);
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Plan plan;
  if (!parse_plan(argc > 1 ? argv[1] : "auto", &plan)) return 2;
  if (argc > 2) {
    char* end = nullptr;
    const unsigned long long steps = std::strtoull(argv[2], &end, 10);
    if (*end != '\0' || end == argv[2] || steps == 0 || steps > 100000) {
      std::fprintf(stderr, "train_digits: steps: expected a whole number from 1 to 100000, got \"%s\"\n", argv[2]);
      return 2;
    }
    plan.recipe.steps = steps;
  }

  const int ranks = static_cast<int>(plan.recipe.ranks);
  std::unique_ptr<gradgate::ThreadGroup> group;
  if (!gradgate::ThreadGroup::create(ranks, &group).ok()) return 1;
  std::vector<char> ok(plan.recipe.ranks, 0);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] { ok[static_cast<size_t>(r)] = train_rank(group->rank(r), plan); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const char one : ok) {
    if (!one) return 1;
  }
  return 0;
}
