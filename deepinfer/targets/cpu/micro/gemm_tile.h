// One tile of 16 columns times any number of rows: the loops around a level's K block.
//
// Needs from the level: kMaxRows, kDirectRows, widen_block, widen_row, add_block, add_few.
#pragma once
#include "gemm_formats.h"
#include "mxcsr.h"

namespace di_gemm {
namespace {

// Rows that share one widening of a weight block; their accumulators stay in the L1 cache.
enum : int { kChunkRows = 96 };

struct Operands {
  const uint16_t* a;
  int64_t lda;
  const int32_t* rows;  // null: row i is row i of a
  const uint8_t *w, *sf;
  int blocks, m;
  float* acc;

  const uint16_t* row(int i) const { return a + (rows ? (int64_t)rows[i] : (int64_t)i) * lda; }
};

// Every NaN becomes 0x7FC00000: levels differ in which operand's payload an addition keeps.
inline void canonicalize_nan(float* acc, int count) {
  for (int i = 0; i < count; ++i) {
    uint32_t bits = f32_to_bits(acc[i]);
    acc[i] = bits_to_f32((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : bits);
  }
}

// Not inlined: one copy serves all formats, which halves the time to compile a kernel.
template <int R>
__attribute__((noinline)) void add_rows(const WeightSlab& slab, const uint16_t* const* rows, int k,
                                        float* acc) {
  RowSlab<R> a;
  for (int r = 0; r < R; ++r) widen_row(rows[r] + k, a.v[r]);
  add_block<R>(slab, a, acc);
}

template <int R>
inline void add_group(int n, const WeightSlab& slab, const uint16_t* const* rows, int k,
                      float* acc) {
  if (n == R) return add_rows<R>(slab, rows, k, acc);
  if constexpr (R > 1) add_group<R - 1>(n, slab, rows, k, acc);
}

template <class Format>
inline void add_chunk(const Operands& x, int first, int n) {
  const uint16_t* rows[kChunkRows];
  for (int i = 0; i < n; ++i) rows[i] = x.row(first + i);
  float* acc = x.acc + (int64_t)first * kCols;
  if (n <= kDirectRows && scales_are_plain<Format>(x.sf, x.blocks) &&
      add_few<Format>(x.w, x.sf, rows, n, x.blocks, acc))
    return;
  // Groups of nearly equal size: a last group of one row would leave the FMA units idle.
  const int groups = (n + kMaxRows - 1) / kMaxRows, size = n / groups, larger = n % groups;
  WeightSlab slab;
  for (int b = 0; b < x.blocks; ++b) {
    widen_block<Format>(x.w + (int64_t)b * kPairs * Format::kPairBytes,
                        x.sf + (int64_t)b * Format::kScaleBytes, slab);
    for (int g = 0, i = 0; g < groups; ++g) {
      const int count = size + (g < larger);
      add_group<kMaxRows>(count, slab, rows + i, b * kBlock, acc + i * kCols);
      i += count;
    }
  }
}

template <class Format>
inline void add_all(const Operands& x) {
  for (int first = 0; first < x.m; first += kChunkRows)
    add_chunk<Format>(x, first, x.m - first < kChunkRows ? x.m - first : kChunkRows);
}

}  // namespace
}  // namespace di_gemm
