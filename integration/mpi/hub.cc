#include "integration/mpi/hub.h"

#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace gradgate::mpi {
namespace {

constexpr int kDescriptorTag = 1, kVerdictTag = 2;
/// The others wait a little longer than rank 0, so that its verdict, which names who is missing, comes first.
constexpr std::chrono::milliseconds kGrace(500);
/// How long a failing rank tries to tell the others.
constexpr std::chrono::milliseconds kTelling(500);

bool finalised() noexcept {
  int flag = 0;
  return MPI_Finalized(&flag) != MPI_SUCCESS || flag != 0;
}

}  // namespace

/// What a waiting rank does between two looks: spin, for a transfer that is nearly there; then sleep, a little at
/// first. Sleeping, not yielding: a waiting rank takes no time from those that work, and is awake soon after its turn
/// comes, on machines with more ranks than cores too. The timer slack of the thread (50 us) is narrowed meanwhile.
class Hub::Pause {
 public:
  Pause() = default;
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
  ~Pause() {
#if defined(__linux__)
    if (slack_ > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_));
#endif
  }
  void operator()() noexcept {
    constexpr unsigned kSpins = 64, kShortSleeps = 100;
    if (++looks_ <= kSpins) return;
#if defined(__linux__)
    if (slack_ == 0) {
      slack_ = prctl(PR_GET_TIMERSLACK);
      prctl(PR_SET_TIMERSLACK, 1000UL);
    }
#endif
    std::this_thread::sleep_for(std::chrono::microseconds(looks_ <= kSpins + kShortSleeps ? 10 : 50));
  }

 private:
  unsigned looks_ = 0;
  int slack_ = 0;
};

const char* call_name(Collective op) noexcept { return op == Collective::none ? "split" : collective_name(op); }

Hub::Hub(MPI_Comm comm) : comm_(comm), owner_(std::this_thread::get_id()) {
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  any_thread_ = level == MPI_THREAD_MULTIPLE;
  telling_.assign(static_cast<size_t>(size_), MPI_REQUEST_NULL);
  if (rank_ == 0) {
    descriptors_.resize(static_cast<size_t>(size_));
    gathering_.assign(static_cast<size_t>(size_), MPI_REQUEST_NULL);
    arrived_.resize(static_cast<size_t>(size_));
  }
  if (size_ > 1) MPI_Irecv(&heard_, sizeof heard_, MPI_BYTE, MPI_ANY_SOURCE, kVerdictTag, comm_, &listening_);
}

Hub::~Hub() {
  if (finalised()) return;
  if (listening_ != MPI_REQUEST_NULL) {
    MPI_Cancel(&listening_);
    MPI_Wait(&listening_, MPI_STATUS_IGNORE);
  }
  MPI_Comm_free(&comm_);
}

Status Hub::meet(const Call& call, Deadline deadline) noexcept {
  op_ = call_name(call.op);
  since_ = Clock::now();
  deadline_ = deadline;
  if (failure_ != StatusCode::ok) return report();
  if (size_ == 1) return look();
  mine_ = {static_cast<uint32_t>(call.op), static_cast<uint32_t>(call.dtype), call.root, call.count};
  Pause pause;
  return rank_ == 0 ? collect(&pause) : wait_for_verdict(&pause);
}

// Rank 0: one descriptor from everyone, then the word to start.
Status Hub::collect(Pause* pause) noexcept {
  descriptors_[0] = mine_;
  for (int r = 1; r < size_; ++r) {
    const auto slot = static_cast<size_t>(r);
    GRADGATE_TRY(
        check(MPI_Irecv(&descriptors_[slot], sizeof(Descriptor), MPI_BYTE, r, kDescriptorTag, comm_, &gathering_[slot]),
              "MPI_Irecv"));
  }
  for (int left = size_ - 1;;) {
    int arrived = 0;
    GRADGATE_TRY(
        check(MPI_Testsome(size_, gathering_.data(), &arrived, arrived_.data(), MPI_STATUSES_IGNORE), "MPI_Testsome"));
    if (arrived != MPI_UNDEFINED) left -= arrived;
    if (left == 0) break;
    GRADGATE_TRY(look());
    if (Clock::now() >= deadline_.at) {
      Message why;
      list_missing(&why);
      return fail(StatusCode::timeout, why.text);
    }
    (*pause)();
  }
  if (Message why; !agree(&why)) return fail(StatusCode::peer_mismatch, why.text);
  told_ = {};
  for (int r = 1; r < size_; ++r) {
    GRADGATE_TRY(
        check(MPI_Isend(&told_, sizeof told_, MPI_BYTE, r, kVerdictTag, comm_, &telling_[static_cast<size_t>(r)]),
              "MPI_Isend"));
  }
  return await(telling_);
}

Status Hub::wait_for_verdict(Pause* pause) noexcept {
  MPI_Request sending = MPI_REQUEST_NULL;
  GRADGATE_TRY(check(MPI_Isend(&mine_, sizeof mine_, MPI_BYTE, 0, kDescriptorTag, comm_, &sending), "MPI_Isend"));
  for (;;) {
    int sent = 0;
    if (sending != MPI_REQUEST_NULL) GRADGATE_TRY(check(MPI_Test(&sending, &sent, MPI_STATUS_IGNORE), "MPI_Test"));
    bool go = false;
    GRADGATE_TRY(receive_verdict(&go));
    if (go) return sending == MPI_REQUEST_NULL ? Status() : await({&sending, 1});
    if (deadline_.at != Clock::time_point::max() && Clock::now() >= deadline_.at + kGrace)
      return fail(StatusCode::timeout, "rank 0 had not arrived, or did not say who is missing");
    (*pause)();
  }
}

Status Hub::await(std::span<MPI_Request> requests) noexcept {
  Pause pause;
  for (;;) {
    int done = 0;
    GRADGATE_TRY(check(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE),
                       "MPI_Testall"));
    if (done) return {};
    GRADGATE_TRY(look());
    if (Clock::now() >= deadline_.at)
      return fail(StatusCode::timeout, "all ranks had begun, and the data did not come");
    pause();
  }
}

Status Hub::refuse(Collective op, Status own, const char* reason) noexcept {
  op_ = call_name(op);
  since_ = Clock::now();
  if (failure_ != StatusCode::ok) return report();
  Message why;
  why.format("rank %d: %s: %s", rank_, op_, reason);
  failure_ = StatusCode::peer_failed;
  reason_ = why;
  Verdict verdict{static_cast<uint32_t>(failure_), {}};
  std::memcpy(verdict.text, why.text, sizeof verdict.text);
  tell_all(verdict);
  error_.format("%s: %s: %s", op_, own.message(), reason);
  return own;
}

// A verdict that came while this rank was doing something else can only be a failure: rank 0 says "go" to a rank that
// waits for it, and never twice.
Status Hub::look() noexcept {
  bool go = false;
  return receive_verdict(&go);
}

Status Hub::receive_verdict(bool* go) noexcept {
  if (abort_asked_.load(std::memory_order_acquire)) return fail(StatusCode::aborted, "abort() was called");
  if (listening_ == MPI_REQUEST_NULL) return {};
  int there = 0;
  GRADGATE_TRY(check(MPI_Test(&listening_, &there, MPI_STATUS_IGNORE), "MPI_Test"));
  if (!there) return {};
  if (heard_.code != 0) {
    failure_ = static_cast<StatusCode>(heard_.code);
    heard_.text[sizeof heard_.text - 1] = '\0';
    reason_.format("%s", heard_.text);
    return report();
  }
  *go = true;
  return check(MPI_Irecv(&heard_, sizeof heard_, MPI_BYTE, MPI_ANY_SOURCE, kVerdictTag, comm_, &listening_),
               "MPI_Irecv");
}

Status Hub::check(int mpi_error, const char* function) noexcept {
  if (mpi_error == MPI_SUCCESS) return {};
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  if (MPI_Error_string(mpi_error, text, &length) != MPI_SUCCESS)
    std::snprintf(text, sizeof text, "error %d", mpi_error);
  Message why;
  why.format("rank %d: %s: %.200s", rank_, function, text);
  return fail(StatusCode::io_error, why.text);
}

Status Hub::out_of_memory() noexcept { return fail(StatusCode::out_of_memory, "no memory for the operation"); }

void Hub::abort() noexcept {
  abort_asked_.store(true, std::memory_order_release);
  if (!any_thread_ && std::this_thread::get_id() != owner_) return;  // the owner's thread tells the others
  if (size_ == 1 || finalised() || abort_told_.exchange(true)) return;
  // Small enough to be sent without the receiver's help; a buffer of its own, as the owner may be telling something.
  static const Verdict kAborted = [] {
    Verdict verdict{static_cast<uint32_t>(StatusCode::aborted), {}};
    std::snprintf(verdict.text, sizeof verdict.text, "abort() was called");
    return verdict;
  }();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    MPI_Request request = MPI_REQUEST_NULL;
    if (MPI_Isend(&kAborted, sizeof kAborted, MPI_BYTE, r, kVerdictTag, comm_, &request) == MPI_SUCCESS)
      MPI_Request_free(&request);
  }
}

Status Hub::fail(StatusCode code, const char* reason) noexcept {
  failure_ = code;
  reason_.format("%s", reason);
  Verdict verdict{static_cast<uint32_t>(code), {}};
  std::snprintf(verdict.text, sizeof verdict.text, "%s", reason);
  if (code != StatusCode::aborted || !abort_told_.exchange(true)) tell_all(verdict);
  return report();
}

void Hub::tell_all(const Verdict& verdict) noexcept {
  if (size_ == 1) return;
  told_ = verdict;
  std::vector<MPI_Request>& requests = telling_;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    MPI_Request& request = requests[static_cast<size_t>(r)];
    if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
    if (MPI_Isend(&told_, sizeof told_, MPI_BYTE, r, kVerdictTag, comm_, &request) != MPI_SUCCESS)
      request = MPI_REQUEST_NULL;
  }
  const Clock::time_point end = Clock::now() + kTelling;
  Pause pause;
  for (int done = 0; Clock::now() < end; pause()) {
    if (MPI_Testall(size_, requests.data(), &done, MPI_STATUSES_IGNORE) != MPI_SUCCESS || done) return;
  }
}

Status Hub::report() noexcept {
  if (error_.text[0] != '\0') return failure_;  // the first report stays
  const double seconds = std::chrono::duration<double>(Clock::now() - since_).count();
  error_.format("%s: %s after %.3f s: %s", op_, Status(failure_).message(), seconds, reason_.text);
  return failure_;
}

bool Hub::agree(Message* why) const noexcept {
  const Descriptor& a = descriptors_[0];
  for (size_t r = 1; r < descriptors_.size(); ++r) {
    const Descriptor& b = descriptors_[r];
    if (b.op != a.op) {
      why->format("rank %zu called %s, rank 0 called %s", r, call_name(static_cast<Collective>(b.op)),
                  call_name(static_cast<Collective>(a.op)));
    } else if (b.count != a.count) {
      why->format("rank %zu passed count %llu, rank 0 passed %llu", r, static_cast<unsigned long long>(b.count),
                  static_cast<unsigned long long>(a.count));
    } else if (b.dtype != a.dtype) {
      why->format("rank %zu passed dtype %s, rank 0 passed %s", r, dtype_name(static_cast<DType>(b.dtype)),
                  dtype_name(static_cast<DType>(a.dtype)));
    } else if (b.root != a.root) {
      why->format("rank %zu passed root %d, rank 0 passed %d", r, static_cast<int>(b.root), static_cast<int>(a.root));
    } else {
      continue;
    }
    return false;
  }
  return true;
}

void Hub::list_missing(Message* why) const noexcept {
  char list[200] = {};
  size_t length = 0, missing = 0;
  for (size_t r = 1; r < gathering_.size(); ++r) {
    if (gathering_[r] == MPI_REQUEST_NULL) continue;
    if (++missing > 8) continue;
    length +=
        static_cast<size_t>(std::snprintf(list + length, sizeof list - length, "%s%zu", missing == 1 ? "" : ", ", r));
  }
  if (missing > 8) std::snprintf(list + length, sizeof list - length, " and %zu more", missing - 8);
  why->format("%s %s had not arrived", missing == 1 ? "rank" : "ranks", list);
}

}  // namespace gradgate::mpi
