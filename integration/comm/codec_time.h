// How the time of an exchange is taken, the same when it runs and when it is only shadowed.
#pragma once

#include "gradgate/exchange.h"

namespace gradgate::comm {

/// Whether an exchange of this shape encodes anything.
inline bool has_codec_work(const ExchangeShape& shape) noexcept {
  const bool two_tiers = shape.candidate.exchange == Exchange::hierarchical;
  const Exchange carrier = two_tiers ? shape.candidate.between : shape.candidate.exchange;
  const bool dense = carrier == Exchange::all_reduce && shape.candidate.codec.id == CodecId::none;
  return !dense && shape.count != 0 && shape.ranks > (two_tiers && shape.ranks_per_node > 0 ? shape.ranks_per_node : 1);
}

/// What a virtual clock is charged for encoding or decoding one gradient.
inline void charge(Communicator& clock, const ExchangeShape& shape, double bytes_per_s) noexcept {
  if (!clock.virtual_clock() || !(bytes_per_s > 0) || !has_codec_work(shape)) return;
  clock.advance(static_cast<double>(shape.count) * static_cast<double>(dtype_bytes(shape.dtype)) / bytes_per_s);
}

/// Adds the time between calls to one part after the other.
class Lap {
 public:
  explicit Lap(const Communicator& clock) noexcept : clock_(clock), last_(clock.now()) {}
  void add_to(double* part) noexcept {
    const double now = clock_.now();
    *part += now - last_;
    last_ = now;
  }

 private:
  const Communicator& clock_;
  double last_;
};

}  // namespace gradgate::comm
