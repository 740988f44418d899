// A communicator whose collectives are functions of the caller: how a transport that lives in another language or
// library (torch.distributed, mpi4py, …) carries a session.
#pragma once

#include <memory>

#include "gradgate/communicator.h"
#include "gradgate/gradgate_c.h"

namespace gradgate::comm {

/// `ops` is copied; `context` is handed to every function. invalid_argument: a rank outside 0 … ranks−1, a wrong `size`
/// or a missing function (reduce_scatter_sum, abort and last_error may be null); `why` names it.
Status make_callback_comm(int rank, int ranks, const gg_communicator_ops& ops, void* context, const char* description,
                          std::unique_ptr<Communicator>* out, Message* why) noexcept;

}  // namespace gradgate::comm
