#include "integration/nccl/api.h"

#include <dlfcn.h>

#include <cstdlib>

#include "gradgate/nccl.h"

namespace gradgate {
namespace nccl {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";

struct Opened {
  Api api{};
  bool usable = false;
  Message why;
};

void* open_library(Message* why) noexcept {
  if (const char* path = std::getenv("GRADGATE_NCCL_LIBRARY"); path != nullptr && *path != 0) {
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) why->format("GRADGATE_NCCL_LIBRARY: %s", dlerror());
    return handle;
  }
  // Two NCCLs in one process would not know each other's communicators: the one that is there comes first.
  if (void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return handle;
  void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) why->format("no NCCL: %s (set GRADGATE_NCCL_LIBRARY to its path)", dlerror());
  return handle;
}

Opened open_api() noexcept {
  Opened opened;
  void* handle = open_library(&opened.why);
  if (handle == nullptr) return opened;
  const char* missing = nullptr;
  const auto find = [&](auto* function, const char* symbol) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(handle, symbol));
    if (*function == nullptr && missing == nullptr) missing = symbol;
  };
  Api& api = opened.api;
  find(&api.get_version, "ncclGetVersion");
  if (api.get_version == nullptr || api.get_version(&api.version) != kSuccess) {
    opened.why.format("%s tells no version", kLibrary);
    return opened;
  }
  if (api.version < kOldestNccl) {
    opened.why.format("NCCL %d.%d.%d is too old, accepted: 2.18 or newer", api.version / 10000, api.version / 100 % 100,
                      api.version % 100);
    return opened;
  }
  find(&api.get_unique_id, "ncclGetUniqueId");
  find(&api.comm_init_rank_config, "ncclCommInitRankConfig");
  find(&api.comm_split, "ncclCommSplit");
  find(&api.comm_destroy, "ncclCommDestroy");
  find(&api.comm_abort, "ncclCommAbort");
  find(&api.comm_get_async_error, "ncclCommGetAsyncError");
  find(&api.comm_count, "ncclCommCount");
  find(&api.comm_user_rank, "ncclCommUserRank");
  find(&api.get_error_string, "ncclGetErrorString");
  find(&api.get_last_error, "ncclGetLastError");
  find(&api.all_reduce, "ncclAllReduce");
  find(&api.all_gather, "ncclAllGather");
  find(&api.reduce_scatter, "ncclReduceScatter");
  find(&api.broadcast, "ncclBroadcast");
  find(&api.send, "ncclSend");
  find(&api.recv, "ncclRecv");
  find(&api.group_start, "ncclGroupStart");
  find(&api.group_end, "ncclGroupEnd");
  if (missing != nullptr) {
    opened.why.format("%s has no %s", kLibrary, missing);
    return opened;
  }
  opened.usable = true;
  return opened;
}

}  // namespace

const Api* api(Message* why) noexcept {
  static const Opened opened = open_api();
  if (opened.usable) return &opened.api;
  if (why != nullptr) *why = opened.why;
  return nullptr;
}

}  // namespace nccl

int nccl_version(Message* why) noexcept {
  const nccl::Api* api = nccl::api(why);
  return api == nullptr ? 0 : api->version;
}

Status make_nccl_id(NcclId* id, Message* why) noexcept {
  Message unused;
  if (why == nullptr) why = &unused;
  const nccl::Api* api = nccl::api(why);
  if (api == nullptr) return StatusCode::unsupported;
  nccl::UniqueId made{};
  if (const int error = api->get_unique_id(&made); error != nccl::kSuccess) {
    why->format("ncclGetUniqueId: %s", api->get_error_string(error));
    return {StatusCode::internal, error};
  }
  static_assert(sizeof made == sizeof *id);
  __builtin_memcpy(id->bytes, made.internal, sizeof made);
  return {};
}

}  // namespace gradgate
