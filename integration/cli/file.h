// Files that appear whole or not at all.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace gradgate::cli {

/// Writes `parts`, one after the other, into a temporary file beside `path` and renames it: readers see the old file or
/// the new one, and of two writers one wins. Throws RunError naming `path`.
void write_whole(const std::string& path, std::initializer_list<std::string_view> parts);

}  // namespace gradgate::cli
