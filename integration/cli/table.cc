#include "integration/cli/table.h"

namespace gradgate::cli {

std::string Table::line(const std::vector<std::string>& cells, char first) const {
  std::string text(1, first);
  for (size_t i = 0; i < columns_.size() && i < cells.size(); ++i) {
    const size_t width = static_cast<size_t>(columns_[i].width);
    const size_t pad = cells[i].size() < width ? width - cells[i].size() : 0;
    text += ' ';
    if (columns_[i].left) {
      text += cells[i] + std::string(pad, ' ');
    } else {
      text += std::string(pad, ' ') + cells[i];
    }
  }
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text + '\n';
}

std::string Table::header() const {
  std::vector<std::string> names, units;
  bool any_unit = false;
  for (const Column& column : columns_) {
    names.push_back(column.name);
    units.push_back(column.unit.empty() ? "" : "(" + column.unit + ")");
    any_unit = any_unit || !column.unit.empty();
  }
  return line(names, '#') + (any_unit ? line(units, '#') : "");
}

std::string Table::row(const std::vector<std::string>& cells) const { return line(cells, ' '); }

std::string comment(const std::string& text) {
  std::string out = text.empty() ? "#\n" : "";
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = text.find('\n', begin);
    const std::string one = text.substr(begin, end == std::string::npos ? end : end - begin);
    out += one.empty() ? "#\n" : "# " + one + "\n";
    if (end == std::string::npos) break;
    begin = end + 1;
  }
  return out;
}

}  // namespace gradgate::cli
