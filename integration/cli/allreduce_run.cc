#include "integration/cli/allreduce_run.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "integration/cli/allreduce_check.h"
#include "integration/cli/buffer.h"
#include "integration/cli/error.h"
#include "integration/cli/test_data.h"

namespace gradgate::cli {
namespace {

struct RankTimes {
  double total_s = 0;
  ExchangeTimes parts;
};

// What one rank owns.
struct Rank {
  std::unique_ptr<Communicator> shaped;
  Communicator* comm = nullptr;
  Buffer gradient, residual, workspace;
  std::vector<RankTimes> times;
  std::string error;
};

std::unique_ptr<ThreadGroup> make_group(int ranks) {
  std::unique_ptr<ThreadGroup> group;
  const Status status = ThreadGroup::create(ranks, &group);
  if (!status.ok()) throw RunError(std::to_string(ranks) + " thread ranks: " + status.message());
  return group;
}

void connect(const AllReduceSetup& setup, ThreadGroup& group, int r, Rank* rank) {
  rank->comm = &group.rank(r);
  if (!setup.link) return;
  const Status status = make_shaped(group.rank(r), setup.link->link, setup.virtual_clock ? ClockKind::virtual_time : ClockKind::real, &rank->shaped);
  if (!status.ok()) throw RunError("--link: " + setup.link->text + ": " + status.message());
  rank->comm = rank->shaped.get();
}

void run_rank(const AllReduceSetup& setup, const ExchangeShape& shape, Rank* rank) {
  const Vec gradient{rank->gradient.data(), shape.count, shape.dtype};
  Communicator& comm = *rank->comm;
  for (uint64_t i = 0; i < setup.warmup + setup.iterations; ++i) {
    // Every iteration has the same input and a zero residual, so that checking the last one checks what was timed.
    fill_exact(shape.rank, shape.ranks, 0, gradient);
    if (rank->residual.size() > 0) std::memset(rank->residual.data(), 0, rank->residual.size());
    const ExchangeArgs args{.shape = shape,
                            .gradient = gradient,
                            .residual = shape.candidate.codec.feedback ? rank->residual.as<float>() : nullptr,
                            .feedback = shape.candidate.codec.feedback ? Feedback::apply : Feedback::none,
                            .workspace = rank->workspace.bytes(),
                            .seed = {},
                            .executor = {}};
    Message why;
    Status status = comm.barrier({}, Deadline::after(setup.timeout_s));
    if (!status.ok()) why.format("barrier: %s", comm.last_error());
    RankTimes times;
    const double start = comm.now();
    if (status.ok()) status = run_exchange(comm, args, setup.timeout_s, setup.rates, &times.parts, &why);
    times.total_s = comm.now() - start;
    if (!status.ok()) {
      rank->error = "rank " + std::to_string(shape.rank) + ": " + status.message() + ": " + why.text;
      comm.abort();
      return;
    }
    if (i >= setup.warmup) rank->times.push_back(times);
  }
}

double slowest(const std::vector<Rank>& ranks, size_t iteration, double (*part)(const RankTimes&)) {
  double value = 0;
  for (const Rank& rank : ranks) value = std::max(value, part(rank.times[iteration]));
  return value;
}

}  // namespace

std::string describe_ranks(const AllReduceSetup& setup) {
  const std::unique_ptr<ThreadGroup> group = make_group(setup.ranks);
  Rank first;
  connect(setup, *group, 0, &first);
  return first.comm->description();
}

AllReduceCase run_all_reduce(const AllReduceSetup& setup, const NamedCodec& codec, size_t count) {
  const std::unique_ptr<ThreadGroup> group = make_group(setup.ranks);
  std::vector<Rank> ranks(static_cast<size_t>(setup.ranks));
  std::vector<ExchangeShape> shapes;
  for (int r = 0; r < setup.ranks; ++r) {
    Rank& rank = ranks[static_cast<size_t>(r)];
    shapes.push_back({.candidate = default_candidate(codec.spec), .count = count, .dtype = setup.dtype, .rank = r, .ranks = setup.ranks, .width = 1});
    rank.gradient = Buffer(count * dtype_bytes(setup.dtype));
    rank.residual = Buffer(codec.spec.feedback ? count * sizeof(float) : 0);
    rank.workspace = Buffer(exchange_workspace_bytes(shapes.back()));
    rank.times.reserve(setup.iterations);
    connect(setup, *group, r, &rank);
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < setup.ranks; ++r) {
    threads.emplace_back(run_rank, std::cref(setup), std::cref(shapes[static_cast<size_t>(r)]), &ranks[static_cast<size_t>(r)]);
  }
  for (std::thread& thread : threads) thread.join();
  for (const Rank& rank : ranks) {
    if (!rank.error.empty() && rank.error.find(": aborted") == std::string::npos) throw RunError(codec.text + ": " + rank.error);
  }
  for (const Rank& rank : ranks) {
    if (!rank.error.empty()) throw RunError(codec.text + ": " + rank.error);
  }

  AllReduceCase result;
  result.wire_bytes = exchange_wire_bytes(shapes[0]);
  for (size_t i = 0; i < setup.iterations; ++i) {
    result.time_s.push_back(slowest(ranks, i, [](const RankTimes& t) { return t.total_s; }));
    result.encode_s.push_back(slowest(ranks, i, [](const RankTimes& t) { return t.parts.encode_s; }));
    result.transfer_s.push_back(slowest(ranks, i, [](const RankTimes& t) { return t.parts.transfer_s; }));
    result.decode_s.push_back(slowest(ranks, i, [](const RankTimes& t) { return t.parts.decode_s; }));
  }
  std::vector<const std::byte*> outputs;
  for (Rank& rank : ranks) outputs.push_back(rank.gradient.data());
  const AllReduceCheck check = check_all_reduce(codec, setup.dtype, count, outputs);
  result.wrong = check.wrong;
  result.max_error = check.max_error;
  return result;
}

}  // namespace gradgate::cli
