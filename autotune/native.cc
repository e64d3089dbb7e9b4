// What the tuner needs in native code: the pool of threads that runs Programs, a clock around it,
// and this machine's own ceilings. Compiled with the flags and the ISA level of the kernels.
#include <chrono>

#include "step.h"

typedef std::chrono::steady_clock Clock;

static int64_t since(Clock::time_point begin) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
}

DI_EXPORT void* tune_pool_create(int32_t threads) { return di_pool_create(threads); }
DI_EXPORT void tune_pool_destroy(void* pool) { delete (DiPool*)pool; }

// One range of items on this thread.
DI_EXPORT void tune_part(DiThunk thunk, void* const* args, const int32_t* dims, uint8_t* scratch,
                         int32_t lo, int32_t hi) {
  DiFloatState state;
  thunk(args, dims, scratch, lo, hi);
}

// Runs the kernel as a step does, `warmup` times and then up to `repeats` times, each time on the
// next of `sets` argument sets; ends early once `limit_ns` have passed and three runs are timed.
// Returns the number of times in `ns`.
DI_EXPORT int32_t tune_time(void* pool, DiThunk thunk, void* const* args, int32_t num_args,
                            int32_t sets, const int32_t* dims, int32_t num_dims, uint8_t* scratch,
                            int64_t stride, int64_t items, int32_t warmup, int32_t repeats,
                            int64_t limit_ns, int64_t* ns) {
  if (num_args > kMaxArgs || num_dims > kMaxDims) return -1;
  DiFloatState state;
  DiTask task;
  task.thunk = thunk;
  task.scratch = scratch;
  task.stride = stride;
  task.items = items;
  for (int32_t d = 0; d < num_dims; ++d) task.dims[d] = dims[d];
  const Clock::time_point start = Clock::now();
  int32_t timed = 0;
  for (int32_t run = 0; run < warmup + repeats; ++run) {
    void* const* set = args + (int64_t)(run % sets) * num_args;
    for (int32_t a = 0; a < num_args; ++a) task.args[a] = set[a];
    const Clock::time_point begin = Clock::now();
    ((DiPool*)pool)->run(task);
    const int64_t took = since(begin);
    if (run >= warmup) ns[timed++] = took;
    if (timed >= 3 && since(start) > limit_ns) break;
  }
  return timed;
}

// Peak of fp32 multiply-adds: independent chains in registers, on every thread.
static const int kChains = 12, kRounds = 1 << 16;

static void fma_thunk(void* const* args, const int32_t*, uint8_t*, int32_t lo, int32_t) {
  float* out = (float*)args[0] + 64 * lo;
#if defined(DI_ISA_AVX512) || defined(DI_ISA_AMX)
  __m512 acc[kChains], a = _mm512_set1_ps(out[0]), b = _mm512_set1_ps(out[1]);
  for (int c = 0; c < kChains; ++c) acc[c] = _mm512_set1_ps((float)c);
  for (int i = 0; i < kRounds; ++i)
    for (int c = 0; c < kChains; ++c) acc[c] = _mm512_fmadd_ps(acc[c], a, b);
  for (int c = 1; c < kChains; ++c) acc[0] = _mm512_add_ps(acc[0], acc[c]);
  _mm512_storeu_ps(out + 2, acc[0]);
#elif defined(DI_ISA_AVX2)
  __m256 acc[kChains], a = _mm256_set1_ps(out[0]), b = _mm256_set1_ps(out[1]);
  for (int c = 0; c < kChains; ++c) acc[c] = _mm256_set1_ps((float)c);
  for (int i = 0; i < kRounds; ++i)
    for (int c = 0; c < kChains; ++c) acc[c] = _mm256_fmadd_ps(acc[c], a, b);
  for (int c = 1; c < kChains; ++c) acc[0] = _mm256_add_ps(acc[0], acc[c]);
  _mm256_storeu_ps(out + 2, acc[0]);
#else
  typedef float Four __attribute__((vector_size(16)));
  Four acc[kChains], a = {out[0], out[0], out[0], out[0]}, b = {out[1], out[1], out[1], out[1]};
  for (int c = 0; c < kChains; ++c) acc[c] = b * (float)c;
  for (int i = 0; i < kRounds; ++i)
    for (int c = 0; c < kChains; ++c) acc[c] = acc[c] * a + b;
  for (int c = 1; c < kChains; ++c) acc[0] += acc[c];
  for (int i = 0; i < 4; ++i) out[2 + i] = acc[0][i];
#endif
}

static int lanes() {
#if defined(DI_ISA_AVX512) || defined(DI_ISA_AMX)
  return 16;
#elif defined(DI_ISA_AVX2)
  return 8;
#else
  return 4;
#endif
}

static void read_thunk(void* const* args, const int32_t* dims, uint8_t*, int32_t lo, int32_t hi) {
  const uint64_t* data = (const uint64_t*)args[0];
  const int64_t per = (int64_t)dims[0] * 1024 / 8;  // words of an item
  uint64_t sum[8] = {};
  for (int64_t i = lo * per; i + 8 <= hi * per; i += 8)
    for (int j = 0; j < 8; ++j) sum[j] += data[i + j];
  ((uint64_t*)args[1])[8 * (lo % 512)] = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] +
                                        sum[6] + sum[7];
}

// The best of `repeats`: operations per second of `threads` threads; `room` holds 64 floats each.
DI_EXPORT double tune_peak_flops(void* pool, int32_t threads, float* room, int32_t repeats) {
  DiFloatState state;
  DiTask task = {};
  task.thunk = fma_thunk;
  task.items = threads;
  task.args[0] = room;
  double best = 0;
  for (int32_t r = 0; r < repeats; ++r) {
    for (int32_t t = 0; t < threads; ++t) room[64 * t] = 0.5f, room[64 * t + 1] = 1.0f;
    const Clock::time_point begin = Clock::now();
    ((DiPool*)pool)->run(task);
    const double rate = 2.0 * kChains * kRounds * lanes() * threads / (double)since(begin) * 1e9;
    best = rate > best ? rate : best;
  }
  return best;
}

// The best of `repeats`: bytes per second read from `data` (a multiple of threads KiB).
DI_EXPORT double tune_peak_read(void* pool, int32_t threads, uint64_t* data, int64_t bytes,
                                uint64_t* room, int32_t repeats) {
  DiTask task = {};
  task.thunk = read_thunk;
  task.items = threads;
  task.dims[0] = (int32_t)(bytes / threads / 1024);
  task.args[0] = data;
  task.args[1] = room;
  double best = 0;
  for (int32_t r = 0; r < repeats; ++r) {
    const Clock::time_point begin = Clock::now();
    ((DiPool*)pool)->run(task);
    const double rate = (double)task.dims[0] * 1024 * threads / (double)since(begin) * 1e9;
    best = rate > best ? rate : best;
  }
  return best;
}
