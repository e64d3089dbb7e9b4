// What the tuner needs in native code: the pool of threads that runs Programs, a clock around it,
// and this machine's own ceilings. Compiled with the flags and the ISA level of the kernels.
#include <chrono>

#include "step.h"
#if defined(DI_ISA_AMX)  // for the tiles' configuration; the order is that of gemm_body.h
#include "gemm_few_avx512.h"
#include "gemm_tile.h"
#include "gemm_amx.h"
#endif

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

// Runs the kernel as a step does, `warmup` times and for `warm_ns`, then up to `repeats` times, each
// time on the next of `sets` argument sets, which `turn` counts; ends early once `limit_ns` have
// passed and `least` runs are timed. Returns the number of times in `ns`.
DI_EXPORT int32_t tune_time(void* pool, DiThunk thunk, void* const* args, int32_t num_args,
                            int32_t sets, int64_t* turn, const int32_t* dims, int32_t num_dims,
                            uint8_t* scratch, int64_t stride, int64_t items, int32_t warmup,
                            int64_t warm_ns, int32_t repeats, int32_t least, int64_t limit_ns,
                            int64_t* ns) {
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
  while (timed < repeats) {
    void* const* set = args + (*turn)++ % sets * num_args;
    for (int32_t a = 0; a < num_args; ++a) task.args[a] = set[a];
    const Clock::time_point begin = Clock::now();
    ((DiPool*)pool)->run(task);
    const int64_t took = since(begin);
    if (--warmup >= 0 || (!timed && since(start) < warm_ns)) continue;
    ns[timed++] = took;
    if (timed >= least && since(start) > limit_ns) break;
  }
  return timed;
}

// The ceilings are kernels like any other, with args and dims of their own: they are timed as
// kernels are, on the same pool, in turns with them.

// Nothing: what starting a launch and waiting for its end costs.
DI_EXPORT void tune_nothing(void* const*, const int32_t*, uint8_t*, int32_t, int32_t) {}

// Reads dims[0] KiB of args[0] per item; args[1] holds 64 bytes for each thread's sum.
DI_EXPORT void tune_read(void* const* args, const int32_t* dims, uint8_t*, int32_t lo, int32_t hi) {
  const uint64_t* data = (const uint64_t*)args[0];
  const int64_t per = (int64_t)dims[0] * 1024 / 8;  // words of an item
  uint64_t sum[8] = {};
  for (int64_t i = lo * per; i + 8 <= hi * per; i += 8)
    for (int j = 0; j < 8; ++j) sum[j] += data[i + j];
  ((uint64_t*)args[1])[8 * lo] = sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] +
                                 sum[7];
}

// fp32 multiply-adds: independent chains in registers. An item is kChains * kRounds of them in each
// lane; args[0] holds 64 floats per item.
static const int kChains = 12, kRounds = 1 << 16;

DI_EXPORT void tune_fma(void* const* args, const int32_t*, uint8_t*, int32_t lo, int32_t hi) {
  for (int32_t item = lo; item < hi; ++item) {
    float* out = (float*)args[0] + 64 * item;
    out[0] = 0.5f, out[1] = 1.0f;
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
}

// Operations of one item of tune_fma.
DI_EXPORT int64_t tune_fma_ops() {
#if defined(DI_ISA_AVX512) || defined(DI_ISA_AMX)
  return 2LL * kChains * kRounds * 16;
#elif defined(DI_ISA_AVX2)
  return 2LL * kChains * kRounds * 8;
#else
  return 2LL * kChains * kRounds * 4;
#endif
}

// bf16 tile products: four accumulators in turns, as a large GEMM has them.
static const int kTileRounds = 1 << 12;

DI_EXPORT void tune_amx(void* const* args, const int32_t*, uint8_t*, int32_t lo, int32_t hi) {
#if defined(DI_ISA_AMX)
  if (!di_gemm::tiles_permitted()) return;
  di_gemm::configure_tiles(0);
  for (int32_t item = lo; item < hi; ++item) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    for (int i = 0; i < kTileRounds; ++i) {
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 5);
      _tile_dpbf16ps(2, 4, 5);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
#endif
}

// Operations of one item of tune_amx; 0 where there are no tiles.
DI_EXPORT int64_t tune_amx_ops() {
#if defined(DI_ISA_AMX)
  return di_gemm::tiles_permitted() ? 4LL * kTileRounds * 2 * 16 * 16 * 32 : 0;
#else
  return 0;
#endif
}
