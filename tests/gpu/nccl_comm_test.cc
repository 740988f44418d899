// The communicator over NCCL: every collective against sums by hand, host memory through it, and ranks that do not
// come.
#include <gmock/gmock.h>

#include "integration/nccl/api.h"
#include "tests/gpu/nccl_ranks.h"
#if __has_include(<nccl.h>)
#include <nccl.h>
#endif

namespace gradgate::test {
namespace {

using testing::HasSubstr;
using Nccl = NcclRanks;

std::vector<float> values(size_t count, int rank) {
  std::vector<float> v(count);
  for (size_t i = 0; i < count; ++i)
    v[i] = static_cast<float>(static_cast<int>((i * 3 + static_cast<size_t>(rank) * 7) % 11) - 5);
  return v;
}

template <class T>
std::vector<T> fetched(DeviceBuffer& buffer) {
  std::vector<T> v(buffer.size() / sizeof(T));
  if (!v.empty()) std::memcpy(v.data(), buffer.fetch(), buffer.size());
  EXPECT_TRUE(buffer.intact());
  return v;
}

TEST_F(Nccl, EveryCollectiveGivesWhatItsNameSays) {
  constexpr size_t kCount = 1000;
  for (const int size : {1, 2, 3, 4}) {
    run_nccl_ranks(size, [&](Communicator& comm) {
      const auto n = static_cast<size_t>(size), me = static_cast<size_t>(comm.rank());
      EXPECT_EQ(comm.size(), size);
      EXPECT_TRUE(comm.on_device());
      EXPECT_THAT(comm.description(), HasSubstr(std::to_string(size) + " NCCL 2."));
      TestStream stream;
      std::vector<std::vector<float>> all;
      for (int r = 0; r < size; ++r) all.push_back(values(kCount * n, r));
      DeviceBuffer send(all[me].data(), kCount * n * 4);

      DeviceBuffer reduced(kCount * 4);
      GRADGATE_EXPECT_OK(comm.all_reduce_sum(send.data(), reduced.data(), kCount, DType::f32, stream.get(), patient()),
                         comm);
      DeviceBuffer gathered(kCount * n * 4);
      GRADGATE_EXPECT_OK(comm.all_gather(send.data(), gathered.data(), kCount, DType::f32, stream.get(), patient()),
                         comm);
      DeviceBuffer exchanged(kCount * n * 4);
      GRADGATE_EXPECT_OK(comm.all_to_all(send.data(), exchanged.data(), kCount * 4, DType::u8, stream.get(), patient()),
                         comm);
      DeviceBuffer scattered(kCount * 4);
      GRADGATE_EXPECT_OK(
          comm.reduce_scatter_sum(send.data(), scattered.data(), kCount, DType::f32, stream.get(), patient()), comm);
      DeviceBuffer sent(all[me].data(), kCount * 4);
      GRADGATE_EXPECT_OK(comm.broadcast(sent.data(), kCount, DType::f32, size - 1, stream.get(), patient()), comm);
      GRADGATE_EXPECT_OK(comm.barrier(stream.get(), patient()), comm);
      GRADGATE_EXPECT_OK(comm.wait(stream.get(), patient()), comm);

      std::vector<float> sum(kCount * n, 0.0f);
      for (const auto& v : all) {
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += v[i];
      }
      EXPECT_EQ(fetched<float>(reduced), std::vector<float>(sum.begin(), sum.begin() + kCount));
      EXPECT_EQ(fetched<float>(scattered), std::vector<float>(sum.begin() + static_cast<long>(me * kCount),
                                                              sum.begin() + static_cast<long>((me + 1) * kCount)));
      const std::vector<float> blocks = fetched<float>(gathered), swapped = fetched<float>(exchanged);
      for (size_t r = 0; r < n; ++r) {
        for (size_t i = 0; i < kCount; ++i) {
          ASSERT_EQ(blocks[r * kCount + i], all[r][i]) << r << " " << i;
          ASSERT_EQ(swapped[r * kCount + i], all[r][me * kCount + i]) << r << " " << i;
        }
      }
      EXPECT_EQ(fetched<float>(sent), std::vector<float>(all[n - 1].begin(), all[n - 1].begin() + kCount));
      EXPECT_EQ(comm.all_reduce_sum(send.data(), send.data(), 4, DType::u8, stream.get(), patient()).code(),
                StatusCode::unsupported);
      EXPECT_STREQ(comm.last_error(), "");
    });
  }
}

TEST_F(Nccl, PartsOfACommunicatorWorkOnTheirOwn) {
  run_nccl_ranks(4, [&](Communicator& comm) {
    std::unique_ptr<Communicator> half;
    GRADGATE_EXPECT_OK(comm.split(comm.rank() % 2, -comm.rank(), &half, patient()), comm);
    ASSERT_NE(half, nullptr);
    EXPECT_EQ(half->size(), 2);
    EXPECT_EQ(half->rank(), comm.rank() < 2 ? 1 : 0) << "ordered by key";
    TestStream stream;
    const float mine = static_cast<float>(comm.rank());
    DeviceBuffer value(&mine, 4);
    GRADGATE_EXPECT_OK(half->all_reduce_sum(value.data(), value.data(), 1, DType::f32, stream.get(), patient()), *half);
    GRADGATE_EXPECT_OK(half->wait(stream.get(), patient()), *half);
    EXPECT_EQ(fetched<float>(value), std::vector<float>{comm.rank() % 2 == 0 ? 2.0f : 4.0f});
  });
}

TEST_F(Nccl, HostMemoryGoesThroughTheDevice) {
  run_nccl_ranks(3, [&](Communicator& device) {
    std::unique_ptr<Communicator> comm;
    Message why;
    TestStream stream;
    ASSERT_TRUE(make_staged(device, stream.get(), &comm, &why).ok()) << why.text;
    EXPECT_FALSE(comm->on_device());
    const int me = comm->rank();
    double number = me + 0.5, all[3] = {}, root = me, swapped[3] = {},
           send[3] = {10.0 * me, 10.0 * me + 1, 10.0 * me + 2};
    GRADGATE_EXPECT_OK(comm->all_gather(&number, all, 1, DType::f64, {}, patient()), *comm);
    GRADGATE_EXPECT_OK(comm->all_reduce_sum(&number, &number, 1, DType::f64, {}, patient()), *comm);
    GRADGATE_EXPECT_OK(comm->broadcast(&root, 1, DType::f64, 2, {}, patient()), *comm);
    GRADGATE_EXPECT_OK(comm->all_to_all(send, swapped, 1, DType::f64, {}, patient()), *comm);
    GRADGATE_EXPECT_OK(comm->reduce_scatter_sum(send, &send[0], 1, DType::f64, {}, patient()), *comm);
    GRADGATE_EXPECT_OK(comm->barrier({}, patient()), *comm);
    EXPECT_THAT(all, testing::ElementsAre(0.5, 1.5, 2.5));
    EXPECT_EQ(number, 4.5);
    EXPECT_EQ(root, 2.0);
    EXPECT_THAT(swapped, testing::ElementsAre(me, 10 + me, 20 + me));
    EXPECT_EQ(send[0], 30.0 + 3 * me);
    EXPECT_EQ(comm->barrier(stream.get(), patient()).code(), StatusCode::unsupported);
  });
}

// A peer that never calls: the wait ends at its deadline, names the operation, and the communicator stays failed.
TEST_F(Nccl, AMissingPeerEndsTheWaitAtItsDeadline) {
  run_nccl_ranks(2, [&](Communicator& comm) {
    if (comm.rank() == 1) return;
    TestStream stream;
    const float mine = 1;
    DeviceBuffer value(&mine, 4);
    GRADGATE_EXPECT_OK(comm.all_reduce_sum(value.data(), value.data(), 1, DType::f32, stream.get(), patient()), comm);
    const auto start = std::chrono::steady_clock::now();
    const Status status = comm.wait(stream.get(), Deadline::after(0.3));
    EXPECT_EQ(status.code(), StatusCode::timeout);
    EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(300));
    EXPECT_THAT(comm.last_error(), testing::AllOf(HasSubstr("rank 0 of 2"), HasSubstr("all_reduce"), HasSubstr("0.3")));
    EXPECT_EQ(comm.barrier(stream.get(), patient()).code(), StatusCode::timeout) << "it stays failed";
  });
}

TEST_F(Nccl, BadArgumentsAreNamed) {
  NcclId id{};
  std::unique_ptr<Communicator> comm;
  Message why;
  EXPECT_EQ(make_nccl(id, 3, 2, 1, &comm, &why).code(), StatusCode::invalid_argument);
  EXPECT_THAT(why.text, HasSubstr("rank 3 of 2 ranks"));
  EXPECT_EQ(wrap_nccl(nullptr, &comm, &why).code(), StatusCode::invalid_argument);
  EXPECT_THAT(why.text, HasSubstr("null"));
}

#if __has_include(<nccl.h>)
// The declarations of integration/nccl/api.h against NCCL's own.
TEST_F(Nccl, TheDeclarationsAreThoseOfItsHeader) {
  static_assert(sizeof(ncclUniqueId) == sizeof(nccl::UniqueId));
  static_assert(ncclSuccess == nccl::kSuccess && ncclInProgress == nccl::kInProgress);
  static_assert(ncclUint8 == nccl::kUint8 && ncclFloat16 == nccl::kFloat16 && ncclFloat32 == nccl::kFloat32 &&
                ncclFloat64 == nccl::kFloat64 && ncclBfloat16 == nccl::kBfloat16 && ncclSum == nccl::kSum);
  static_assert(offsetof(ncclConfig_t, magic) == offsetof(nccl::Config, magic) &&
                offsetof(ncclConfig_t, blocking) == offsetof(nccl::Config, blocking) &&
                offsetof(ncclConfig_t, netName) == offsetof(nccl::Config, net_name) &&
                offsetof(ncclConfig_t, splitShare) == offsetof(nccl::Config, split_share));
  const ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  const nccl::Config ours;
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_EQ(ours.cga_cluster_size, theirs.cgaClusterSize);
  EXPECT_LE(ours.size, theirs.size);
}
#endif

// A communicator of the caller's is used, and neither aborted nor destroyed.
TEST_F(Nccl, ABorrowedCommunicatorStaysTheCallers) {
  const nccl::Api* api = nccl::api();
  nccl::UniqueId id;
  ASSERT_EQ(api->get_unique_id(&id), 0);
  nccl::Comm theirs = nullptr;
  nccl::Config config;
  config.blocking = 1;
  ASSERT_EQ(api->comm_init_rank_config(&theirs, 1, id, 0, &config), 0);
  for (int round = 0; round < 2; ++round) {
    std::unique_ptr<Communicator> comm;
    Message why;
    ASSERT_TRUE(wrap_nccl(theirs, &comm, &why).ok()) << why.text;
    EXPECT_EQ(comm->size(), 1);
    const float mine = 3;
    DeviceBuffer value(&mine, 4);
    GRADGATE_EXPECT_OK(comm->all_reduce_sum(value.data(), value.data(), 1, DType::f32, {stream_}, patient()), *comm);
    GRADGATE_EXPECT_OK(comm->wait({stream_}, patient()), *comm);
    EXPECT_EQ(fetched<float>(value), std::vector<float>{3.0f});
    if (round == 1) comm->abort();
    EXPECT_EQ(comm->barrier({stream_}, patient()).code(), round == 1 ? StatusCode::aborted : StatusCode::ok);
  }
  EXPECT_EQ(api->comm_destroy(theirs), 0);
}

}  // namespace
}  // namespace gradgate::test
