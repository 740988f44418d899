#include "integration/cli/ranks.h"

#include <exception>
#include <new>
#include <thread>

#include "gradgate/nccl.h"
#include "integration/cli/error.h"
#include "integration/cli/mpi_world.h"

namespace gradgate::cli {
namespace {

class ThreadRanks final : public Ranks {
 public:
  explicit ThreadRanks(int ranks) : size_(ranks) {}
  int size() const override { return size_; }
  int local() const override { return size_; }
  int first_local() const override { return 0; }
  const char* backend() const override { return "thread"; }

 protected:
  Communicator& communicator(int rank) override {
    if (!group_) {
      const Status status = ThreadGroup::create(size_, &group_);
      if (!status.ok()) throw RunError(std::to_string(size_) + " thread ranks: " + status.message());
    }
    return group_->rank(rank);
  }

 private:
  int size_;
  std::unique_ptr<ThreadGroup> group_;
};

class MpiRanks final : public Ranks {
 public:
  explicit MpiRanks(std::unique_ptr<Communicator> world) : world_(std::move(world)) {}
  int size() const override { return world_->size(); }
  int local() const override { return 1; }
  int first_local() const override { return world_->rank(); }
  const char* backend() const override { return "mpi"; }

 protected:
  Communicator& communicator(int) override { return *world_; }

 private:
  std::unique_ptr<Communicator> world_;
};

// Ranks over NCCL: the threads or processes of `host`, each with a device, which they share where there are fewer.
class DeviceRanks final : public Ranks {
 public:
  explicit DeviceRanks(std::unique_ptr<Ranks> host) : host_(std::move(host)), comms_(static_cast<size_t>(host_->local())) {
    require_cuda();
    Message why;
    if (nccl_version(&why) == 0) throw RunError(std::string("--device cuda: ") + why.text);
  }
  int size() const override { return host_->size(); }
  int local() const override { return host_->local(); }
  int first_local() const override { return host_->first_local(); }
  const char* backend() const override { return "nccl"; }
  std::string description(const Shaping& shaping) override {
    refuse(shaping);
    return std::to_string(size()) + " ranks over NCCL " + nccl_text(nccl_version()) + " on " + cuda_text();
  }

  void run(const Shaping& shaping, const std::function<void(Communicator&, Communicator&)>& body) override {
    refuse(shaping);
    host_->run({}, [&](Communicator&, Communicator& plain) {
      const int rank = plain.rank();
      require_cuda_ok(require_cuda().set_device(rank % cuda_devices()), "choosing a device");
      std::unique_ptr<Communicator>& comm = comms_[static_cast<size_t>(rank - first_local())];
      if (comm == nullptr) connect(plain, &comm);
      body(*comm, plain);
    });
  }

 protected:
  Communicator& communicator(int rank) override { return *comms_[static_cast<size_t>(rank - first_local())]; }

 private:
  static constexpr double kConnectSeconds = 120;

  static void refuse(const Shaping& shaping) {
    if (shaping.link) throw UsageError("--link: emulates a link between ranks of host memory, not with --device cuda");
  }
  static void connect(Communicator& plain, std::unique_ptr<Communicator>* comm) {
    Message why;
    NcclId id{};
    const Status made = plain.rank() == 0 ? make_nccl_id(&id, &why) : Status{};
    require(plain.broadcast(&id, sizeof id, DType::u8, 0, {}, Deadline::after(kConnectSeconds)), plain, "NCCL's id");
    Status status = made;
    if (status.ok()) status = make_nccl(id, plain.rank(), plain.size(), kConnectSeconds, comm, &why);
    if (!status.ok()) {
      throw RunError("rank " + std::to_string(plain.rank()) + ": " + why.text +
                     (plain.size() > cuda_devices() ? " (several ranks on one device: NCCL 2.30 or newer with NCCL_MULTI_RANK_GPU_ENABLE=1)" : ""));
    }
  }

  std::unique_ptr<Ranks> host_;
  std::vector<std::unique_ptr<Communicator>> comms_;
};

std::unique_ptr<Communicator> shape(Communicator& comm, const Shaping& shaping) {
  std::unique_ptr<Communicator> shaped;
  const Status status =
      make_shaped(comm, shaping.link->link, shaping.virtual_clock ? ClockKind::virtual_time : ClockKind::real, &shaped);
  if (!status.ok()) throw RunError("--link: " + shaping.link->text + ": " + status.message());
  return shaped;
}

struct Failure {
  std::string text;
  bool memory = false, any = false;
};

}  // namespace

std::unique_ptr<Ranks> Ranks::open(const std::string& option, int asked, Device device) {
  if (device == Device::cuda) return std::make_unique<DeviceRanks>(open(option, asked));
  const std::optional<MpiLaunch> launch = mpi_launch();
  if (!launch) return std::make_unique<ThreadRanks>(asked == 0 ? kDefaultRanks : asked);
  if (asked != 0 && asked != launch->ranks) {
    throw UsageError(option + ": " + std::to_string(asked) + ", but the MPI launcher started " +
                     std::to_string(launch->ranks) + " (" + launch->variable + "); leave the option out");
  }
  return std::make_unique<MpiRanks>(mpi_world(*launch));
}

std::string Ranks::description(const Shaping& shaping) {
  Communicator& first = communicator(first_local());
  return shaping.link ? shape(first, shaping)->description() : first.description();
}

void Ranks::run(const Shaping& shaping, const std::function<void(Communicator&, Communicator&)>& body) {
  std::vector<Failure> failures(static_cast<size_t>(local()));
  const auto one = [&](int index) {
    Communicator& plain = communicator(first_local() + index);
    Failure& failure = failures[static_cast<size_t>(index)];
    try {
      const std::unique_ptr<Communicator> shaped = shaping.link ? shape(plain, shaping) : nullptr;
      body(shaped ? *shaped : plain, plain);
      return;
    } catch (const std::bad_alloc&) {
      failure.memory = true;
    } catch (const std::exception& error) {
      failure.text = error.what();
    }
    failure.any = true;
    plain.abort();
  };
  if (local() == 1) {
    one(0);
  } else {
    static_cast<void>(communicator(0));  // made before the threads are
    std::vector<std::thread> threads;
    for (int i = 0; i < local(); ++i) threads.emplace_back(one, i);
    for (std::thread& thread : threads) thread.join();
  }
  // What one rank ran into makes the others end as "aborted": the cause is what the user needs.
  for (const bool cause : {true, false}) {
    for (const Failure& failure : failures) {
      if (!failure.any || (cause && failure.text.find(": aborted") != std::string::npos)) continue;
      if (failure.memory) throw std::bad_alloc();
      throw RunError(failure.text);
    }
  }
}

void require(const Status& status, const Communicator& comm, const std::string& doing) {
  if (status.ok()) return;
  throw RunError("rank " + std::to_string(comm.rank()) + ": " + doing + ": " + status.message() + ": " +
                 comm.last_error());
}

}  // namespace gradgate::cli
