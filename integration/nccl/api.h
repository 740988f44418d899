// The part of NCCL's C interface that gradgate calls, as NCCL 2.18 has it and all later versions keep it. Declared
// here, so that no header is needed to build; tests/gpu compares it with nccl.h where there is one.
#pragma once

#include <cstddef>

#include "gradgate/types.h"

namespace gradgate::nccl {

using Comm = void*;    // ncclComm_t
using Stream = void*;  // cudaStream_t
struct UniqueId {
  char internal[128];
};

// ncclResult_t, ncclDataType_t, ncclRedOp_t
inline constexpr int kSuccess = 0, kInProgress = 7;
inline constexpr int kUint8 = 1, kFloat16 = 6, kFloat32 = 7, kFloat64 = 8, kBfloat16 = 9;
inline constexpr int kSum = 0;

/// ncclConfig_t of 2.18: later versions append, and read as much as `size` and `version` say.
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 0;  ///< calls return at once; ncclCommGetAsyncError tells when they are done
  int cga_cluster_size = kUndefined, min_ctas = kUndefined, max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;

  static constexpr int kUndefined = -2147483647 - 1;
};

struct Api {
  int (*get_version)(int* version);
  int (*get_unique_id)(UniqueId* id);
  int (*comm_init_rank_config)(Comm* comm, int ranks, UniqueId id, int rank, Config* config);
  int (*comm_split)(Comm comm, int color, int key, Comm* out, Config* config);
  int (*comm_destroy)(Comm comm);
  int (*comm_abort)(Comm comm);
  int (*comm_get_async_error)(Comm comm, int* error);
  int (*comm_count)(Comm comm, int* count);
  int (*comm_user_rank)(Comm comm, int* rank);
  const char* (*get_error_string)(int error);
  const char* (*get_last_error)(Comm comm);
  int (*all_reduce)(const void* send, void* recv, size_t count, int dtype, int op, Comm comm, Stream stream);
  int (*all_gather)(const void* send, void* recv, size_t count, int dtype, Comm comm, Stream stream);
  int (*reduce_scatter)(const void* send, void* recv, size_t count, int dtype, int op, Comm comm, Stream stream);
  int (*broadcast)(const void* send, void* recv, size_t count, int dtype, int root, Comm comm, Stream stream);
  int (*send)(const void* send, size_t count, int dtype, int peer, Comm comm, Stream stream);
  int (*recv)(void* recv, size_t count, int dtype, int peer, Comm comm, Stream stream);
  int (*group_start)();
  int (*group_end)();
  int version;  ///< of the library that was found
};

/// Null where there is no usable NCCL; `why` (optional) then says what was found.
const Api* api(Message* why = nullptr) noexcept;

}  // namespace gradgate::nccl
