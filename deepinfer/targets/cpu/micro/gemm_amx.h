// AMX level: TDPBF16PS on tiles of 16 rows, 32 k and 16 columns. One instruction is one K block of
// the contract order; it flushes denormals by itself. Weights of other formats are first widened
// to a bf16 tile on the stack, with AVX-512.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gemm_tile.h"

namespace di_gemm {
namespace {

enum : int { kTileRows = 16, kTileBytes = 64, kMaxTiles = 4 };

// Tile registers: 0..3 accumulators of up to 64 rows, 4 their rows of A, 5 the weights, 6 and 7 the
// accumulator and the rows of A of a last, shorter row block. Fields as LDTILECFG reads them.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileConfig(int tail_rows) {
    for (int t = 0; t < 8; ++t) {
      row_bytes[t] = kTileBytes;
      rows[t] = kTileRows;
    }
    if (tail_rows) rows[6] = rows[7] = (uint8_t)tail_rows;
  }
};

// Linux grants tile data (XSTATE component 18) once per process, for all of its threads. Without
// it the AVX-512 loops run, which give the same bits.
inline bool tiles_permitted() {
  static int answer = 0;  // threads that race here ask twice and hear the same
  int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
  if (known == 0) {
    known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0 ? 1 : -1;
    __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
  }
  return known > 0;
}

// The compilers' tile intrinsics tell too little of the memory they touch (gcc: the first 8 bytes
// of a configuration, none of a tile): here everything at `p` is read and written, as is all else
// that others can reach.
inline void touch_memory(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

// Asks the thread's registers what is loaded, not a flag of ours: other libraries on this thread
// (oneDNN) load and release tile configurations too. Loading costs far more than asking.
inline void configure_tiles(int tail_rows) {
  const TileConfig wanted(tail_rows);
  TileConfig loaded(0);
  touch_memory(&loaded);
  _tile_storeconfig(&loaded);
  touch_memory(&loaded);
  if (memcmp(&loaded, &wanted, sizeof wanted) == 0) return;
  touch_memory(&wanted);
  _tile_loadconfig(&wanted);
}

struct alignas(64) Bf16Tile {
  uint32_t pairs[kPairs][kCols];
};

inline void store_pairs(uint32_t* out, Vec even, Vec odd) {
  __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
  __m512i high = _mm512_and_si512(_mm512_castps_si512(odd), odd_mask());
  _mm512_storeu_si512(out, _mm512_or_si512(low, high));
}

// The weight block as a bf16 tile: in place if stored so, else widened into `buffer`.
template <class Format>
inline const void* weight_tile(const uint8_t* w, const uint8_t* sf, Bf16Tile& buffer) {
  WeightSlab slab;
  widen_block<Format>(w, sf, scales_are_near<Format>(sf, 1), slab);
  const Vec scale = load_vec(slab.scale);
  for (int j = 0; j < kPairs; ++j)
    store_pairs(buffer.pairs[j], _mm512_mul_ps(load_vec(slab.v[0][j]), scale),
                _mm512_mul_ps(load_vec(slab.v[1][j]), scale));
  return &buffer;
}

template <>
inline const void* weight_tile<Bf16>(const uint8_t* w, const uint8_t*, Bf16Tile&) {
  return w;
}

struct RowTile {
  const void* base;
  int64_t stride;
};

// Rows first..first+n-1, one K block: in place, or gathered into `buffer`.
inline RowTile row_tile(const Operands& x, int first, int n, int k, Bf16Tile& buffer) {
  if (!x.rows) return {x.row(first) + k, x.lda * 2};
  for (int i = 0; i < n; ++i)
    _mm512_storeu_si512(buffer.pairs[i], _mm512_loadu_si512(x.row(first + i) + k));
  return {&buffer, kTileBytes};
}

#define DI_AMX_MULTIPLY(acc_tile, row_reg, first, n)               \
  do {                                                             \
    const RowTile t = row_tile(x, first, n, b * kBlock, gathered); \
    touch_memory(t.base);                                          \
    _tile_loadd(row_reg, t.base, t.stride);                        \
    _tile_dpbf16ps(acc_tile, row_reg, 5);                          \
    touch_memory(t.base); /* before `gathered` is filled again */  \
  } while (0)

// `full` row blocks of 16 (at most 4) and `tail` rows after them of one tile, over all of K.
template <class Format>
inline void add_tiles(const Operands& x, int tile, int first, int full, int tail) {
  Bf16Tile widened, gathered;
  float* acc = TileAt<Format>(x, tile, 0, first).acc;
  float* const acc_tail = acc + full * kTileRows * kCols;
  touch_memory(acc);
  if (full > 0) _tile_loadd(0, acc, kTileBytes);
  if (full > 1) _tile_loadd(1, acc + 1 * kTileRows * kCols, kTileBytes);
  if (full > 2) _tile_loadd(2, acc + 2 * kTileRows * kCols, kTileBytes);
  if (full > 3) _tile_loadd(3, acc + 3 * kTileRows * kCols, kTileBytes);
  if (tail) _tile_loadd(6, acc_tail, kTileBytes);
  for (int b = 0; b < x.blocks; ++b) {
    const TileAt<Format> at(x, tile, b, first);
    const void* w = weight_tile<Format>(at.w, at.sf, widened);
    touch_memory(w);
    _tile_loadd(5, w, kTileBytes);
    if (full > 0) DI_AMX_MULTIPLY(0, 4, first, kTileRows);
    if (full > 1) DI_AMX_MULTIPLY(1, 4, first + 1 * kTileRows, kTileRows);
    if (full > 2) DI_AMX_MULTIPLY(2, 4, first + 2 * kTileRows, kTileRows);
    if (full > 3) DI_AMX_MULTIPLY(3, 4, first + 3 * kTileRows, kTileRows);
    if (tail) DI_AMX_MULTIPLY(6, 7, first + full * kTileRows, tail);
  }
  if (full > 0) _tile_stored(0, acc, kTileBytes);
  if (full > 1) _tile_stored(1, acc + 1 * kTileRows * kCols, kTileBytes);
  if (full > 2) _tile_stored(2, acc + 2 * kTileRows * kCols, kTileBytes);
  if (full > 3) _tile_stored(3, acc + 3 * kTileRows * kCols, kTileBytes);
  if (tail) _tile_stored(6, acc_tail, kTileBytes);
  touch_memory(acc);
}

#undef DI_AMX_MULTIPLY

template <class Format>
inline void add_all_amx(const Operands& x) {
  if (!tiles_permitted()) return add_all<Format>(x);
  const int tail = x.m % kTileRows;
  configure_tiles(tail);
  int blocks = x.m / kTileRows, first = 0;
  do {
    const int full = blocks < kMaxTiles ? blocks : kMaxTiles;
    blocks -= full;
    for (int t = 0; t < x.tiles; ++t) add_tiles<Format>(x, t, first, full, blocks ? 0 : tail);
    first += full * kTileRows;
  } while (blocks);
}

}  // namespace
}  // namespace di_gemm
