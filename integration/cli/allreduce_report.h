// The allreduce benchmark's output: rows in the manner of nccl-tests, a footer, and the same as JSON.
#pragma once

#include <string>

#include "integration/cli/allreduce_run.h"
#include "integration/cli/report.h"
#include "integration/cli/table.h"

namespace gradgate::cli {

class AllReduceReport {
 public:
  AllReduceReport(int ranks, DType dtype);

  /// Comment lines and column names.
  std::string header(const std::string& where) const;
  /// Adds a case; returns its row.
  std::string add(const NamedCodec& codec, size_t count, const AllReduceCase& measured);
  /// "# Out of bounds values : 0 OK" and the average bus bandwidth.
  std::string footer() const;

  const Json& results() const { return results_; }
  /// {"out_of_bounds": …, "avg_busbw_gb_s": …}
  Json summary() const;
  /// kExitFailed when any value was wrong.
  int exit_code() const;

 private:
  double average_busbw() const;

  int ranks_;
  DType dtype_;
  Table table_;
  Json results_ = Json::array();
  uint64_t wrong_ = 0;
  double busbw_sum_ = 0;
  uint64_t busbw_rows_ = 0;
};

}  // namespace gradgate::cli
