// The 1,797 handwritten digits that the demo trains on (README.md here: source, licence, format). They are compiled into the library,
// so a program needs no data path at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace gradgate::digits {

constexpr size_t kPixels = 64;   // 8 x 8, row by row
constexpr size_t kClasses = 10;
constexpr uint8_t kMaxPixel = 16;

struct Dataset {
  std::vector<uint8_t> pixels;  // count() x kPixels, each 0..kMaxPixel
  std::vector<uint8_t> labels;  // count(), each 0..9

  size_t count() const noexcept { return labels.size(); }
  std::span<const uint8_t> image(size_t i) const noexcept { return {pixels.data() + i * kPixels, kPixels}; }
};

// The packed file as it was when the library was built.
std::span<const uint8_t> packed_digits() noexcept;

// Unpacks a file of that format. Nothing where magic, geometry, length, checksum, a pixel or a label is wrong.
std::optional<Dataset> unpack_digits(std::span<const uint8_t> packed);

// The embedded digits, unpacked on first use and shared by all threads. Empty only if the build embedded a damaged file.
const Dataset& dataset();

}  // namespace gradgate::digits
