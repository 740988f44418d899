#include "integration/comm/thread_hub.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "integration/comm/rank_sum.h"
#include "kernels/cpu/float_env.h"

namespace gradgate::comm {
namespace {

/// Up to this many bytes over all ranks the last rank to arrive does all the work: waking the others twice would cost
/// more.
constexpr size_t kSmallBytes = 64 * 1024;
/// Slices of an all-reduce begin on multiples of this many elements, so that no two ranks write to one cache line.
constexpr size_t kSliceUnit = 64;

void copy_block(void* to, const void* from, size_t bytes) noexcept {
  if (bytes != 0 && to != from) std::memcpy(to, from, bytes);
}

}  // namespace

const char* call_name(Collective op) noexcept { return op == Collective::none ? "split" : collective_name(op); }

/// Counts the ranks inside meet(). Lives inside the critical section: it is built after the lock and destroyed before
/// it.
struct ThreadHub::Inside {
  explicit Inside(ThreadHub* hub) noexcept : hub_(hub) { ++hub_->inside_; }
  ~Inside() {
    if (--hub_->inside_ == 0 && !hub_->failure_.ok()) hub_->changed_.notify_all();  // close() may be waiting for this
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  ThreadHub* hub_;
};

ThreadHub::ThreadHub(int ranks)
    : calls_(static_cast<size_t>(ranks)),
      sends_(calls_.size()),
      recvs_(calls_.size()),
      present_(calls_.size()),
      children_(calls_.size()) {}

Status ThreadHub::meet(int rank, const Call& call, Deadline deadline, Message* text) noexcept {
  const char* op = call_name(call.op);
  const Clock::time_point since = Clock::now();
  std::unique_lock lock(mutex_);
  const Inside inside(this);
  if (!failure_.ok()) return report(op, since, false, text);

  const auto me = static_cast<size_t>(rank);
  const uint64_t turn = opened_;
  calls_[me] = call;
  sends_[me] = call.send;
  recvs_[me] = call.recv;
  present_[me] = 1;
  const bool last = ++arrived_ == size();
  if (last) {
    if (Message why; !agree(&why)) {
      reason_ = why;
      fail(StatusCode::peer_mismatch, op);
      return report(op, since, true, text);
    }
    if (call.op == Collective::none && !make_children()) {
      reason_.format("no memory for the new communicators");
      fail(StatusCode::out_of_memory, op);
      return report(op, since, true, text);
    }
    arrived_ = 0;
    std::fill(present_.begin(), present_.end(), char{0});
    alone_ = small();
    ++opened_;
    if (!alone_) changed_.notify_all();
  } else {
    const auto ready = [&] {
      return closed_ > turn || (opened_ > turn && !alone_) || (opened_ == turn && !failure_.ok());
    };
    if (deadline.at == Clock::time_point::max()) {
      changed_.wait(lock, ready);
    } else if (!changed_.wait_until(lock, deadline.at, ready)) {
      if (opened_ == turn) {
        list_missing(&reason_);
        fail(StatusCode::timeout, op);
      } else {
        changed_.wait(lock, ready);  // everyone has arrived: what is left is copying, which ends
      }
    }
    if (opened_ == turn) return report(op, since, true, text);
    if (closed_ > turn) return {};
  }

  // All ranks are here. From now on neither a deadline nor abort() lets anyone leave before all data has been moved.
  lock.unlock();
  const int parts = alone_ ? size() : 1;
  for (int part = 0; part < parts; ++part) move(alone_ ? part : rank);
  lock.lock();
  finished_ += parts;
  if (finished_ == size()) {
    finished_ = 0;
    ++closed_;
    changed_.notify_all();
  } else {
    changed_.wait(lock, [&] { return closed_ > turn; });
  }
  return {};
}

ThreadHub::Child ThreadHub::take_child(int rank) noexcept {
  const std::lock_guard lock(mutex_);
  return std::move(children_[static_cast<size_t>(rank)]);
}

Status ThreadHub::refuse(int rank, const char* op, Status own, const char* reason, Message* text) noexcept {
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return report(op, Clock::now(), false, text);
  reason_.format("rank %d: %s", rank, reason);
  fail(StatusCode::peer_failed, op);
  if (text->text[0] == '\0') text->format("%s: %s: %s", op, own.message(), reason);
  return own;
}

void ThreadHub::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return;
  reason_.format("abort() was called");
  fail(StatusCode::aborted, "abort");
}

void ThreadHub::close() noexcept {
  abort();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return inside_ == 0; });
}

void ThreadHub::fail(Status status, const char* op) noexcept {
  failure_ = status;
  failed_op_ = op;
  changed_.notify_all();
}

Status ThreadHub::report(const char* op, Clock::time_point since, bool waited, Message* text) const noexcept {
  if (text->text[0] != '\0') return failure_;  // this rank knows already: the first report stays
  if (waited) {
    const double seconds = std::chrono::duration<double>(Clock::now() - since).count();
    text->format("%s: %s after %.3f s: %s", op, failure_.message(), seconds, reason_.text);
  } else {
    text->format("%s: not started, the communicator failed before (%s: %s: %s)", op, failed_op_, failure_.message(),
                 reason_.text);
  }
  return failure_;
}

bool ThreadHub::agree(Message* why) const noexcept {
  const Call& a = calls_[0];
  for (size_t r = 1; r < calls_.size(); ++r) {
    const Call& b = calls_[r];
    if (b.op != a.op) {
      why->format("rank %zu called %s, rank 0 called %s", r, call_name(b.op), call_name(a.op));
    } else if (b.count != a.count) {
      why->format("rank %zu passed count %zu, rank 0 passed %zu", r, b.count, a.count);
    } else if (b.dtype != a.dtype) {
      why->format("rank %zu passed dtype %s, rank 0 passed %s", r, dtype_name(b.dtype), dtype_name(a.dtype));
    } else if (b.root != a.root) {
      why->format("rank %zu passed root %d, rank 0 passed %d", r, b.root, a.root);
    } else {
      continue;
    }
    return false;
  }
  return true;
}

void ThreadHub::list_missing(Message* why) const noexcept {
  char list[200] = {};
  size_t length = 0, missing = 0;
  for (size_t r = 0; r < present_.size(); ++r) {
    if (present_[r]) continue;
    if (++missing > 8) continue;  // eight names are enough to find the machine; the rest is counted
    length +=
        static_cast<size_t>(std::snprintf(list + length, sizeof list - length, "%s%zu", missing == 1 ? "" : ", ", r));
  }
  if (missing > 8) std::snprintf(list + length, sizeof list - length, " and %zu more", missing - 8);
  why->format("%s %s had not arrived", missing == 1 ? "rank" : "ranks", list);
}

bool ThreadHub::make_children() noexcept {
  try {
    std::vector<int> order(calls_.size());
    for (size_t r = 0; r < order.size(); ++r) order[r] = static_cast<int>(r);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      const Call &x = calls_[static_cast<size_t>(a)], &y = calls_[static_cast<size_t>(b)];
      return x.color != y.color ? x.color < y.color : x.key < y.key;
    });
    for (size_t first = 0; first < order.size();) {
      const int color = calls_[static_cast<size_t>(order[first])].color;
      size_t end = first;
      while (end < order.size() && calls_[static_cast<size_t>(order[end])].color == color) ++end;
      const auto hub = std::make_shared<ThreadHub>(static_cast<int>(end - first));
      for (size_t i = first; i < end; ++i)
        children_[static_cast<size_t>(order[i])] = {hub, static_cast<int>(i - first)};
      first = end;
    }
    return true;
  } catch (...) {
    return false;
  }
}

bool ThreadHub::small() const noexcept {
  const Call& call = calls_[0];
  return call.count * dtype_bytes(call.dtype) <= kSmallBytes / calls_.size();
}

// The part of one rank in the data movement. Writes only where no other part reads or writes:
// slice `rank` of every vector in an all-reduce, this rank's receive buffer elsewhere.
void ThreadHub::move(int rank) noexcept {
  const auto me = static_cast<size_t>(rank), ranks = calls_.size();
  const Call& call = calls_[me];
  const size_t bytes = call.count * dtype_bytes(call.dtype);
  const auto block = [&](size_t r) { return static_cast<std::byte*>(call.recv) + r * bytes; };
  if (bytes == 0) return;
  const kernels::cpu::IeeeScope ieee;  // sums must not depend on which rank's thread flushes subnormals
  switch (call.op) {
    case Collective::all_reduce: {
      const size_t per_rank = ((call.count + ranks - 1) / ranks + kSliceUnit - 1) / kSliceUnit * kSliceUnit;
      const size_t first = std::min(call.count, me * per_rank), last = std::min(call.count, first + per_rank);
      sum_over_ranks(sends_, first, recvs_, first, last - first, call.dtype);
      return;
    }
    case Collective::reduce_scatter:
      sum_over_ranks(sends_, me * call.count, {&recvs_[me], 1}, 0, call.count, call.dtype);
      return;
    case Collective::all_gather:
      for (size_t r = 0; r < ranks; ++r) copy_block(block(r), sends_[r], bytes);
      return;
    case Collective::all_to_all:
      for (size_t r = 0; r < ranks; ++r)
        copy_block(block(r), static_cast<const std::byte*>(sends_[r]) + me * bytes, bytes);
      return;
    case Collective::broadcast:
      copy_block(call.recv, sends_[static_cast<size_t>(call.root)], bytes);
      return;
    case Collective::barrier:
    case Collective::none:
      return;
  }
}

}  // namespace gradgate::comm
