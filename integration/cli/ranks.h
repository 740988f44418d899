// The ranks of a run: threads of this process, or, started by mpirun, the processes of an MPI job of which this one is
// a part.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "integration/cli/device.h"
#include "integration/cli/link.h"

namespace gradgate::cli {

inline constexpr int kDefaultRanks = 4;

/// How fast the ranks are made to look.
struct Shaping {
  std::optional<NamedLink> link;  ///< none: as fast as they are
  bool virtual_clock = false;     ///< with a link: time is modelled, not waited for
};

class Ranks {
 public:
  /// Under an MPI launcher its ranks, and `asked` (0: not said) must agree with them; otherwise `asked` or
  /// kDefaultRanks threads. Throws UsageError naming `option`, and RunError.
  static std::unique_ptr<Ranks> open(const std::string& option, int asked, Device device = Device::cpu);
  virtual ~Ranks() = default;

  /// Of the whole run.
  virtual int size() const = 0;
  /// Ranks that live in this process: their numbers are first_local() … first_local() + local() − 1.
  virtual int local() const = 0;
  virtual int first_local() const = 0;
  /// One process of the run prints and writes files.
  bool prints() const { return first_local() == 0; }
  /// Whether all ranks live in this process.
  bool all_here() const { return local() == size(); }
  /// "thread", "mpi" or "nccl": the key of a profile.
  virtual const char* backend() const = 0;
  /// "4 thread ranks, link 1 Gbit/s 50 us (emulated)".
  virtual std::string description(const Shaping& shaping);

  /// body(communicator, plain) on every local rank, each in a thread of its own where there are several; `plain` is the
  /// same ranks without the link, for what is not measured. Returns when all are back. body throws RunError (or
  /// std::bad_alloc) to fail; then all ranks' waits end, and the first failure is thrown.
  /// Over devices `comm` is NCCL's, with its device current, and `plain` is of host memory.
  virtual void run(const Shaping& shaping, const std::function<void(Communicator& comm, Communicator& plain)>& body);

 protected:
  virtual Communicator& communicator(int rank) = 0;
};

/// "rank 1: timeout: all_reduce: …" as a RunError where `status` is not ok.
void require(const Status& status, const Communicator& comm, const std::string& doing);

}  // namespace gradgate::cli
