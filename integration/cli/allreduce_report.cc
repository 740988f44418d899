#include "integration/cli/allreduce_report.h"

#include <cmath>
#include <limits>

#include "integration/cli/bandwidth.h"
#include "integration/cli/error.h"
#include "integration/cli/quantity.h"
#include "integration/cli/statistics.h"

namespace gradgate::cli {
namespace {

// nccl-tests' names.
// As in nccl-tests.
const char* type_name(DType dtype) { return dtype == DType::bf16 ? "bfloat16" : dtype == DType::f16 ? "half" : "float"; }

double ratio_of(uint64_t bytes, uint64_t wire_bytes) {
  return wire_bytes == 0 ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(bytes) / static_cast<double>(wire_bytes);
}

Json in_us(const std::vector<double>& seconds) {
  Json list = Json::array();
  for (const double s : seconds) list.push_back(number(s * 1e6));
  return list;
}

}  // namespace

AllReduceReport::AllReduceReport(int ranks, DType dtype)
    : ranks_(ranks),
      dtype_(dtype),
      table_({{"size", "B", 11},
              {"count", "elements", 11},
              {"type", "", 8},
              {"codec", "", 18, true},
              {"time", "us", 10},
              {"algbw", "GB/s", 8},
              {"busbw", "GB/s", 8},
              {"ratio", "", 7},
              {"wire", "B", 11},
              {"maxerr", "", 9},
              {"#wrong", "", 7}}) {}

std::string AllReduceReport::header(const std::string& where) const {
  return comment("gradgate allreduce: average over ranks, one exchange per codec, every result verified\n" + where +
                 "\n"
                 "size and bandwidths are those of the uncompressed vector, GB = 1e9 B; time is the median over iterations of\n"
                 "the slowest rank; busbw = algbw * 2(n-1)/n; wire stands in for size on the link, ratio = size / wire;\n"
                 "maxerr is against the exact average; #wrong counts values outside the codec's bound, different between\n"
                 "ranks, or different from the scalar reference") +
         comment("") + table_.header();
}

std::string AllReduceReport::add(const NamedCodec& codec, size_t count, const AllReduceCase& measured) {
  const uint64_t bytes = count * dtype_bytes(dtype_);
  const double time_s = median(measured.time_s), ratio = ratio_of(bytes, measured.wire_bytes);
  const Rates rate = rates(RateOf::all_reduce, bytes, ranks_, time_s);
  wrong_ += measured.wrong;
  if (std::isfinite(rate.busbw_gb_s)) {
    busbw_sum_ += rate.busbw_gb_s;
    ++busbw_rows_;
  }
  results_.push_back({{"size_bytes", bytes},
                      {"count", count},
                      {"type", type_name(dtype_)},
                      {"codec", codec.text},
                      {"ranks", ranks_},
                      {"time_us", number(time_s * 1e6)},
                      {"time_min_us", number(quantile(measured.time_s, 0) * 1e6)},
                      {"time_p99_us", number(quantile(measured.time_s, 0.99) * 1e6)},
                      {"times_us", in_us(measured.time_s)},
                      {"encode_us", number(median(measured.encode_s) * 1e6)},
                      {"transfer_us", number(median(measured.transfer_s) * 1e6)},
                      {"decode_us", number(median(measured.decode_s) * 1e6)},
                      {"algbw_gb_s", number(rate.algbw_gb_s)},
                      {"busbw_gb_s", number(rate.busbw_gb_s)},
                      {"ratio", number(ratio)},
                      {"wire_bytes", measured.wire_bytes},
                      {"max_error", number(measured.max_error)},
                      {"wrong", measured.wrong}});
  return table_.row({std::to_string(bytes), std::to_string(count), type_name(dtype_), codec.text, format_number(time_s * 1e6, 4), format_number(rate.algbw_gb_s, 3),
                     format_number(rate.busbw_gb_s, 3), format_number(ratio, 3), std::to_string(measured.wire_bytes), format_number(measured.max_error, 2),
                     std::to_string(measured.wrong)});
}

double AllReduceReport::average_busbw() const {
  return busbw_rows_ == 0 ? std::numeric_limits<double>::quiet_NaN() : busbw_sum_ / static_cast<double>(busbw_rows_);
}

std::string AllReduceReport::footer() const {
  return comment("Out of bounds values : " + std::to_string(wrong_) + (wrong_ == 0 ? " OK" : " FAILED") + "\nAvg bus bandwidth    : " + format_number(average_busbw(), 4) +
                 " GB/s");
}

Json AllReduceReport::summary() const { return {{"out_of_bounds", wrong_}, {"avg_busbw_gb_s", number(average_busbw())}}; }

int AllReduceReport::exit_code() const { return wrong_ == 0 ? kExitOk : kExitFailed; }

}  // namespace gradgate::cli
