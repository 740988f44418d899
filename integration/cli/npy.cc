#include "integration/cli/npy.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string_view>

#include "integration/cli/error.h"
#include "integration/cli/file.h"

namespace gradgate::cli {
namespace {

static_assert(std::endian::native == std::endian::little, "files are read and written in place");

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr const char* kAccepted = "accepted are '<f4' and '<f8' arrays in C order (numpy.save(path, array.astype('<f4')))";

bool ends_with(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix;
}
bool is_npy_path(std::string_view path) { return ends_with(path, ".npy"); }
bool is_raw_path(std::string_view path) { return ends_with(path, ".f32") || ends_with(path, ".raw") || ends_with(path, ".bin"); }

[[noreturn]] void refuse(const std::string& name, const std::string& why) { throw UsageError(name + ": " + why); }

// The Python dictionary of a header, as far as .npy uses it: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }.
class HeaderParser {
 public:
  HeaderParser(std::string_view text, const std::string& name) : text_(text), name_(name) {}

  struct Fields {
    std::string descr;
    bool fortran = false;
    std::vector<size_t> shape;
  };

  Fields parse() {
    Fields fields;
    bool descr = false, fortran = false, shape = false;
    expect('{');
    while (!accept('}')) {
      const std::string key = quoted();
      expect(':');
      if (key == "descr" && !descr) {
        descr = true;
        if (peek() != '\'' && peek() != '"') refuse(name_, std::string("'descr' is a structured type; ") + kAccepted);
        fields.descr = quoted();
      } else if (key == "fortran_order" && !fortran) {
        fortran = true;
        fields.fortran = boolean();
      } else if (key == "shape" && !shape) {
        shape = true;
        fields.shape = tuple();
      } else {
        refuse(name_, "unexpected key '" + key + "' in the .npy header");
      }
      if (!accept(',')) {
        expect('}');
        break;
      }
    }
    if (!descr || !fortran || !shape) refuse(name_, "the .npy header lacks descr, fortran_order or shape");
    skip();
    if (at_ != text_.size()) refuse(name_, "text after the dictionary of the .npy header");
    return fields;
  }

 private:
  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  char peek() {
    skip();
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  bool accept(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) refuse(name_, std::string("damaged .npy header: expected '") + c + "' at byte " + std::to_string(at_));
  }
  std::string quoted() {
    const char quote = peek();
    if (quote != '\'' && quote != '"') expect('\'');
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) refuse(name_, "damaged .npy header: a quote is not closed");
    const std::string value(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return value;
  }
  bool boolean() {
    skip();
    for (const auto& [word, value] : {std::pair{std::string_view("True"), true}, std::pair{std::string_view("False"), false}}) {
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return value;
      }
    }
    refuse(name_, "damaged .npy header: fortran_order is neither True nor False");
  }
  std::vector<size_t> tuple() {
    std::vector<size_t> shape;
    expect('(');
    while (!accept(')')) {
      skip();
      uint64_t extent = 0;
      const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), extent);
      if (error != std::errc{}) refuse(name_, "damaged .npy header: shape is not a tuple of integers");
      at_ = static_cast<size_t>(end - text_.data());
      shape.push_back(extent);
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return shape;
  }

  std::string_view text_;
  const std::string& name_;
  size_t at_ = 0;
};

std::vector<char> read_file(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) refuse(path, std::string("cannot be opened: ") + std::strerror(errno));
  std::vector<char> bytes;
  struct stat info;
  if (fstat(fileno(file), &info) == 0 && S_ISREG(info.st_mode)) bytes.reserve(static_cast<size_t>(info.st_size) + 1);
  char block[1 << 16];
  size_t got = 0;
  while ((got = std::fread(block, 1, sizeof block, file)) > 0) bytes.insert(bytes.end(), block, block + got);
  const bool failed = std::ferror(file) != 0;
  const int error = errno;
  std::fclose(file);
  if (failed) refuse(path, std::string("cannot be read: ") + std::strerror(error));
  return bytes;
}

size_t element_count(const std::vector<size_t>& shape, const std::string& name) {
  size_t count = 1;
  for (const size_t extent : shape) {
    if (extent != 0 && count > std::numeric_limits<size_t>::max() / 8 / extent) refuse(name, "the shape of the .npy header overflows");
    count *= extent;
  }
  return count;
}

}  // namespace

void check_array_suffix(const std::string& option, const std::string& path) {
  if (is_npy_path(path) || is_raw_path(path)) return;
  throw UsageError(option + ": '" + path + "' ends neither in .npy nor in .f32, .raw or .bin (raw little-endian f32)");
}

ArrayFile parse_npy(std::span<const char> bytes, const std::string& name) {
  const std::string_view all(bytes.data(), bytes.size());
  if (all.substr(0, kMagic.size()) != kMagic) refuse(name, "not a .npy file (the magic string is missing)");
  if (all.size() < 10) refuse(name, "truncated .npy file: no header");
  const unsigned major = static_cast<unsigned char>(all[6]);
  const auto byte = [&](size_t i) { return static_cast<size_t>(static_cast<unsigned char>(all[i])); };
  if (major != 1 && major != 2) refuse(name, ".npy version " + std::to_string(major) + " is not supported; versions 1 and 2 are");
  const size_t prefix = major == 1 ? 10 : 12;
  if (all.size() < prefix) refuse(name, "truncated .npy file: no header");
  const size_t length = major == 1 ? byte(8) | byte(9) << 8 : byte(8) | byte(9) << 8 | byte(10) << 16 | byte(11) << 24;
  if (length > all.size() - prefix) refuse(name, "truncated .npy file: the header is cut");
  const HeaderParser::Fields fields = HeaderParser(all.substr(prefix, length), name).parse();
  if (fields.descr != "<f4" && fields.descr != "<f8") refuse(name, "dtype '" + fields.descr + "' is not supported; " + kAccepted);
  if (fields.fortran && fields.shape.size() > 1) refuse(name, std::string("fortran_order is True; ") + kAccepted);

  ArrayFile array;
  array.is_npy = true;
  array.shape = fields.shape;
  const size_t count = element_count(fields.shape, name);
  const size_t width = fields.descr == "<f4" ? 4 : 8;
  const size_t have = all.size() - prefix - length;
  if (have != count * width) {
    refuse(name, (have < count * width ? "truncated .npy file: " : "bytes after the array: ") + std::to_string(have) + " bytes of values where the shape needs " +
                     std::to_string(count * width));
  }
  array.values.resize(count);
  const char* values = all.data() + prefix + length;
  if (width == 4) {
    if (count > 0) std::memcpy(array.values.data(), values, count * 4);
    return array;
  }
  for (size_t i = 0; i < count; ++i) {
    double value = 0;
    std::memcpy(&value, values + i * 8, 8);
    array.values[i] = static_cast<float>(value);
    if (std::isfinite(value) && !std::isfinite(array.values[i])) {
      refuse(name, "value " + std::to_string(i) + " does not fit in f32, which codecs take");
    }
  }
  array.narrowed = true;
  return array;
}

ArrayFile read_array(const std::string& path) {
  const std::vector<char> bytes = read_file(path);
  if (is_npy_path(path)) return parse_npy(bytes, path);
  if (bytes.size() % 4 != 0) refuse(path, "has " + std::to_string(bytes.size()) + " bytes, which is not a whole number of f32 values");
  ArrayFile array;
  array.shape = {bytes.size() / 4};
  array.values.resize(bytes.size() / 4);
  if (!bytes.empty()) std::memcpy(array.values.data(), bytes.data(), bytes.size());
  return array;
}

std::string format_npy_header(const std::vector<size_t>& shape) {
  std::string text = "{'descr': '<f4', 'fortran_order': False, 'shape': (";
  for (size_t i = 0; i < shape.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  text += shape.size() == 1 ? ",), }" : "), }";
  while ((10 + text.size() + 1) % 64 != 0) text += ' ';  // NumPy wants the values aligned to 64
  text += '\n';
  std::string header(kMagic);
  header += '\x01';
  header += '\x00';
  header += static_cast<char>(text.size() & 0xff);
  header += static_cast<char>(text.size() >> 8);
  return header + text;
}

void write_array(const std::string& path, const std::vector<size_t>& shape, std::span<const float> values) {
  const std::string header = is_npy_path(path) ? format_npy_header(shape) : std::string();
  write_whole(path, {header, {reinterpret_cast<const char*>(values.data()), values.size_bytes()}});
}

}  // namespace gradgate::cli
