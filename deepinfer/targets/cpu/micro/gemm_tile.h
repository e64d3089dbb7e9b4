// Tiles of 16 columns times any number of rows: the loops around a level's K block.
//
// Needs from the level: kMaxRows, widen_block, widen_row, RowRange, add_block, Few.
#pragma once
#include "gemm_formats.h"
#include "mxcsr.h"

namespace di_gemm {
namespace {

// Rows that share one widening of a weight block. Their own widening is shared by all tiles, and
// stays in the L1 cache with the accumulators of a tile.
enum : int { kChunkRows = 96 };

struct Operands {
  const uint16_t* a;
  int64_t lda;
  const int32_t* rows;  // null: row i is row i of a
  const uint8_t *w, *sf;
  int blocks, m, tiles;
  float* acc;

  const uint16_t* row(int i) const { return a + (rows ? (int64_t)rows[i] : (int64_t)i) * lda; }
};

// The weights of one tile from one K block on, and its accumulators from one row on.
template <class Format>
struct TileAt {
  const uint8_t *w, *sf;
  float* acc;

  TileAt(const Operands& x, int tile, int block, int row)
      : w(x.w + ((int64_t)tile * x.blocks + block) * kPairs * Format::kPairBytes),
        sf(x.sf + ((int64_t)tile * x.blocks + block) * Format::kScaleBytes),
        acc(x.acc + ((int64_t)tile * x.m + row) * kCols) {}
};

// Every NaN becomes 0x7FC00000: levels differ in which operand's payload an addition keeps.
inline void canonicalize_nan(float* acc, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = f32_to_bits(acc[i]);
    acc[i] = bits_to_f32((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : bits);
  }
}

// Not inlined: one copy serves all formats, which halves the time to compile a kernel.
template <int R>
__attribute__((noinline)) void add_rows(const WeightSlab& slab, const RowBlock* rows, float* acc) {
  add_block<R>(slab, rows, acc);
}

template <int R>
inline void add_group(int n, const WeightSlab& slab, const RowBlock* rows, float* acc) {
  if (n == R) return add_rows<R>(slab, rows, acc);
  if constexpr (R > 1) add_group<R - 1>(n, slab, rows, acc);
}

// One K block of n rows, in groups of nearly equal size: a last group of one row would leave the
// FMA units idle.
inline void add_groups(int n, const WeightSlab& slab, const RowBlock* rows, float* acc) {
  const int groups = (n + kMaxRows - 1) / kMaxRows, size = n / groups, larger = n % groups;
  for (int g = 0; g < groups; ++g) {
    const int count = size + (g < larger);
    add_group<kMaxRows>(count, slab, rows, acc);
    rows += count;
    acc += count * kCols;
  }
}

// Whether all scales of a tile's next `count` K blocks are near 1.
template <class Format>
inline bool tile_is_near(const Operands& x, int tile, int block, int count) {
  return scales_are_near<Format>(TileAt<Format>(x, tile, block, 0).sf, count);
}

template <class Format>
inline void add_chunk(const Operands& x, int first, int n) {
  const uint16_t* rows[kChunkRows];
  RowBlock widened[kChunkRows];  // [K block][row]; several K blocks at once if the rows are few
  for (int i = 0; i < n; ++i) rows[i] = x.row(first + i);
  const bool few = n <= Few<Format>::kRows;
  const int step = few ? kChunkRows / n : 1;
  for (int b = 0; b < x.blocks; b += step) {
    const int count = x.blocks - b < step ? x.blocks - b : step;
    RowRange range;
    for (int j = 0; j < count; ++j)
      for (int i = 0; i < n; ++i)
        widen_row<Format>(rows[i] + (b + j) * kBlock, widened[j * n + i], range);
    const bool rows_near = range.is_near();
    const bool shifted = few && rows_near && Few<Format>::shift_rows(widened, n * count);
    // Changed as seldom as can be: it costs as much as a K block. What runs in kMode is noinline
    // and works on memory, as mxcsr.h asks.
    uint32_t mode = DI_MXCSR_FLUSH;
    const auto enter = [&mode](uint32_t wanted) {
      if (wanted != mode) di_mxcsr_swap(mode = wanted);
    };
    for (int t = 0; t < x.tiles; ++t) {
      const bool near = rows_near && tile_is_near<Format>(x, t, b, count);
      if (few && near) {
        const TileAt<Format> at(x, t, b, first);
        enter(Few<Format>::kMode);
        Few<Format>::add({at.w, at.sf, at.acc, count}, widened, n);
        continue;
      }
      enter(DI_MXCSR_FLUSH);
      for (int j = 0; j < count; ++j) {
        if (shifted)
          for (int i = 0; i < n; ++i)
            widen_row<Format>(rows[i] + (b + j) * kBlock, widened[j * n + i], range);
        WeightSlab slab;
        const TileAt<Format> at(x, t, b + j, first);
        widen_block<Format>(at.w, at.sf, near, slab);
        add_groups(n, slab, widened + j * n, at.acc);
      }
      if (shifted) Few<Format>::shift_rows(widened, n * count);
    }
    enter(DI_MXCSR_FLUSH);
  }
}

template <class Format>
inline void add_all(const Operands& x) {
  for (int first = 0; first < x.m; first += kChunkRows)
    add_chunk<Format>(x, first, x.m - first < kChunkRows ? x.m - first : kChunkRows);
}

}  // namespace
}  // namespace di_gemm
