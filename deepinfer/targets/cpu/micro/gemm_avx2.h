// AVX2 level (AVX2, FMA, F16C): vectors of 8 columns, two to a tile. MXCSR has FTZ and DAZ set.
#pragma once
#include <immintrin.h>

#include "gemm_formats.h"

namespace di_gemm {
namespace {

// 4 rows x 2 vectors keep 8 chains in flight, which hides an FMA's latency of 4 cycles at two a
// cycle; the chains of more rows would not stay in registers.
enum : int { kMaxRows = 4, kVecs = 2, kLanes = 8 };
typedef __m256 Vec;

inline Vec zero_vec() { return _mm256_setzero_ps(); }
inline Vec load_vec(const float* p) { return _mm256_loadu_ps(p); }
inline void store_vec(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec broadcast_vec(const float* p) { return _mm256_broadcast_ss(p); }
inline Vec fma_vec(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec add_vec(Vec a, Vec b) { return _mm256_add_ps(a, b); }

inline __m256i odd_mask() { return _mm256_set1_epi32((int)0xFFFF0000u); }

// What is known of the sizes of rows widened so far, as bf16 bits less the sign: the largest, and
// the smallest but zero, less one.
struct RowRange {
  __m256i high = _mm256_setzero_si256(), low = _mm256_set1_epi16(-1);

  void add(__m256i x) {
    const __m256i size = _mm256_and_si256(x, _mm256_set1_epi16(0x7FFF));
    high = _mm256_max_epu16(high, size);
    low = _mm256_min_epu16(low, _mm256_sub_epi16(size, _mm256_set1_epi16(1)));
  }
  bool is_near() const {
    const __m256i most = _mm256_set1_epi16((short)(((127 + kNearRow) << 7) - 1));
    const __m256i least = _mm256_set1_epi16((short)(((127 - kNearRow) << 7) - 1));
    const __m256i fits = _mm256_and_si256(
        _mm256_cmpeq_epi16(_mm256_max_epu16(high, most), most),
        _mm256_cmpeq_epi16(_mm256_min_epu16(low, least), least));
    return _mm256_movemask_epi8(fits) == -1;
  }
};

template <class Format>
inline void widen_row(const uint16_t* a, RowBlock& row, RowRange& range) {
  for (int half = 0; half < 2; ++half) {
    __m256i pairs = _mm256_loadu_si256((const __m256i*)(a + 16 * half));
    if (Format::kScaleBytes) range.add(pairs);
    _mm256_store_si256((__m256i*)&row.v[0][8 * half], _mm256_slli_epi32(pairs, 16));
    _mm256_store_si256((__m256i*)&row.v[1][8 * half], _mm256_and_si256(pairs, odd_mask()));
  }
}

// Widens the codes of one K pair, without their scale: `even[v]` and `odd[v]` are columns
// 8v..8v+7. `load_scales` gives what a K block's sums are then multiplied by.
template <class Format>
struct Widener;
template <class Format>
inline void load_scales(const uint8_t* sf, Vec* scale);

inline void split_pairs(__m256i pairs, Vec* even, Vec* odd) {
  *even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  *odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, odd_mask()));
}

template <>
struct Widener<Bf16> {
  void widen(const uint8_t* w, Vec* even, Vec* odd) const {
    for (int v = 0; v < kVecs; ++v)
      split_pairs(_mm256_loadu_si256((const __m256i*)(w + 32 * v)), even + v, odd + v);
  }
};

template <>
inline void load_scales<Bf16>(const uint8_t*, Vec* scale) {
  scale[0] = scale[1] = _mm256_set1_ps(1.0f);
}

// The code's bits, moved into fp16, read as value * 2^-8 (fp16 has bias 15, e4m3 has 7), denormals
// included: VCVTPH2PS ignores DAZ. The offset goes into the scale. In halves of 128 bits, because
// taking the upper half of a register costs as much as a conversion.
template <>
struct Widener<E4m3> {
  void widen(const uint8_t* w, Vec* even, Vec* odd) const {
    for (int v = 0; v < kVecs; ++v) {  // a 16-bit lane holds a column's pair
      const __m128i codes = _mm_loadu_si128((const __m128i*)(w + 16 * v));
      even[v] = from_high_bytes(_mm_slli_epi16(codes, 8));
      odd[v] = from_high_bytes(codes);
    }
  }
  static Vec from_high_bytes(__m128i codes) {
    // s|7 bits to s|0|7 bits: shift right by one arithmetically, clear the copy of the sign.
    return _mm256_cvtph_ps(
        _mm_and_si128(_mm_srai_epi16(codes, 1), _mm_set1_epi16((short)0xBF80)));
  }
};

template <>
inline void load_scales<E4m3>(const uint8_t* sf, Vec* scale) {
  scale[0] = scale[1] = _mm256_castsi256_ps(_mm256_set1_epi32((sf[0] + 8) << 23));
}

// Two look-ups make the high and the low byte of 32 bf16 values.
template <>
struct Widener<E2m1> {
  void widen(const uint8_t* w, Vec* even, Vec* odd) const {
    // Bytes to 16-bit lanes, columns 0-3, 8-11, 4-7, 12-15: so that the interleaving below, which
    // stays within halves, puts 0-7 into one vector and 8-15 into the other.
    const __m256i spread = _mm256_setr_epi8(0, -1, 1, -1, 2, -1, 3, -1, 8, -1, 9, -1, 10, -1, 11,
                                            -1, 4, -1, 5, -1, 6, -1, 7, -1, 12, -1, 13, -1, 14, -1,
                                            15, -1);
    const __m256i wide = _mm256_shuffle_epi8(
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)w)), spread);
    const __m256i nibbles = _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi16(wide, 4)),
                                             _mm256_set1_epi8(15));
    const __m256i high = _mm256_shuffle_epi8(
        _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, (char)0x80, (char)0xBF, (char)0xBF,
            (char)0xBF, (char)0xC0, (char)0xC0, (char)0xC0, (char)0xC0)), nibbles);
    const __m256i low = _mm256_shuffle_epi8(
        _mm256_broadcastsi128_si256(_mm_setr_epi8(
            0, 0, (char)0x80, (char)0xC0, 0, 0x40, (char)0x80, (char)0xC0, 0, 0, (char)0x80,
            (char)0xC0, 0, 0x40, (char)0x80, (char)0xC0)), nibbles);
    split_pairs(_mm256_unpacklo_epi8(low, high), even, odd);
    split_pairs(_mm256_unpackhi_epi8(low, high), even + 1, odd + 1);
  }
};

template <>
inline void load_scales<E2m1>(const uint8_t* sf, Vec* scale) {
  for (int v = 0; v < kVecs; ++v) {
    const __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(sf + 8 * v)));
    scale[v] = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 23));
  }
}

}  // namespace
}  // namespace di_gemm
