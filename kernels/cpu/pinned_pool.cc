#include "gradgate/pinned_pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <new>

namespace gradgate {
namespace {

void relax() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A waiting thread looks this often before it sleeps: codec calls follow each other within microseconds, and waking a
// sleeper takes tens of them.
constexpr int kSpins = 4000;

}  // namespace

struct PinnedPool::State {
  struct Worker {
    State* pool = nullptr;
    pthread_t thread{};
    int core = 0;
  };

  pthread_mutex_t run_mutex = PTHREAD_MUTEX_INITIALIZER;  // one run at a time
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;      // guards sleeping
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
  Worker* workers = nullptr;
  unsigned width = 1, started = 0;
  pthread_t owner{};
  cpu_set_t owner_cores;

  // One run: written before `generation` moves, read after.
  Executor::Task fn = nullptr;
  void* argument = nullptr;
  size_t tasks = 0;
  std::atomic<size_t> next{0};
  std::atomic<unsigned> busy{0};  // workers that have not finished this generation
  std::atomic<uint64_t> generation{0};
  std::atomic<bool> quit{false};

  void work() noexcept {
    for (size_t i = next.fetch_add(1, std::memory_order_relaxed); i < tasks;
         i = next.fetch_add(1, std::memory_order_relaxed))
      fn(argument, i);
  }

  void loop() noexcept {
    uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && generation.load(std::memory_order_acquire) == seen; ++i) relax();
      if (generation.load(std::memory_order_acquire) == seen) {
        pthread_mutex_lock(&mutex);
        while (generation.load(std::memory_order_acquire) == seen) pthread_cond_wait(&wake, &mutex);
        pthread_mutex_unlock(&mutex);
      }
      ++seen;
      if (quit.load(std::memory_order_acquire)) return;
      work();
      busy.fetch_sub(1, std::memory_order_release);
    }
  }

  void announce() noexcept {
    pthread_mutex_lock(&mutex);
    generation.fetch_add(1, std::memory_order_acq_rel);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&mutex);
  }

  void run(size_t count, Executor::Task task, void* task_argument) noexcept {
    pthread_mutex_lock(&run_mutex);
    fn = task;
    argument = task_argument;
    tasks = count;
    next.store(0, std::memory_order_relaxed);
    busy.store(started, std::memory_order_relaxed);
    announce();
    work();
    // The caller's share is as long as the others': what is left to wait for is short.
    for (int i = 0; busy.load(std::memory_order_acquire) != 0; ++i) {
      if (i < kSpins) {
        relax();
      } else {
        sched_yield();
      }
    }
    pthread_mutex_unlock(&run_mutex);
  }

  void end_workers() noexcept {
    quit.store(true, std::memory_order_release);
    announce();
    for (unsigned i = 0; i < started; ++i) pthread_join(workers[i].thread, nullptr);
    started = 0;
  }
};

namespace {

bool bind_to(pthread_t thread, int core) noexcept {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  return pthread_setaffinity_np(thread, sizeof one, &one) == 0;
}

}  // namespace

PinnedPool::~PinnedPool() { stop(); }

Status PinnedPool::start(unsigned width) noexcept {
  if (state_ != nullptr) return StatusCode::bad_state;
  cpu_set_t cores;
  if (pthread_getaffinity_np(pthread_self(), sizeof cores, &cores) != 0) return StatusCode::unsupported;
  const unsigned available = static_cast<unsigned>(CPU_COUNT(&cores));
  if (width == 0) width = available;
  if (width > available) return {StatusCode::invalid_argument, static_cast<int64_t>(available)};
  State* state = new (std::nothrow) State;
  if (state == nullptr) return StatusCode::out_of_memory;
  state->width = width;
  state->owner = pthread_self();
  state->owner_cores = cores;
  state->workers = width > 1 ? new (std::nothrow) State::Worker[width - 1] : nullptr;
  bool ok = width == 1 || state->workers != nullptr;
  int own_core = -1;
  for (int core = 0; ok && core < CPU_SETSIZE && state->started + 1 < width + (own_core < 0); ++core) {
    if (!CPU_ISSET(core, &cores)) continue;
    if (own_core < 0) {
      own_core = core;
      continue;
    }
    State::Worker& worker = state->workers[state->started];
    worker.pool = state;
    worker.core = core;
    ok = pthread_create(
             &worker.thread, nullptr,
             [](void* p) -> void* {
               const State::Worker* self = static_cast<State::Worker*>(p);
               bind_to(pthread_self(), self->core);  // refused: it still works, only slower
               self->pool->loop();
               return nullptr;
             },
             &worker) == 0;
    if (ok) ++state->started;
  }
  if (!ok) {
    state->end_workers();
    delete[] state->workers;
    delete state;
    return StatusCode::out_of_memory;
  }
  bind_to(state->owner, own_core);
  state_ = state;
  return {};
}

void PinnedPool::stop() noexcept {
  if (state_ == nullptr) return;
  state_->end_workers();
  if (pthread_equal(state_->owner, pthread_self()) != 0)
    pthread_setaffinity_np(state_->owner, sizeof state_->owner_cores, &state_->owner_cores);
  delete[] state_->workers;
  delete state_;
  state_ = nullptr;
}

unsigned PinnedPool::width() const noexcept { return state_ == nullptr ? 1 : state_->width; }

Executor PinnedPool::executor() noexcept {
  Executor executor;
  if (state_ == nullptr) return executor;
  executor.context = state_;
  executor.run = [](void* context, size_t tasks, Executor::Task fn, void* argument) {
    static_cast<State*>(context)->run(tasks, fn, argument);
  };
  executor.width = state_->width;
  return executor;
}

}  // namespace gradgate
