// e2m1 weights in integers on AVX2: the bits of the chains of FMAs, for fewer instructions.
//
// A weight is a whole number of halves, at most 12 of them. If the 32 values of a row's K block are
// whole multiples of a unit, at most 32639 (two signed bytes) of it, then every sum the chains go
// through is a whole multiple of half a unit, below 32 * 32639 * 12 < 2^24 of it: fp32 holds it
// exactly, so the chains round nothing, and integers give the same sum in any order. The unit is
// 2^-14 of the power of two in the largest value, so fp8 values down to 2^-11 of that always are
// such multiples. Blocks that are not take the chains. As there, sizes must be near 1
// (gemm_formats.h), which keeps everything else from being flushed.
#pragma once
#include "gemm_few_avx2.h"
#include "gemm_tile.h"

namespace di_gemm {
namespace {

enum : int { kUnitBits = 14 };

// A row's K block as int16 pairs, the even k in the lower half; `unit` is that of the sums.
struct alignas(64) RowUnits {
  int32_t pair[kPairs];
  float unit;
};

// Whether the 32 bf16 values are such multiples. They are near 1.
inline bool to_units(const uint16_t* a, RowUnits& out, RowRange& range) {
  const __m256i pairs[2] = {load_bytes((const uint8_t*)a), load_bytes((const uint8_t*)(a + 16))};
  const __m256i size = _mm256_set1_epi16(0x7FFF);
  for (int h = 0; h < 2; ++h) range.add(pairs[h]);
  const __m256i most = _mm256_max_epu16(_mm256_and_si256(pairs[0], size),
                                        _mm256_and_si256(pairs[1], size));
  const __m128i half = _mm_max_epu16(_mm256_castsi256_si128(most),
                                     _mm256_extracti128_si256(most, 1));
  const int largest = 0xFFFF & ~_mm_cvtsi128_si32(
      _mm_minpos_epu16(_mm_xor_si128(half, _mm_set1_epi16(-1))));
  const int exponent = largest ? largest >> 7 : 127;
  const Vec factor = _mm256_castsi256_ps(_mm256_set1_epi32((254 + kUnitBits - exponent) << 23));
  Vec lost = zero_vec();
  for (int h = 0; h < 2; ++h) {
    Vec part[2];
    __m256i units[2];
    split_pairs(pairs[h], part, part + 1);
    for (int odd = 0; odd < 2; ++odd) {
      const Vec x = _mm256_mul_ps(part[odd], factor);
      units[odd] = _mm256_cvtps_epi32(x);
      lost = _mm256_or_ps(lost, _mm256_sub_ps(x, _mm256_cvtepi32_ps(units[odd])));
    }
    _mm256_store_si256((__m256i*)&out.pair[8 * h],
                       _mm256_blend_epi16(units[0], _mm256_slli_epi32(units[1], 16), 0xAA));
  }
  out.unit = bits_to_f32((uint32_t)(exponent - kUnitBits - 1) << 23);
  // All bits of the largest value set is one unit too many; minus zero is nothing lost.
  return (largest & 0x7F) != 0x7F &&
         _mm256_testc_si256(_mm256_set1_epi32((int)0x80000000), _mm256_castps_si256(lost));
}

// Compilers regroup sums of integers, and then keep all the parts of them.
inline void in_turn(__m256i& sum) { __asm__("" : "+x"(sum)); }

// A look-up in the same 16 bytes for both halves.
inline __m256i look_up(__m128i table, __m256i codes) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}

// Some K blocks of one tile.
inline Operands part_of(const Operands& x, int tile, int block, int count) {
  const TileAt<E2m1> at(x, tile, block, 0);
  return {x.a + block * kBlock, x.lda, x.rows, at.w, at.sf, count, x.m, 1, at.acc};
}

}  // namespace
}  // namespace di_gemm
