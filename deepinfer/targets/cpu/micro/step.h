// Runs one phase: walks its launch list over the value table with a persistent pool of threads.
// Included by the generated step file of a Program, once per library.
#pragma once
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#endif
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef void (*DiThunk)(void* const* args, const int32_t* dims, uint8_t* scratch, int32_t lo,
                        int32_t hi);

// One node. `args` indexes the value table, `dims` pairs (size index, times).
struct DiLaunch {
  DiThunk thunk;
  int32_t args, num_args, num_inputs;
  int32_t dims, num_dims;
  int32_t sym;       // size index of the symbolic factor of the items, -1 for none
  int64_t mul, div;  // items = ceil(size * mul / div)
};

// Bytes of a value: fixed * size[a] * size[b]; -1 for no size.
struct DiBytes {
  int64_t fixed;
  int32_t a, b;
};

struct DiPhase {
  const DiLaunch* launches;
  int32_t num_launches;
  const int32_t* args;
  const int32_t* dims;
  const DiBytes* bytes;
};

// What a caller passes: pointers of all values, sizes, scratch per thread, where to copy watched
// values right after their node ran (null: not watched), and where to add each launch's nanoseconds
// (null: not timed) on which clock.
struct DiStep {
  void* const* values;
  const int32_t* sizes;
  uint8_t* scratch;
  int64_t scratch_stride;
  void* pool;
  void* const* watch;
  int64_t* times;
  int64_t clock;
};

// Rounding to nearest even, denormals kept, exceptions masked: whatever the host process had set.
struct DiFloatState {
#if defined(__x86_64__)
  uint32_t saved;
  DiFloatState() : saved(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DiFloatState() { _mm_setcsr(saved); }
#endif
};

static const int kMaxArgs = 32, kMaxDims = 16;

struct DiTask {
  DiThunk thunk;
  void* args[kMaxArgs];
  int32_t dims[kMaxDims];
  uint8_t* scratch;
  int64_t stride;
  int64_t items;
};

// Thread t of n runs items [items*t/n, items*(t+1)/n): a static cut, the caller is thread 0.
//
// Who waits spins for a while, some 300 us, and then sleeps; with more threads than processors he
// sleeps at once, because whom he waits for may need his. No wake-up is lost: `epoch_` is raised,
// and `left_` seen to be zero, under the mutex that the sleeper holds while he looks.
//
// If there are as many threads as processors, workers keep to the processors that the caller is not
// on, and go round when he has moved: a worker on the caller's own runs after him, launch by launch,
// and a scheduler may leave it there.
class DiPool {
 public:
  explicit DiPool(int threads)
      : threads_(threads < 1 ? 1 : threads),
        spins_((unsigned)(threads_ - 1) >= std::thread::hardware_concurrency() ? 0 : 16000) {
    try {
      for (int t = 1; t < threads_; ++t) workers_.emplace_back([this, t] { work(t); });
    } catch (...) {  // the system has no more threads: end those that started
      stop();
      throw;
    }
  }
  ~DiPool() { stop(); }
  int threads() const { return threads_; }

  void run(const DiTask& task) {
    if (threads_ == 1 || task.items < 2) {
      part(task, 0, 1);
      return;
    }
    task_ = &task;
#if defined(__linux__)
    if (!processors_.empty()) caller_.store(sched_getcpu(), std::memory_order_relaxed);
#endif
    left_.store(threads_ - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    part(task, 0, threads_);
    if (!spin([&] { return left_.load(std::memory_order_acquire) == 0; })) {
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, [&] { return left_.load(std::memory_order_acquire) == 0; });
    }
  }

 private:
  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }
  // Whether `condition` came true within the time to spin.
  template <class Condition>
  bool spin(Condition condition) const {
    for (int i = 0; i < spins_; ++i) {
      if (condition()) return true;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    return condition();
  }
  // The processors this process may use, if there are as many as threads.
  static std::vector<int> processors_for(int threads) {
    std::vector<int> found;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) return found;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &set)) found.push_back(cpu);
    if ((int)found.size() != threads) found.clear();
#endif
    return found;
  }
  // Moves worker t, which is on `mine`, to the t-th processor after the caller's.
  void keep_off(int caller, int t, int& mine) const {
#if defined(__linux__)
    for (size_t i = 0; i < processors_.size(); ++i) {
      if (processors_[i] != caller) continue;
      const int other = processors_[(i + t) % processors_.size()];
      if (other == mine) return;
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(mine = other, &set);
      sched_setaffinity(0, sizeof set, &set);  // that it fails costs time alone
      return;
    }
#endif
  }
  static void part(const DiTask& task, int t, int n) {
    const int64_t lo = task.items * t / n, hi = task.items * (t + 1) / n;
    if (lo < hi)
      task.thunk(task.args, task.dims, task.scratch + task.stride * t, (int32_t)lo, (int32_t)hi);
  }
  void work(int t) {
    DiFloatState state;
    uint64_t seen = 0;
    int mine = -1;
    for (;;) {
      const auto called = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
      if (!spin(called)) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, called);
      }
      seen = epoch_.load(std::memory_order_acquire);
      if (stop_) return;
      if (!processors_.empty()) keep_off(caller_.load(std::memory_order_relaxed), t, mine);
      part(*task_, t, threads_);
      if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        std::lock_guard<std::mutex> lock(mutex_);  // not between the caller's look and his sleep
        done_.notify_one();
      }
    }
  }

  const int threads_, spins_;
  const std::vector<int> processors_ = processors_for(threads_);
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<uint64_t> epoch_{0};
  std::atomic<int> left_{0}, caller_{-1};
  const DiTask* task_ = nullptr;
  bool stop_ = false;
};

static int64_t di_bytes(const DiBytes& b, const int32_t* sizes) {
  return b.fixed * (b.a < 0 ? 1 : sizes[b.a]) * (b.b < 0 ? 1 : sizes[b.b]);
}

static int64_t di_now(int64_t clock) {
  timespec now;
  clock_gettime((clockid_t)clock, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// Returns the number of launches that ran.
static int32_t di_run_phase(const DiPhase& phase, const DiStep* step) {
  DiFloatState state;
  DiPool* pool = (DiPool*)step->pool;
  for (int32_t i = 0; i < phase.num_launches; ++i) {
    const DiLaunch& launch = phase.launches[i];
    const int32_t* args = phase.args + launch.args;
    DiTask task;
    task.thunk = launch.thunk;
    for (int32_t a = 0; a < launch.num_args; ++a) task.args[a] = step->values[args[a]];
    for (int32_t d = 0; d < launch.num_dims; ++d) {
      const int32_t* dim = phase.dims + 2 * (launch.dims + d);
      task.dims[d] = step->sizes[dim[0]] * dim[1];
    }
    const int64_t size = launch.sym < 0 ? 1 : step->sizes[launch.sym];
    task.items = (size * launch.mul + launch.div - 1) / launch.div;
    task.scratch = step->scratch;
    task.stride = step->scratch_stride;
    const int64_t begun = step->times ? di_now(step->clock) : 0;
    pool->run(task);
    if (step->times) step->times[i] += di_now(step->clock) - begun;
    if (step->watch)
      for (int32_t a = launch.num_inputs; a < launch.num_args; ++a)
        if (void* to = step->watch[args[a]])
          memcpy(to, step->values[args[a]], di_bytes(phase.bytes[args[a]], step->sizes));
  }
  return phase.num_launches;
}

// Null where the system does not give that many threads.
static DiPool* di_pool_create(int32_t threads) {
  try {
    return new DiPool(threads);
  } catch (...) {
    return nullptr;
  }
}

#define DI_EXPORT extern "C" __attribute__((visibility("default")))
