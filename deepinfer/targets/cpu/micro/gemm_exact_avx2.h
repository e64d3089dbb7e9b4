// e2m1 weights in integers, for any number of rows: more than a few share weights widened to int16.
#pragma once
#include "gemm_bytes_avx2.h"

namespace di_gemm {
namespace {

// One K block of a tile, laid out as a row's.
struct alignas(64) UnitSlab {
  int32_t v[kPairs][kCols];
  float scale[kCols];
};

inline void widen_units(const uint8_t* w, const uint8_t* sf, UnitSlab& slab) {
  const __m256i nibble = _mm256_set1_epi8(15);
  const __m128i weights = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  for (int j = 0; j < kPairs; j += 2) {
    const __m256i codes = load_bytes(w + j * E2m1::kPairBytes);
    const __m256i even = _mm256_and_si256(codes, nibble);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble);
    const __m256i columns[kVecs] = {_mm256_unpacklo_epi8(even, odd),
                                    _mm256_unpackhi_epi8(even, odd)};
    for (int v = 0; v < kVecs; ++v) {
      const __m256i halves = look_up(weights, columns[v]);
      _mm256_store_si256((__m256i*)&slab.v[j][v * kLanes],
                         _mm256_cvtepi8_epi16(_mm256_castsi256_si128(halves)));
      _mm256_store_si256((__m256i*)&slab.v[j + 1][v * kLanes],
                         _mm256_cvtepi8_epi16(_mm256_extracti128_si256(halves, 1)));
    }
  }
  Vec scale[kVecs];
  load_scales<E2m1>(sf, scale);
  for (int v = 0; v < kVecs; ++v) store_vec(&slab.scale[v * kLanes], scale[v]);
}

// One K block of R rows; row r's sums go to row at[r] of acc.
template <int R>
__attribute__((noinline)) void add_units(const UnitSlab& slab, const RowUnits* rows, const int* at,
                                         float* acc) {
  __m256i sum[R][kVecs];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) sum[r][v] = _mm256_setzero_si256();
#pragma GCC unroll 16
  for (int j = 0; j < kPairs; ++j) {
    __m256i weights[kVecs];
    for (int v = 0; v < kVecs; ++v)
      weights[v] = _mm256_load_si256((const __m256i*)&slab.v[j][v * kLanes]);
    for (int r = 0; r < R; ++r) {
      const __m256i x = _mm256_set1_epi32(rows[r].pair[j]);
      for (int v = 0; v < kVecs; ++v) {
        sum[r][v] = _mm256_add_epi32(sum[r][v], _mm256_madd_epi16(x, weights[v]));
        in_turn(sum[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) {
      float* out = acc + at[r] * kCols + v * kLanes;
      const Vec scale = _mm256_mul_ps(load_vec(&slab.scale[v * kLanes]),
                                      broadcast_vec(&rows[r].unit));
      store_vec(out, fma_vec(_mm256_cvtepi32_ps(sum[r][v]), scale, load_vec(out)));
    }
}

enum : int { kUnitRows = 6 };

template <int R = kUnitRows>
inline void add_units_of(int n, const UnitSlab& slab, const RowUnits* rows, const int* at,
                         float* acc) {
  if (n == R) return add_units<R>(slab, rows, at, acc);
  if constexpr (R > 1) add_units_of<R - 1>(n, slab, rows, at, acc);
}

// One K block of some rows: those that are exact, with where they stand, and the others widened.
struct Rows {
  RowUnits units[kChunkRows];
  RowBlock chains[kChunkRows];
  int exact[kChunkRows], inexact[kChunkRows], exact_count = 0, inexact_count = 0;

  void add(const uint16_t* a, int row, RowRange& range) {
    if (to_units(a, units[exact_count], range)) {
      exact[exact_count++] = row;
      return;
    }
    widen_row<E2m1>(a, chains[inexact_count], range);
    inexact[inexact_count++] = row;
  }
};

inline void add_exact_rows(const Rows& rows, const uint8_t* w, const uint8_t* sf, float* acc) {
  if (rows.exact_count) {
    UnitSlab slab;
    widen_units(w, sf, slab);
    const int n = rows.exact_count, groups = (n + kUnitRows - 1) / kUnitRows;
    for (int g = 0, at = 0; g < groups; ++g) {
      const int count = n / groups + (g < n % groups);
      add_units_of(count, slab, rows.units + at, rows.exact + at, acc);
      at += count;
    }
  }
  if (rows.inexact_count) {
    alignas(64) float sums[kChunkRows][kCols];
    WeightSlab slab;
    widen_block<E2m1>(w, sf, true, slab);
    for (int i = 0; i < rows.inexact_count; ++i)
      memcpy(sums[i], acc + rows.inexact[i] * kCols, sizeof sums[i]);
    add_groups(rows.inexact_count, slab, rows.chains, sums[0]);
    for (int i = 0; i < rows.inexact_count; ++i)
      memcpy(acc + rows.inexact[i] * kCols, sums[i], sizeof sums[i]);
  }
}

inline void add_many_exact(const Operands& x, int first, int n) {
  for (int b = 0; b < x.blocks; ++b) {
    Rows rows;
    RowRange range;
    for (int i = 0; i < n; ++i) rows.add(x.row(first + i) + b * kBlock, i, range);
    const bool near = range.is_near();
    for (int t = 0; t < x.tiles; ++t) {
      const TileAt<E2m1> at(x, t, b, first);
      if (near && tile_is_near<E2m1>(x, t, b, 1)) add_exact_rows(rows, at.w, at.sf, at.acc);
      else add_chunk<E2m1>(part_of(x, t, b, 1), first, n);
    }
  }
}

template <>
inline void add_all<E2m1>(const Operands& x) {
  for (int first = 0; first < x.m; first += kChunkRows) {
    const int n = x.m - first < kChunkRows ? x.m - first : kChunkRows;
    if (n <= kByteRows) add_few_exact<kByteRows>(x, first, n);
    else add_many_exact(x, first, n);
  }
}

}  // namespace
}  // namespace di_gemm
