#include "integration/cli/allreduce_run.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "gradgate/device_exchange.h"
#include "integration/cli/allreduce_check.h"
#include "integration/cli/buffer.h"
#include "integration/cli/error.h"
#include "integration/cli/test_data.h"

namespace gradgate::cli {
namespace {

// Seconds of one iteration on one rank, in the order in which ranks gather them.
enum Part : size_t { kTotal, kEncode, kTransfer, kDecode, kParts };

// What one rank owns.
struct Rank {
  ExchangeShape shape;
  Buffer gradient, residual, workspace;
  std::vector<double> times;      ///< [iteration][part]
  std::vector<double> all_times;  ///< [rank][iteration][part]
  AllReduceCheck check;           ///< where the ranks are processes: of all of them
};

void run_rank(const AllReduceSetup& setup, Communicator& comm, const NodeTiers* tiers, Rank* rank) {
  const ExchangeShape& shape = rank->shape;
  const Vec gradient{rank->gradient.data(), shape.count, shape.dtype};
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
    require(comm.barrier({}, Deadline::after(setup.timeout_s)), comm, "barrier");
    ExchangeTimes parts;
    Message why;
    const double start = comm.now();
    const Status status = run_exchange(comm, args, setup.timeout_s, setup.rates, &parts, &why, tiers);
    const double total_s = comm.now() - start;
    if (!status.ok()) throw RunError("rank " + std::to_string(shape.rank) + ": " + status.message() + ": " + why.text);
    if (i >= setup.warmup)
      rank->times.insert(rank->times.end(), {total_s, parts.encode_s, parts.transfer_s, parts.decode_s});
  }
}

// The same in device memory: what is timed lies between marks on the stream, and starts where all ranks are.
void run_rank_on_device(const AllReduceSetup& setup, Communicator& comm, Communicator& plain, const NodeTiers* tiers, Rank* rank) {
  const auto& cuda = require_cuda();
  const auto copied = [&](int error) { require_cuda_ok(error, "a copy"); };
  const ExchangeShape& shape = rank->shape;
  const Vec host{rank->gradient.data(), shape.count, shape.dtype};
  const bool feedback = shape.candidate.codec.feedback;
  const DeviceStream stream;
  const DeviceMemory gradient(rank->gradient.size()), residual(feedback ? shape.count * sizeof(float) : 0),
      workspace(exchange_workspace_bytes(shape)), record(sizeof(ExchangeRecord));
  const DevicePlace place{stream.get(), record.as<ExchangeRecord>(), nullptr};
  DeviceMarks marks;
  if (!marks.create().ok()) throw RunError("CUDA: no events");
  copied(cuda.fill(workspace.data(), 0, workspace.size(), stream.handle()));
  for (uint64_t i = 0; i < setup.warmup + setup.iterations; ++i) {
    fill_exact(shape.rank, shape.ranks, 0, host);
    copied(cuda.copy(gradient.data(), host.data, rank->gradient.size(), stream.handle()));
    copied(cuda.fill(residual.data(), 0, residual.size(), stream.handle()));
    copied(cuda.fill(record.data(), 0, record.size(), stream.handle()));
    const ExchangeArgs args{.shape = shape,
                            .gradient = {gradient.data(), shape.count, shape.dtype},
                            .residual = feedback ? residual.as<float>() : nullptr,
                            .feedback = feedback ? Feedback::apply : Feedback::none,
                            .workspace = {workspace.data(), workspace.size()},
                            .seed = {},
                            .executor = {},
                            .device = &place};
    require(plain.barrier({}, Deadline::after(setup.timeout_s)), plain, "barrier");
    require(comm.barrier(stream.get(), Deadline::after(setup.timeout_s)), comm, "barrier");
    Message why;
    ExchangeTimes parts;
    ExchangeRecord found;
    Status status = enqueue_exchange(comm, args, setup.timeout_s, &marks, &why, tiers);
    if (status.ok()) {
      copied(cuda.copy(&found, record.data(), sizeof found, stream.handle()));
      require(comm.wait(stream.get(), Deadline::after(setup.timeout_s)), comm, "waiting for the exchange");
      status = exchange_record_status(args, found, &parts.non_finite, &why);
    }
    if (status.ok()) status = marks.read(&parts);
    if (!status.ok()) throw RunError("rank " + std::to_string(shape.rank) + ": " + status.message() + ": " + why.text);
    if (i < setup.warmup) continue;
    rank->times.insert(rank->times.end(), {parts.encode_s + parts.transfer_s + parts.decode_s, parts.encode_s, parts.transfer_s, parts.decode_s});
  }
  copied(cuda.copy(host.data, gradient.data(), rank->gradient.size(), stream.handle()));
  require(comm.wait(stream.get(), Deadline::after(setup.timeout_s)), comm, "copying the result");
  // Nobody gives memory back before all are through.
  require(plain.barrier({}, Deadline::after(setup.timeout_s)), plain, "barrier");
}

// Greatest over ranks, per iteration.
std::vector<double> slowest(const std::vector<double>& times, size_t ranks, size_t iterations, Part part) {
  std::vector<double> values(iterations);
  for (size_t r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < iterations; ++i)
      values[i] = std::max(values[i], times[(r * iterations + i) * kParts + part]);
  }
  return values;
}

}  // namespace

AllReduceCase run_all_reduce(Ranks& ranks, const AllReduceSetup& setup, const NamedCodec& codec, size_t count) {
  std::vector<Rank> local(static_cast<size_t>(ranks.local()));
  for (size_t i = 0; i < local.size(); ++i) {
    Rank& rank = local[i];
    rank.shape = {.candidate = codec.candidate(),
                  .count = count,
                  .dtype = setup.dtype,
                  .rank = ranks.first_local() + static_cast<int>(i),
                  .ranks = ranks.size(),
                  .width = 1,
                  .ranks_per_node = codec.exchange == Exchange::hierarchical ? setup.ranks_per_node : 0,
                  .device = setup.device == Device::cuda};
    rank.gradient = Buffer(count * dtype_bytes(setup.dtype));
    rank.residual = Buffer(codec.spec.feedback ? count * sizeof(float) : 0);
    rank.workspace = Buffer(exchange_workspace_bytes(rank.shape));
    rank.times.reserve(setup.iterations * kParts);
    rank.all_times.resize(setup.iterations * kParts * static_cast<size_t>(ranks.size()));
  }
  try {
    ranks.run(setup.shaping, [&](Communicator& comm, Communicator& plain) {
      Rank& rank = local[static_cast<size_t>(comm.rank() - ranks.first_local())];
      NodeTiers tiers;
      if (codec.exchange == Exchange::hierarchical) {
        // The link is between nodes: within one, ranks are as fast as they are.
        NodeTiers fast;
        Message why;
        Status status = split_nodes(comm, setup.ranks_per_node, setup.timeout_s, &tiers, &why);
        if (status.ok() && setup.shaping.link) status = split_nodes(plain, setup.ranks_per_node, setup.timeout_s, &fast, &why);
        if (!status.ok()) throw RunError("rank " + std::to_string(comm.rank()) + ": " + status.message() + ": " + why.text);
        if (fast.node != nullptr) tiers.node = std::move(fast.node);
      }
      if (setup.device == Device::cuda) {
        run_rank_on_device(setup, comm, plain, &tiers, &rank);
      } else {
        run_rank(setup, comm, &tiers, &rank);
      }
      require(plain.all_gather(rank.times.data(), rank.all_times.data(), rank.times.size(), DType::f64, {},
                               Deadline::after(setup.timeout_s)),
              plain, "gathering times");
      if (!ranks.all_here())
        rank.check = check_across(plain, codec, setup.dtype, count, rank.gradient.data(), setup.timeout_s);
    });
  } catch (const RunError& error) {
    throw RunError(codec.text + ": " + error.what());
  }

  AllReduceCase result;
  result.wire_bytes = exchange_wire_bytes(local[0].shape);
  const auto part = [&](Part which) {
    return slowest(local[0].all_times, static_cast<size_t>(ranks.size()), setup.iterations, which);
  };
  result.time_s = part(kTotal);
  result.encode_s = part(kEncode);
  result.transfer_s = part(kTransfer);
  result.decode_s = part(kDecode);
  AllReduceCheck check = local[0].check;
  if (ranks.all_here()) {
    std::vector<const std::byte*> outputs;
    for (const Rank& rank : local) outputs.push_back(rank.gradient.data());
    check = check_all_reduce(codec, setup.dtype, count, outputs);
  }
  result.wrong = check.wrong;
  result.max_error = check.max_error;
  return result;
}

}  // namespace gradgate::cli
