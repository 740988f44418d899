// Gradients in files: NumPy's .npy (versions 1.0 and 2.0, C order, '<f4' or '<f8') and headerless little-endian f32 (".f32", ".raw", ".bin").
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gradgate::cli {

struct ArrayFile {
  std::vector<size_t> shape;   ///< empty: a scalar; a raw file is one dimension
  std::vector<float> values;   ///< product of the shape
  bool is_npy = false;
  bool narrowed = false;       ///< '<f8' values were rounded to f32
};

/// Reads by suffix. Throws UsageError naming the file and what is wrong: not found, truncated, trailing bytes, another dtype (and the accepted ones), Fortran
/// order, an f8 value that does not fit in f32.
ArrayFile read_array(const std::string& path);
/// Parses the bytes of a .npy file; `name` is used in errors.
ArrayFile parse_npy(std::span<const char> bytes, const std::string& name);

/// Writes .npy ('<f4', version 1.0) or raw f32 by suffix. Atomic: a temporary file beside `path` is renamed over it, so a reader never sees half
/// a file and a failure leaves what was there. Throws RunError.
void write_array(const std::string& path, const std::vector<size_t>& shape, std::span<const float> values);
/// The header and values of a .npy file.
std::string format_npy_header(const std::vector<size_t>& shape);

/// Whether the suffix names a format above; UsageError naming `option` otherwise.
void check_array_suffix(const std::string& option, const std::string& path);

}  // namespace gradgate::cli
