// Tables and JSON of `gradgate bench`.
#pragma once

#include <string>

#include "integration/cli/bench_run.h"

namespace gradgate::cli {

/// Speed, size, error and break-even bandwidth of each codec.
std::string bench_table(const BenchSetup& setup, const BenchResult& result);
/// Measured ratios to the memory floors, beside the goals of this version.
std::string floors_table(const BenchSetup& setup, const BenchResult& result);
/// {"floors": …, "results": […], "goals": […]}
Json bench_json(const BenchSetup& setup, const BenchResult& result);
/// Elements and bytes that differ from the scalar reference.
uint64_t wrong_values(const BenchResult& result);

}  // namespace gradgate::cli
