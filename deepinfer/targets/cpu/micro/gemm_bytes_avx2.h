// e2m1 weights in integers, for up to four rows: weights stay bytes, 0..24 for -12..12; a row's
// value is two signed bytes.
#pragma once
#include "gemm_units_avx2.h"

namespace di_gemm {
namespace {

// Of four K pairs at a time, [even or odd k]: the low or high bytes that a vector of their weights
// is multiplied by, as `codes_of` lays it out. `excess` is what the sums have too much because the
// weights are 12 too large.
struct alignas(64) RowBytes {
  enum : int { kGroups = kPairs / 4 };
  __m256i low[kGroups][2], high[kGroups][2];
  int32_t excess;
  float unit;
  bool exact;

  // The bytes `at` of the first and the third pair, and of the second and the fourth.
  static __m256i choose(__m256i pairs, int at) {
    const __m256i first = _mm256_broadcastsi128_si256(_mm_set1_epi16(0x0800));
    const __m256i upper = _mm256_inserti128_si256(_mm256_setzero_si256(), _mm_set1_epi8(4), 1);
    return _mm256_shuffle_epi8(pairs, _mm256_add_epi8(_mm256_add_epi8(first, upper),
                                                      _mm256_set1_epi8((char)at)));
  }
  void fill(const RowUnits& row) {
    __m256i sums = _mm256_setzero_si256();
    for (int g = 0; g < kGroups; ++g) {
      const __m256i x =
          _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)&row.pair[4 * g]));
      const __m256i up = _mm256_add_epi16(x, _mm256_set1_epi16(128));  // as low bytes are signed
      for (int odd = 0; odd < 2; ++odd) {
        low[g][odd] = choose(x, 2 * odd);
        high[g][odd] = choose(up, 2 * odd + 1);
      }
      sums = _mm256_add_epi32(sums, _mm256_madd_epi16(x, _mm256_set1_epi16(12)));
    }
    __m128i sum = _mm256_castsi256_si128(sums);
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    excess = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
    unit = row.unit;
  }
};

// Codes of four K pairs, of columns 0-7 or 8-15: those of the first and the third pair in the lower
// half, of the second and the fourth in the upper, each column's two bytes together.
template <int part>
inline __m256i codes_of(const uint8_t* w) {
  const __m256i x = load_bytes(w), y = load_bytes(w + 2 * E2m1::kPairBytes);
  return part ? _mm256_unpackhi_epi8(x, y) : _mm256_unpacklo_epi8(x, y);
}

// Adds the halves of two vectors, each of four columns.
inline __m256i join_halves(__m256i x, __m256i y) {
  return _mm256_add_epi32(_mm256_permute2x128_si256(x, y, 0x20),
                          _mm256_permute2x128_si256(x, y, 0x31));
}

// The sums of one K block of columns 0-7 or 8-15, in units.
template <int R, int part>
inline __attribute__((always_inline)) void sum_bytes(const uint8_t* w, const RowBytes* rows,
                                                     __m256i (&sum)[R][kVecs]) {
  const __m256i nibble = _mm256_set1_epi8(15), place = _mm256_set1_epi32(256 << 16 | 1);
  const __m128i weights = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  __m256i wide[R][2];
#pragma GCC unroll 2
  for (int g = 0; g < RowBytes::kGroups; g += 2) {
    __m256i low[R], high[R];
#pragma GCC unroll 2
    for (int i = g; i < g + 2; ++i) {  // int16 hold no more: 4 * 2 * 24 * 128
      const __m256i codes = codes_of<part>(w + 4 * i * E2m1::kPairBytes);
      const __m256i k[2] = {
          look_up(weights, _mm256_and_si256(codes, nibble)),
          look_up(weights, _mm256_and_si256(_mm256_srli_epi16(codes, 4), nibble))};
      for (int r = 0; r < R; ++r)
        for (int odd = 0; odd < 2; ++odd) {
          const __m256i ls = _mm256_maddubs_epi16(k[odd], rows[r].low[i][odd]);
          const __m256i hs = _mm256_maddubs_epi16(k[odd], rows[r].high[i][odd]);
          const bool first = i == g && !odd;
          low[r] = first ? ls : _mm256_add_epi16(low[r], ls);
          high[r] = first ? hs : _mm256_add_epi16(high[r], hs);
          in_turn(low[r]);
          in_turn(high[r]);
        }
    }
    for (int r = 0; r < R; ++r) {
      const __m256i more[2] = {_mm256_madd_epi16(_mm256_unpacklo_epi16(low[r], high[r]), place),
                               _mm256_madd_epi16(_mm256_unpackhi_epi16(low[r], high[r]), place)};
      for (int v = 0; v < 2; ++v) wide[r][v] = g ? _mm256_add_epi32(wide[r][v], more[v]) : more[v];
    }
  }
  for (int r = 0; r < R; ++r)
    sum[r][part] = _mm256_sub_epi32(join_halves(wide[r][0], wide[r][1]),
                                    _mm256_set1_epi32(rows[r].excess));
}

// One K block of one row by the chains.
inline __attribute__((noinline)) void add_by_chains(const uint8_t* w, const uint8_t* sf,
                                                    const RowBlock& a, Vec* total) {
  float sums[kCols];
  for (int v = 0; v < kVecs; ++v) store_vec(sums + v * kLanes, total[v]);
  add_direct<E2m1, 1>(w, sf, &a, 1, sums);
  for (int v = 0; v < kVecs; ++v) total[v] = load_vec(sums + v * kLanes);
}

// R rows of one tile over some K blocks; bytes and a are [K block][row].
template <int R>
__attribute__((noinline)) void add_bytes(const uint8_t* w, const uint8_t* sf, const RowBytes* bytes,
                                         const RowBlock* a, int blocks, float* acc) {
  Vec total[R][kVecs];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) total[r][v] = load_vec(acc + r * kCols + v * kLanes);
  for (int b = 0; b < blocks; ++b, bytes += R, a += R) {
    Vec scale[kVecs];
    load_scales<E2m1>(sf, scale);
    prefetch_block<E2m1>(w);
    __m256i units[R][kVecs];
    if (R > 1 || bytes->exact) {
      sum_bytes<R, 0>(w, bytes, units);
      sum_bytes<R, 1>(w, bytes, units);
    }
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
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) store_vec(acc + r * kCols + v * kLanes, total[r][v]);
}

// K blocks of all rows made ready at once: many enough that a tile's weights are read as a stream,
// and a multiple of any number of rows. 68 KB of stack.
enum : int { kByteRows = 4, kByteBlocks = 96 };

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
