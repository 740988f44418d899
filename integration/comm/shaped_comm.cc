// A communicator that makes its collectives last as long as they would on a slower link. Data moves through the inner
// communicator; what is emulated is time, really (sleeping) or on a virtual clock.
#include <time.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/prctl.h>
#else
#include <thread>
#endif

#include "gate/cost.h"
#include "gradgate/communicator.h"

namespace gradgate {
namespace comm {
namespace {

/// Sleeps until a point on the steady clock, with the timer slack of the calling thread narrowed while it lasts: the
/// default of 50 us would be as long as many of the transfers emulated here.
void sleep_until(std::chrono::steady_clock::time_point end) noexcept {
#if defined(__linux__)
  const int slack = prctl(PR_GET_TIMERSLACK);
  prctl(PR_SET_TIMERSLACK, 1000UL);
  // libstdc++ and libc++ read the steady clock from CLOCK_MONOTONIC.
  const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(end.time_since_epoch()).count();
  const timespec until{static_cast<time_t>(ns / 1000000000), static_cast<long>(ns % 1000000000)};
  while (std::chrono::steady_clock::now() < end) {
    if (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == 0) break;
  }
  if (slack > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack));
#else
  std::this_thread::sleep_until(end);
#endif
}

class ShapedRank final : public Communicator {
 public:
  /// Allocates: may throw std::bad_alloc.
  ShapedRank(Communicator& inner, LinkSpec link, ClockKind kind, std::shared_ptr<double> clock)
      : inner_(inner), link_(link), kind_(kind), clock_(std::move(clock)), clocks_(static_cast<size_t>(inner.size())) {
    const double bits_per_s = 8 * link.beta_bytes_per_s;
    const bool giga = bits_per_s >= 1e9;
    description_.format("%s, link %g %s %g us (emulated%s)", inner.description(), bits_per_s / (giga ? 1e9 : 1e6),
                        giga ? "Gbit/s" : "Mbit/s", link.alpha_s * 1e6,
                        kind == ClockKind::virtual_time ? ", virtual clock" : "");
  }
  /// For communicators made by split(): keeps the inner one alive.
  void own(std::unique_ptr<Communicator> inner) noexcept { owned_ = std::move(inner); }

  int rank() const noexcept override { return inner_.rank(); }
  int size() const noexcept override { return inner_.size(); }
  bool supports(Collective op, DType dtype) const noexcept override { return inner_.supports(op, dtype); }
  const char* description() const noexcept override { return description_.text; }

  Status all_reduce_sum(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                        Deadline deadline) noexcept override {
    const double bytes = static_cast<double>(count) * static_cast<double>(dtype_bytes(dtype));
    const double model = gate::ring_allreduce(link_.alpha_s, link_.beta_bytes_per_s, size(), bytes);
    return paced(Collective::all_reduce, model, deadline,
                 [&] { return inner_.all_reduce_sum(send, recv, count, dtype, stream, deadline); });
  }
  Status all_gather(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                    Deadline deadline) noexcept override {
    return paced(Collective::all_gather, pass(count, dtype), deadline,
                 [&] { return inner_.all_gather(send, recv, count, dtype, stream, deadline); });
  }
  Status all_to_all(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                    Deadline deadline) noexcept override {
    return paced(Collective::all_to_all, pass(count, dtype), deadline,
                 [&] { return inner_.all_to_all(send, recv, count, dtype, stream, deadline); });
  }
  Status reduce_scatter_sum(const void* send, void* recv, size_t count, DType dtype, Stream stream,
                            Deadline deadline) noexcept override {
    return paced(Collective::reduce_scatter, pass(count, dtype), deadline,
                 [&] { return inner_.reduce_scatter_sum(send, recv, count, dtype, stream, deadline); });
  }
  Status broadcast(void* data, size_t count, DType dtype, int root, Stream stream,
                   Deadline deadline) noexcept override {
    const double bytes = static_cast<double>(count) * static_cast<double>(dtype_bytes(dtype));
    return paced(Collective::broadcast, tree(bytes), deadline,
                 [&] { return inner_.broadcast(data, count, dtype, root, stream, deadline); });
  }
  Status barrier(Stream stream, Deadline deadline) noexcept override {
    return paced(Collective::barrier, tree(0), deadline, [&] { return inner_.barrier(stream, deadline); });
  }

  // Set-up, not a transfer: takes no time on the emulated link. The parts share the rank's clock.
  Status split(int color, int key, std::unique_ptr<Communicator>* out, Deadline deadline) noexcept override {
    std::unique_ptr<Communicator> part;
    const Status status = inner_.split(color, key, out == nullptr ? nullptr : &part, deadline);
    if (!status.ok()) return keep(status, "split");
    try {
      auto shaped = std::make_unique<ShapedRank>(*part, link_, kind_, clock_);
      shaped->own(std::move(part));
      *out = std::move(shaped);
      return {};
    } catch (...) {
      inner_.abort();  // the peers of this part would wait for a rank that is not there
      return StatusCode::out_of_memory;
    }
  }
  void abort() noexcept override { inner_.abort(); }

  double now() const noexcept override { return virtual_clock() ? *clock_ : inner_.now(); }
  void advance(double seconds) noexcept override {
    if (!virtual_clock()) return inner_.advance(seconds);
    if (seconds > 0) *clock_ += seconds;
  }
  bool virtual_clock() const noexcept override { return kind_ == ClockKind::virtual_time; }
  const char* last_error() const noexcept override { return error_.text; }

 private:
  /// all_gather, all_to_all and reduce_scatter: one pass around the ring with the blocks of all ranks.
  double pass(size_t count, DType dtype) const noexcept {
    const double bytes =
        static_cast<double>(size()) * static_cast<double>(count) * static_cast<double>(dtype_bytes(dtype));
    return gate::ring_pass(link_.alpha_s, link_.beta_bytes_per_s, size(), bytes);
  }
  /// broadcast and barrier: a binomial tree, one message per level.
  double tree(double bytes) const noexcept {
    return std::bit_width(static_cast<unsigned>(size() - 1)) * gate::p2p(link_.alpha_s, link_.beta_bytes_per_s, bytes);
  }

  template <class Run>
  Status paced(Collective op, double model_s, Deadline deadline, Run run) noexcept {
    const char* name = collective_name(op);
    if (size() == 1) return keep(run(), name);
    if (virtual_clock()) {
      // The operation itself comes first, so that a rank that is missing or disagrees is reported with its name. Only
      // then are the clocks exchanged: the operation began when the last rank was ready for it.
      GRADGATE_TRY(keep(run(), name));
      GRADGATE_TRY(keep(inner_.all_gather(clock_.get(), clocks_.data(), 1, DType::f64, Stream{}, deadline), name));
      *clock_ = *std::max_element(clocks_.begin(), clocks_.end()) + model_s;
      return {};
    }
    GRADGATE_TRY(keep(inner_.barrier(Stream{}, deadline), name));
    const auto start = std::chrono::steady_clock::now();
    GRADGATE_TRY(keep(run(), name));
    // A year is as good as for ever, and still far from the end of the clock.
    const std::chrono::duration<double> model(std::min(model_s, 3.2e7));
    sleep_until(start + std::chrono::ceil<std::chrono::steady_clock::duration>(model));
    return {};
  }

  /// Keeps the text of the first failure, with the operation the caller asked for in front.
  Status keep(Status status, const char* name) noexcept {
    if (!status.ok() && error_.text[0] == '\0') error_.format("%s on an emulated link: %s", name, inner_.last_error());
    return status;
  }

  Communicator& inner_;
  std::unique_ptr<Communicator> owned_;
  LinkSpec link_;
  ClockKind kind_;
  std::shared_ptr<double> clock_;  ///< virtual time of this rank, shared with its splits
  std::vector<double> clocks_;     ///< of all ranks, in one exchange
  Message description_;
  Message error_;
};

}  // namespace
}  // namespace comm

Status make_shaped(Communicator& inner, LinkSpec link, ClockKind clock, std::unique_ptr<Communicator>* out) noexcept {
  const bool valid = std::isfinite(link.alpha_s) && link.alpha_s >= 0 && std::isfinite(link.beta_bytes_per_s) &&
                     link.beta_bytes_per_s > 0;
  if (out == nullptr || !valid || (clock != ClockKind::real && clock != ClockKind::virtual_time))
    return StatusCode::invalid_argument;
  if (clock == ClockKind::virtual_time && !inner.supports(Collective::all_gather, DType::f64))
    return StatusCode::unsupported;
  try {
    *out = std::make_unique<comm::ShapedRank>(inner, link, clock, std::make_shared<double>(0.0));
    return {};
  } catch (...) {
    return StatusCode::out_of_memory;
  }
}

}  // namespace gradgate
