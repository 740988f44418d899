// Text without surprises: a bounded builder whose numbers never depend on the locale, and the sink that log lines go
// to. The records themselves are described field by field in docs/gate.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "gate/cost.h"
#include "gate/fit.h"
#include "gradgate/types.h"

namespace gradgate::gate {

/// Receives one log line (no newline; valid only during the call).
struct LogSink {
  void* context = nullptr;
  void (*write)(void* context, const char* line, size_t size) = nullptr;
};

/// Builds a text in the caller's buffer, always terminated. What does not fit is cut and overflowed() says so.
class TextBuilder {
 public:
  TextBuilder(char* buffer, size_t capacity) noexcept : buffer_(buffer), capacity_(capacity) { buffer_[0] = '\0'; }

  TextBuilder& text(std::string_view s) noexcept;
  TextBuilder& integer(int64_t value) noexcept;
  /// Fixed notation with `decimals` digits after the point; "nan" and "inf" are written "?".
  TextBuilder& fixed(double value, int decimals) noexcept;
  /// Milliseconds of a time in seconds, with about three digits and no unit: 42.4, 1.43, 0.081.
  TextBuilder& milliseconds(double seconds) noexcept;
  /// 512 B, 25.0 MiB, 1.5 GiB.
  TextBuilder& bytes(double count) noexcept;

  size_t size() const noexcept { return size_; }
  bool overflowed() const noexcept { return overflowed_; }
  const char* c_str() const noexcept { return buffer_; }

 private:
  char* buffer_;
  size_t capacity_, size_ = 0;
  bool overflowed_ = false;
};

/// One strict JSON object per line. Numbers are shortest round-trip decimals; NaN and infinities are null.
class JsonLine {
 public:
  static constexpr size_t kCapacity = 2048;

  /// Starts {"v":1,"event":event.
  explicit JsonLine(std::string_view event) noexcept;
  JsonLine& number(std::string_view key, double value) noexcept;
  JsonLine& integer(std::string_view key, int64_t value) noexcept;
  JsonLine& boolean(std::string_view key, bool value) noexcept;
  JsonLine& string(std::string_view key, std::string_view value) noexcept;
  /// Opens an array of strings; item() adds to it, close_array() ends it.
  JsonLine& open_array(std::string_view key) noexcept;
  JsonLine& item(std::string_view value) noexcept;
  JsonLine& close_array() noexcept;
  /// Ends the object and hands it to the sink. A line that did not fit is not written: half an object is no record.
  void write(const LogSink& sink) noexcept;

 private:
  void key(std::string_view name) noexcept;
  void quoted(std::string_view value) noexcept;

  char buffer_[kCapacity];
  TextBuilder out_{buffer_, kCapacity};
  bool first_item_ = true;
};

/// Version of the record schema ("v").
inline constexpr int kLogVersion = 1;

/// Records a link model: "source" (a profile's or interconnect's name, or "probe"), and per collective the line;
/// `fits`, when given, are the three fits it came from (errors and dropped points).
void log_link(const LogSink& sink, std::string_view source, const LinkModel& link, const Fit* fits) noexcept;

}  // namespace gradgate::gate
