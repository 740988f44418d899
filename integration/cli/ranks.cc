#include "integration/cli/ranks.h"

#include <exception>
#include <new>
#include <thread>

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

std::unique_ptr<Ranks> Ranks::open(const std::string& option, int asked) {
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
