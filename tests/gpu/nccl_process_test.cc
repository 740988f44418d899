// NCCL ranks as processes: no test here touches CUDA before it forks. Each child runs one exchange and a host on the
// other side of a pipe compares what all of them ended with.
#include <sys/wait.h>
#include <unistd.h>

#include "tests/gpu/nccl_ranks.h"

namespace gradgate::test {
namespace {

constexpr size_t kCount = 5000;
constexpr uint32_t kStep = 3;

bool write_all(int file, const void* data, size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t done = write(file, bytes, size);
    if (done <= 0) return false;
    bytes += done, size -= static_cast<size_t>(done);
  }
  return true;
}
bool read_all(int file, void* data, size_t size) {
  auto* bytes = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t done = read(file, bytes, size);
    if (done <= 0) return false;
    bytes += done, size -= static_cast<size_t>(done);
  }
  return true;
}

Ranks filled(int size) {
  Ranks ranks(size, kCount, DType::f32);
  for (size_t r = 0; r < ranks.gradients.size(); ++r)
    ranks.gradients[r] = Gradient::of(Gen::gaussian, kCount, r, DType::f32);
  return ranks;
}

// What a child does: 0, 77 where there is no device or no NCCL, else what went wrong.
int run_child(int rank, int size, const Candidate& candidate, int id_in, const std::vector<int>& id_out, int result) {
  Message why;
  if (!device::available(&why).ok() || nccl_version(&why) == 0) return 77;
  if (cudaSetDevice(rank % device_count()) != cudaSuccess) return 2;
  NcclId id;
  if (rank == 0) {
    if (!make_nccl_id(&id, &why).ok()) return 3;
    for (const int file : id_out) {
      if (!write_all(file, &id, sizeof id)) return 4;
    }
  } else if (!read_all(id_in, &id, sizeof id)) {
    return 5;
  }
  std::unique_ptr<Communicator> comm;
  if (!make_nccl(id, rank, size, kWatchdogSeconds, &comm, &why).ok()) return 6;
  Ranks ranks = filled(size);
  ExchangeArgs host = ranks.args(rank, candidate, candidate.codec.feedback ? Feedback::apply : Feedback::none, kStep);
  nodes_of(2)(host);
  {
    const NodeTiers tiers = tiers_of(*comm, host.shape);
    DeviceRank device(host);
    ExchangeTimes times;
    if (!enqueue_exchange(*comm, device.args, kWatchdogSeconds, nullptr, &why, &tiers).ok()) return 7;
    if (!device.finish(*comm, host, &times, &why).ok()) return 8;
  }
  return write_all(result, host.gradient.data, kCount * sizeof(float)) ? 0 : 9;
}

void expect_same_as_threads(int size, const char* text) {
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
  const Candidate candidate = candidate_of(text);
  const auto n = static_cast<size_t>(size);
  std::vector<std::array<int, 2>> ids(n), results(n);
  for (size_t r = 0; r < n; ++r) {
    ASSERT_EQ(pipe(ids[r].data()), 0);
    ASSERT_EQ(pipe(results[r].data()), 0);
  }
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const auto r = static_cast<size_t>(rank);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(static_cast<unsigned>(kWatchdogSeconds));
      std::vector<int> to_others;
      for (size_t other = 1; other < n; ++other) to_others.push_back(ids[other][1]);
      _exit(run_child(rank, size, candidate, ids[r][0], to_others, results[r][1]));
    }
    children.push_back(child);
  }
  for (const auto& pipe_ends : results) close(pipe_ends[1]);
  Ranks expected = filled(size);
  expect_all_ok(
      exchange(expected, candidate, candidate.codec.feedback ? Feedback::apply : Feedback::none, kStep, nodes_of(2)));
  bool skipped = false;
  for (size_t r = 0; r < n; ++r) {
    std::vector<float> got(kCount);
    const bool there = read_all(results[r][0], got.data(), kCount * sizeof(float));
    int status = 0;
    ASSERT_EQ(waitpid(children[r], &status, 0), children[r]);
    skipped = skipped || (WIFEXITED(status) && WEXITSTATUS(status) == 77);
    if (skipped) continue;
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << r << ": status " << status;
    ASSERT_TRUE(there) << "rank " << r;
    EXPECT_EQ(std::memcmp(got.data(), expected.gradients[r].data(), kCount * sizeof(float)), 0) << "rank " << r;
  }
  for (size_t r = 0; r < n; ++r) close(ids[r][0]), close(ids[r][1]), close(results[r][0]);
  const char* require = std::getenv("GRADGATE_REQUIRE_NCCL");
  if (skipped && require != nullptr && std::strcmp(require, "1") == 0)
    FAIL() << "GRADGATE_REQUIRE_NCCL=1, and there is none";
  if (skipped) GTEST_SKIP() << "no device, or no NCCL";
}

TEST(NcclProcesses, EndWithTheBytesOfThreadRanks) {
  expect_same_as_threads(2, "int8");
  if (HasFatalFailure() || IsSkipped()) return;
  expect_same_as_threads(2, "randk:0.05");
  expect_same_as_threads(3, "chunk-topk:8/1024");
  expect_same_as_threads(4, "int4@all_gather");
  expect_same_as_threads(4, "int8@hierarchical");
}

}  // namespace
}  // namespace gradgate::test
