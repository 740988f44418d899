// Rates as nccl-tests defines them. Bytes are those of the uncompressed vector, GB is 1e9.
#pragma once

#include <cstdint>

namespace gradgate::cli {

enum class RateOf : uint8_t { all_reduce, all_gather, reduce_scatter };

struct Rates {
  double algbw_gb_s = 0;
  double busbw_gb_s = 0;
};

/// algbw = bytes / seconds; busbw = algbw times what a ring moves for each byte of the result: 2(n−1)/n for all_reduce, (n−1)/n for the other two
/// (`bytes` is the whole vector). One rank has busbw 0. NaN (printed as n/a, null in JSON) where the time is zero, negative or not finite.
Rates rates(RateOf collective, uint64_t bytes, int ranks, double seconds) noexcept;

/// Link bandwidth (bytes per second of one rank, one way) below which compressed two_shot beats a dense exchange, both bandwidth-bound:
///   codec_s = 2(n−1)/n · (dense_bytes − wire_bytes) / β   ⇔   β = 2(n−1)/n · (dense_bytes − wire_bytes) / codec_s
/// `codec_s` is the time the codec adds. +Inf: pays on every link (no added time, fewer bytes); 0: on none.
double break_even_bandwidth(uint64_t dense_bytes, uint64_t wire_bytes, int ranks, double codec_s) noexcept;

}  // namespace gradgate::cli
