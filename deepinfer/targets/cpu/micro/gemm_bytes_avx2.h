// e2m1 weights in integers, for up to four rows: weights stay bytes, 0..24 for -12..12; a row's
// value is two signed bytes.
#pragma once
#include "gemm_units_avx2.h"

namespace di_gemm {
namespace {

// [K pair j of an even number][even k, odd k]: the low or high bytes of that k of j and of j + 1,
// twice. `excess` is what the sums have too much because the weights are 12 too large.
struct alignas(64) RowBytes {
  int32_t low[kPairs], high[kPairs];
  int32_t excess;
  float unit;
  bool exact;

  void fill(const RowUnits& row) {
    const __m256i low_bytes = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 0, 4, 2, 6, 2, 6, 8, 12, 8, 12, 10, 14, 10, 14));
    const __m256i high_bytes = _mm256_add_epi8(low_bytes, _mm256_set1_epi8(1));
    __m256i sums = _mm256_setzero_si256();
    for (int h = 0; h < 2; ++h) {
      const __m256i x = _mm256_load_si256((const __m256i*)&row.pair[8 * h]);
      const __m256i up = _mm256_add_epi16(x, _mm256_set1_epi16(128));  // as low bytes are signed
      _mm256_store_si256((__m256i*)&low[8 * h], _mm256_shuffle_epi8(x, low_bytes));
      _mm256_store_si256((__m256i*)&high[8 * h], _mm256_shuffle_epi8(up, high_bytes));
      sums = _mm256_add_epi32(sums, _mm256_madd_epi16(x, _mm256_set1_epi16(12)));
    }
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    excess = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
    unit = row.unit;
  }
};

// The sums of one K block of 16 columns, in units: of 0-3 and 8-11, of 4-7 and 12-15.
template <int R>
inline __attribute__((always_inline)) void sum_bytes(const uint8_t* w, const RowBytes* rows,
                                                     __m256i (&sum)[R][kVecs]) {
  const __m256i nibble = _mm256_set1_epi8(15), place = _mm256_set1_epi32(256 << 16 | 1);
  const __m128i weights = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  const __m128i zip = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
#pragma GCC unroll 4
  for (int j = 0; j < kPairs; j += 4) {
    __m256i low[R], high[R];
#pragma GCC unroll 2
    for (int i = j; i < j + 4; i += 2) {  // int16 hold no more: 4 * 2 * 24 * 128
      // Columns 0-7 of two K pairs into the lower half, each column's two bytes together.
      const __m256i codes = _mm256_shuffle_epi8(
          _mm256_permute4x64_epi64(load_bytes(w + i * E2m1::kPairBytes), 0xD8),
          _mm256_broadcastsi128_si256(zip));
      const __m256i k[2] = {
          look_up(weights, _mm256_and_si256(codes, nibble)),
          look_up(weights, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble))};
      for (int r = 0; r < R; ++r)
        for (int odd = 0; odd < 2; ++odd) {
          const __m256i ls = _mm256_maddubs_epi16(k[odd], _mm256_set1_epi32(rows[r].low[i + odd]));
          const __m256i hs = _mm256_maddubs_epi16(k[odd], _mm256_set1_epi32(rows[r].high[i + odd]));
          const bool first = i == j && !odd;
          low[r] = first ? ls : _mm256_add_epi16(low[r], ls);
          high[r] = first ? hs : _mm256_add_epi16(high[r], hs);
          in_turn(low[r]);
          in_turn(high[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
      const __m256i part[kVecs] = {
          _mm256_madd_epi16(_mm256_unpacklo_epi16(low[r], high[r]), place),
          _mm256_madd_epi16(_mm256_unpackhi_epi16(low[r], high[r]), place)};
      for (int v = 0; v < kVecs; ++v) {
        sum[r][v] = j ? _mm256_add_epi32(sum[r][v], part[v]) : part[v];
        in_turn(sum[r][v]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v)
      sum[r][v] = _mm256_sub_epi32(sum[r][v], _mm256_set1_epi32(rows[r].excess));
}

// Columns 0-7 and 8-15 to 0-3, 8-11 and 4-7, 12-15, or back.
inline void exchange(Vec* x) {
  const Vec low = _mm256_permute2f128_ps(x[0], x[1], 0x20);
  x[1] = _mm256_permute2f128_ps(x[0], x[1], 0x31);
  x[0] = low;
}

// One K block of one row by the chains.
inline __attribute__((noinline)) void add_by_chains(const uint8_t* w, const uint8_t* sf,
                                                    const RowBlock& a, Vec* total) {
  float sums[kCols];
  exchange(total);
  for (int v = 0; v < kVecs; ++v) store_vec(sums + v * kLanes, total[v]);
  add_direct<E2m1, 1>(w, sf, &a, 1, sums);
  for (int v = 0; v < kVecs; ++v) total[v] = load_vec(sums + v * kLanes);
  exchange(total);
}

// R rows of one tile over some K blocks; bytes and a are [K block][row].
template <int R>
__attribute__((noinline)) void add_bytes(const uint8_t* w, const uint8_t* sf, const RowBytes* bytes,
                                         const RowBlock* a, int blocks, float* acc) {
  Vec total[R][kVecs];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVecs; ++v) total[r][v] = load_vec(acc + r * kCols + v * kLanes);
    exchange(total[r]);
  }
  for (int b = 0; b < blocks; ++b, bytes += R, a += R) {
    Vec scale[kVecs];
    load_scales<E2m1>(sf, scale);
    exchange(scale);
    prefetch_block<E2m1>(w);
    __m256i units[R][kVecs];
    if (R > 1 || bytes->exact) sum_bytes<R>(w, bytes, units);
    for (int r = 0; r < R; ++r) {
      if (!bytes[r].exact) {
        add_by_chains(w, sf, a[r], total[r]);
        continue;
      }
      const Vec unit = broadcast_vec(&bytes[r].unit);
      for (int v = 0; v < kVecs; ++v)
        total[r][v] = fma_vec(_mm256_cvtepi32_ps(units[r][v]), _mm256_mul_ps(scale[v], unit),
                              total[r][v]);
    }
    w += kPairs * E2m1::kPairBytes;
    sf += E2m1::kScaleBytes;
  }
  for (int r = 0; r < R; ++r) {
    exchange(total[r]);
    for (int v = 0; v < kVecs; ++v) store_vec(acc + r * kCols + v * kLanes, total[r][v]);
  }
}

enum : int { kByteRows = 4, kByteBlocks = 128 };  // K blocks of all rows made ready at once

template <int R>
inline void add_few_exact(const Operands& x, int first, int n) {
  if constexpr (R > 1)
    if (n < R) return add_few_exact<R - 1>(x, first, n);
  RowBytes bytes[kByteBlocks];
  RowBlock widened[kByteBlocks];
  const int step = kByteBlocks / R;
  for (int b = 0; b < x.blocks; b += step) {
    const int count = x.blocks - b < step ? x.blocks - b : step;
    RowRange range;
    for (int j = 0; j < count; ++j)
      for (int r = 0; r < R; ++r) {
        const uint16_t* a = x.row(first + r) + (b + j) * kBlock;
        RowUnits units;
        RowBytes& row = bytes[j * R + r];
        row.exact = to_units(a, units, range);
        row.fill(units);
        if (!row.exact) widen_row<E2m1>(a, widened[j * R + r], range);
      }
    const bool near = range.is_near();
    for (int t = 0; t < x.tiles; ++t)
      if (near && tile_is_near<E2m1>(x, t, b, count)) {
        const TileAt<E2m1> at(x, t, b, first);
        add_bytes<R>(at.w, at.sf, bytes, widened, count, at.acc);
      } else {
        add_chunk<E2m1>(part_of(x, t, b, count), first, R);
      }
  }
}

}  // namespace
}  // namespace di_gemm
