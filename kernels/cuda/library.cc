#include "kernels/cuda/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

namespace gradgate::kernels::cuda {
namespace {

constexpr const char* kLibrary = "libgradgate_cuda.so";

struct Opened {
  const Plugin* plugin = nullptr;
  const Runtime* runtime = nullptr;
  Message why;
};

// The library beside this code, in a lib folder next to it, one folder up (the Python library of a build tree), or where
// the loader looks.
void* open_library(Message* why) noexcept {
  if (const char* path = std::getenv("GRADGATE_CUDA_LIBRARY"); path != nullptr && *path != 0) {
    void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) why->format("no CUDA device: GRADGATE_CUDA_LIBRARY: %s", dlerror());
    return handle;
  }
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&open_library), &info) != 0 && info.dli_fname != nullptr) {
    const char* slash = std::strrchr(info.dli_fname, '/');
    const int folder = slash == nullptr ? 0 : static_cast<int>(slash - info.dli_fname + 1);
    for (const char* place : {"", "../lib/", "../"}) {
      Message path;
      path.format("%.*s%s%s", folder, info.dli_fname, place, kLibrary);
      if (void* handle = dlopen(path.text, RTLD_NOW | RTLD_LOCAL)) return handle;
    }
  }
  void* handle = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) why->format("no CUDA device: %s (set GRADGATE_CUDA_LIBRARY to its path)", dlerror());
  return handle;
}

template <class Table>
const Table* table(void* handle, const char* symbol) noexcept {
  const auto function = reinterpret_cast<const Table* (*)()>(dlsym(handle, symbol));
  return function == nullptr ? nullptr : function();
}

Opened open_tables() noexcept {
  Opened opened;
  void* handle = open_library(&opened.why);
  if (handle == nullptr) return opened;
  const auto* plugin = table<Plugin>(handle, kPluginSymbol);
  const auto* runtime = table<Runtime>(handle, kRuntimeSymbol);
  if (plugin == nullptr || plugin->version != kPluginVersion || runtime == nullptr ||
      runtime->version != kRuntimeVersion) {
    opened.why.format("%s belongs to another version of gradgate", kLibrary);
    return opened;
  }
  opened.plugin = plugin;
  opened.runtime = runtime;
  return opened;
}

// The tables where there is a device too.
const Opened* opened_with_device(Message* why) noexcept {
  static const Opened opened = open_tables();
  if (opened.plugin == nullptr) {
    if (why != nullptr) *why = opened.why;
    return nullptr;
  }
  int count = 0;  // some drivers leave -1 behind with an error
  const int error = opened.plugin->device_count(&count);
  if (error == 0 && count > 0) return &opened;
  if (why != nullptr)
    why->format("no CUDA device: %s", error == 0 ? "none is visible" : opened.plugin->error_text(error));
  return nullptr;
}

}  // namespace

const Plugin* plugin(Message* why) noexcept {
  const Opened* opened = opened_with_device(why);
  return opened == nullptr ? nullptr : opened->plugin;
}

const Runtime* runtime(Message* why) noexcept {
  const Opened* opened = opened_with_device(why);
  return opened == nullptr ? nullptr : opened->runtime;
}

}  // namespace gradgate::kernels::cuda
