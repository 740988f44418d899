#include "gate/log.h"

#include <charconv>
#include <cmath>
#include <cstring>

namespace gradgate::gate {

TextBuilder& TextBuilder::text(std::string_view s) noexcept {
  const size_t room = capacity_ - 1 - size_;
  const size_t n = s.size() <= room ? s.size() : room;
  overflowed_ = overflowed_ || n < s.size();
  std::memcpy(buffer_ + size_, s.data(), n);
  size_ += n;
  buffer_[size_] = '\0';
  return *this;
}

TextBuilder& TextBuilder::integer(int64_t value) noexcept {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  return text({digits, static_cast<size_t>(end - digits)});
}

TextBuilder& TextBuilder::fixed(double value, int decimals) noexcept {
  if (!std::isfinite(value)) return text("?");
  char digits[400];  // the largest double has 309 digits before the point
  const auto result = std::to_chars(digits, digits + sizeof(digits), value, std::chars_format::fixed, decimals);
  return result.ec == std::errc{} ? text({digits, static_cast<size_t>(result.ptr - digits)}) : text("?");
}

TextBuilder& TextBuilder::milliseconds(double seconds) noexcept {
  const double ms = seconds * 1e3, size = std::fabs(ms);
  return fixed(ms, size >= 99.95 ? 0 : size >= 9.995 ? 1 : size >= 0.0995 || size == 0 ? 2 : size >= 0.00995 ? 3 : 5);
}

TextBuilder& TextBuilder::bytes(double count) noexcept {
  static constexpr const char* kUnits[] = {" KiB", " MiB", " GiB", " TiB"};
  if (!(count >= 1024)) return fixed(count, 0).text(" B");
  int unit = 0;
  for (count /= 1024; count >= 1024 && unit < 3; count /= 1024) ++unit;
  return fixed(count, 1).text(kUnits[unit]);
}

JsonLine::JsonLine(std::string_view event) noexcept {
  out_.text("{\"v\":").integer(kLogVersion).text(",\"event\":");
  quoted(event);
}

void JsonLine::key(std::string_view name) noexcept {
  out_.text(",");
  quoted(name);
  out_.text(":");
}

void JsonLine::quoted(std::string_view value) noexcept {
  static constexpr char kHex[] = "0123456789abcdef";
  out_.text("\"");
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      const char escaped[2] = {'\\', c};
      out_.text({escaped, 2});
    } else if (static_cast<unsigned char>(c) < 0x20) {
      const char escaped[6] = {'\\', 'u', '0', '0', kHex[(c >> 4) & 1], kHex[c & 15]};
      out_.text({escaped, 6});
    } else {
      out_.text({&c, 1});
    }
  }
  out_.text("\"");
}

JsonLine& JsonLine::number(std::string_view name, double value) noexcept {
  key(name);
  if (!std::isfinite(value)) {
    out_.text("null");
    return *this;
  }
  char digits[40];
  const auto end = std::to_chars(digits, digits + sizeof(digits), value).ptr;
  out_.text({digits, static_cast<size_t>(end - digits)});
  return *this;
}

JsonLine& JsonLine::integer(std::string_view name, int64_t value) noexcept {
  key(name);
  out_.integer(value);
  return *this;
}

JsonLine& JsonLine::boolean(std::string_view name, bool value) noexcept {
  key(name);
  out_.text(value ? "true" : "false");
  return *this;
}

JsonLine& JsonLine::string(std::string_view name, std::string_view value) noexcept {
  key(name);
  quoted(value);
  return *this;
}

JsonLine& JsonLine::open_array(std::string_view name) noexcept {
  key(name);
  out_.text("[");
  first_item_ = true;
  return *this;
}

JsonLine& JsonLine::item(std::string_view value) noexcept {
  if (!first_item_) out_.text(",");
  first_item_ = false;
  quoted(value);
  return *this;
}

JsonLine& JsonLine::close_array() noexcept {
  out_.text("]");
  return *this;
}

void JsonLine::write(const LogSink& sink) noexcept {
  out_.text("}");
  if (sink.write != nullptr && !out_.overflowed()) sink.write(sink.context, out_.c_str(), out_.size());
}

void log_link(const LogSink& sink, std::string_view source, const LinkModel& link, const Fit* fits) noexcept {
  if (sink.write == nullptr) return;
  static constexpr const char* kNames[kProbeCollectives] = {"all_reduce", "all_gather", "all_to_all"};
  const LinearCost lines[kProbeCollectives] = {link.all_reduce, link.all_gather, link.all_to_all};
  for (int i = 0; i < kProbeCollectives; ++i) {
    JsonLine record("link");
    record.string("source", source).string("collective", kNames[i]).integer("ranks", link.ranks);
    record.boolean("usable", link.usable())
        .number("fixed_s", lines[i].fixed_s)
        .number("per_byte_s", lines[i].per_byte_s);
    record.number("max_error", fits != nullptr ? fits[i].max_error : std::nan(""));
    record.integer("dropped", fits != nullptr ? fits[i].dropped : -1);
    record.write(sink);
  }
}

}  // namespace gradgate::gate
