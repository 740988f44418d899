// What the files of the C interface share.
#pragma once

#include <cstdio>
#include <memory>

#include "gradgate/communicator.h"

struct gg_comm {
  gradgate::Communicator* comm = nullptr;
  std::unique_ptr<gradgate::Communicator> owned;
};

namespace gradgate::c_api {

inline int code(Status status) { return static_cast<int>(status.code()); }
inline int code(StatusCode status) { return static_cast<int>(status); }

/// The code; its text into `why` (may be null).
inline int report(Status status, const Message& message, char* why, size_t why_bytes) {
  if (why != nullptr && why_bytes > 0)
    std::snprintf(why, why_bytes, "%s", message.text[0] ? message.text : status.message());
  return code(status);
}

}  // namespace gradgate::c_api
