// Ranks over NCCL. libgradgate does not link NCCL: it uses the libnccl.so.2 that the process has loaded (PyTorch's, the
// trainer's), or opens one (GRADGATE_NCCL_LIBRARY, else where the loader looks). NCCL 2.18 or newer.
#pragma once

#include <memory>

#include "gradgate/communicator.h"

namespace gradgate {

/// Version of the NCCL that is used, e.g. 23007 for 2.30.7; 0 where none was found or it is too old, and `why`
/// (optional) says which.
GRADGATE_API int nccl_version(Message* why = nullptr) noexcept;
/// Oldest version that is accepted, whose interface gradgate is written to.
inline constexpr int kOldestNccl = 21800;

/// Names a communicator that is about to be made: one rank makes it and hands it to all others.
struct NcclId {
  char bytes[128];
};
GRADGATE_API Status make_nccl_id(NcclId* id, Message* why) noexcept;

/// Collective. A communicator of its own on the calling thread's current CUDA device; timeout where not all ranks come.
/// Device memory and streams only: every call enqueues, wait() waits. After an error or a deadline it is aborted.
GRADGATE_API Status make_nccl(const NcclId& id, int rank, int ranks, double timeout_s,
                              std::unique_ptr<Communicator>* out, Message* why) noexcept;
/// Borrows an ncclComm_t, which must outlive the object. It is never aborted or destroyed here.
GRADGATE_API Status wrap_nccl(void* nccl_comm, std::unique_ptr<Communicator>* out, Message* why) noexcept;

/// Collectives of host memory over a communicator of devices, each through device memory and back, complete on return.
/// For what is small and rare: agreements, probes. They are enqueued on `stream`; where other collectives of `device`
/// are outstanding, it must be theirs, or ranks could run them in another order. `device` and `stream` must outlive it.
GRADGATE_API Status make_staged(Communicator& device, Stream stream, std::unique_ptr<Communicator>* out,
                                Message* why) noexcept;

}  // namespace gradgate
