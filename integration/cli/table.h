// Tables in the manner of nccl-tests: right-aligned columns, every line that is not data starts with '#'. Rows can be printed as they come
// (fixed widths) because a benchmark's user wants to see the first size before the last one is measured.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace gradgate::cli {

struct Column {
  std::string name;
  std::string unit;  ///< printed under the name in parentheses; may be empty
  int width = 8;     ///< cells are padded to it; a longer cell is printed whole
  bool left = false;
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// Two comment lines: names and units.
  std::string header() const;
  /// One data line. `cells` may be shorter than the columns.
  std::string row(const std::vector<std::string>& cells) const;

 private:
  std::string line(const std::vector<std::string>& cells, char first) const;
  std::vector<Column> columns_;
};

/// "# " before every line of `text`, with a newline at the end.
std::string comment(const std::string& text);

}  // namespace gradgate::cli
