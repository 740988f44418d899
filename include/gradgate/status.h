// Status: the one error type of gradgate. Two words, trivially copyable, never thrown.
#pragma once

#include <cstdint>
#include <type_traits>

#include "gradgate/export.h"

namespace gradgate {

/// What went wrong. The values are part of the ABI and of the payload header (they fit in four bits): they are never
/// renumbered and never reused.
enum class StatusCode : uint32_t {
  ok = 0,
  invalid_argument = 1,     ///< the caller's argument; nothing was read or written
  unsupported = 2,          ///< valid, but not offered by this build, codec, dtype or backend
  workspace_too_small = 3,  ///< detail(): the bytes that are needed
  payload_too_small = 4,    ///< detail(): the bytes that are needed
  bad_payload = 5,          ///< corrupt, truncated or foreign payload; detail(): a PayloadFault
  peer_mismatch = 6,        ///< ranks disagree about spec, count, dtype, step or operation
  timeout = 7,              ///< a peer did not arrive before the deadline
  peer_failed = 8,          ///< another rank reported that it could not take part
  aborted = 9,              ///< the communicator was aborted
  bad_state = 10,           ///< the object cannot do this now (see the message of the call)
  out_of_memory = 11,
  io_error = 12,
  internal = 13,
};

/// Result of every fallible call. Ignoring one is a compiler warning.
class [[nodiscard]] Status {
 public:
  constexpr Status() noexcept = default;
  constexpr Status(StatusCode code, int64_t detail = 0) noexcept : code_(code), detail_(detail) {}

  constexpr bool ok() const noexcept { return code_ == StatusCode::ok; }
  constexpr StatusCode code() const noexcept { return code_; }
  /// Meaning depends on the code: needed bytes, PayloadFault, or 0.
  constexpr int64_t detail() const noexcept { return detail_; }
  /// Static text for the code, e.g. "peer mismatch". Never null.
  GRADGATE_API const char* message() const noexcept;

  friend constexpr bool operator==(Status a, Status b) noexcept { return a.code_ == b.code_ && a.detail_ == b.detail_; }

 private:
  StatusCode code_ = StatusCode::ok;
  int64_t detail_ = 0;
};

static_assert(std::is_trivially_copyable_v<Status> && sizeof(Status) == 16);

}  // namespace gradgate

/// Returns from the enclosing function when `expression` is not ok.
#define GRADGATE_TRY(expression)                              \
  do {                                                        \
    const ::gradgate::Status gradgate_status_ = (expression); \
    if (!gradgate_status_.ok()) return gradgate_status_;      \
  } while (0)
