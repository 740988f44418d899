// Texts of codes and enumerations, and the bounded message.
#include "gradgate/status.h"

#include <cstdarg>
#include <cstdio>

#include "gradgate/codec.h"
#include "gradgate/types.h"

namespace gradgate {

const char* Status::message() const noexcept {
  switch (code_) {
    case StatusCode::ok:
      return "ok";
    case StatusCode::invalid_argument:
      return "invalid argument";
    case StatusCode::unsupported:
      return "unsupported";
    case StatusCode::workspace_too_small:
      return "workspace too small";
    case StatusCode::payload_too_small:
      return "payload buffer too small";
    case StatusCode::bad_payload:
      return "bad payload";
    case StatusCode::peer_mismatch:
      return "peer mismatch";
    case StatusCode::timeout:
      return "timeout";
    case StatusCode::peer_failed:
      return "peer failed";
    case StatusCode::aborted:
      return "aborted";
    case StatusCode::bad_state:
      return "bad state";
    case StatusCode::out_of_memory:
      return "out of memory";
    case StatusCode::io_error:
      return "input or output error";
    case StatusCode::internal:
      return "internal error";
  }
  return "unknown status";
}

const char* dtype_name(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::f64:
      return "f64";
    case DType::u8:
      return "u8";
  }
  return "?";
}

const char* exchange_name(Exchange exchange) noexcept {
  switch (exchange) {
    case Exchange::all_reduce:
      return "all_reduce";
    case Exchange::two_shot:
      return "two_shot";
    case Exchange::all_gather:
      return "all_gather";
    case Exchange::hierarchical:
      return "hierarchical";
  }
  return "?";
}

const char* payload_fault_name(PayloadFault fault) noexcept {
  switch (fault) {
    case PayloadFault::none:
      return "none";
    case PayloadFault::size:
      return "size";
    case PayloadFault::alignment:
      return "alignment";
    case PayloadFault::magic:
      return "magic";
    case PayloadFault::version:
      return "version";
    case PayloadFault::codec:
      return "codec";
    case PayloadFault::value_dtype:
      return "value dtype";
    case PayloadFault::count:
      return "count";
    case PayloadFault::parameter:
      return "parameter";
    case PayloadFault::flags:
      return "flags";
    case PayloadFault::check:
      return "check";
    case PayloadFault::index:
      return "index";
  }
  return "?";
}

void Message::format(const char* format, ...) noexcept {
  va_list arguments;
  va_start(arguments, format);
  if (std::vsnprintf(text, sizeof text, format, arguments) < 0) text[0] = 0;
  va_end(arguments);
}

}  // namespace gradgate
