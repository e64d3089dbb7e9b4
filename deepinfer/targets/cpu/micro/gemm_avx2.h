// AVX2 level (AVX2, FMA, F16C): vectors of 8 columns, two to a tile. MXCSR has FTZ and DAZ set.
#pragma once
#include <immintrin.h>

#include "gemm_formats.h"

namespace di_gemm {
namespace {

// 6 rows x 2 vectors keep 12 chains in flight; 4 of the 16 registers hold weights and a row value.
enum : int { kMaxRows = 6, kDirectRows = 2, kVecs = 2, kLanes = 8 };
typedef __m256 Vec;

inline Vec zero_vec() { return _mm256_setzero_ps(); }
inline Vec load_vec(const float* p) { return _mm256_loadu_ps(p); }
inline void store_vec(float* p, Vec x) { _mm256_storeu_ps(p, x); }
inline Vec broadcast_vec(const float* p) { return _mm256_broadcast_ss(p); }
inline Vec fma_vec(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec add_vec(Vec a, Vec b) { return _mm256_add_ps(a, b); }

inline __m256i odd_mask() { return _mm256_set1_epi32((int)0xFFFF0000u); }

inline void widen_row(const uint16_t* a, float (*row)[kPairs]) {
  for (int half = 0; half < 2; ++half) {
    __m256i pairs = _mm256_loadu_si256((const __m256i*)(a + 16 * half));
    _mm256_store_si256((__m256i*)&row[0][8 * half], _mm256_slli_epi32(pairs, 16));
    _mm256_store_si256((__m256i*)&row[1][8 * half], _mm256_and_si256(pairs, odd_mask()));
  }
}

// Widens the K pairs of one block, one at a time: `even[v]` and `odd[v]` are columns 8v..8v+7.
template <class Format>
struct PairWidener;

template <>
struct PairWidener<Bf16> {
  explicit PairWidener(const uint8_t*) {}
  void widen(const uint8_t* w, Vec* even, Vec* odd) const {
    for (int v = 0; v < kVecs; ++v) {
      __m256i pairs = _mm256_loadu_si256((const __m256i*)(w + 32 * v));
      even[v] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
      odd[v] = _mm256_castsi256_ps(_mm256_and_si256(pairs, odd_mask()));
    }
  }
};

// The code's bits, moved into fp16, read as value * 2^-8 (fp16 has bias 15, e4m3 has 7), denormals
// included: VCVTPH2PS ignores DAZ. The offset goes into the scale; the product is exact.
template <>
struct PairWidener<E4m3> {
  Vec scale;
  explicit PairWidener(const uint8_t* sf)
      : scale(_mm256_castsi256_ps(_mm256_set1_epi32((sf[0] + 8) << 23))) {}
  void widen(const uint8_t* w, Vec* even, Vec* odd) const {
    __m256i codes = _mm256_loadu_si256((const __m256i*)w);  // a 16-bit lane holds a column's pair
    split(_mm256_slli_epi16(codes, 8), even);
    split(codes, odd);
  }
  void split(__m256i high_bytes, Vec* out) const {
    // s|7 bits to s|0|7 bits: shift right by one arithmetically, clear the copy of the sign.
    __m256i half = _mm256_and_si256(_mm256_srai_epi16(high_bytes, 1),
                                    _mm256_set1_epi16((short)0xBF80));
    out[0] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), scale);
    out[1] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), scale);
  }
};

// The same by way of fp16, whose high byte alone holds an e2m1 value * 2^-14.
template <>
struct PairWidener<E2m1> {
  Vec scale[kVecs];
  explicit PairWidener(const uint8_t* sf) {
    for (int v = 0; v < kVecs; ++v) {
      __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(sf + 8 * v)));
      codes = _mm256_add_epi32(codes, _mm256_set1_epi32(14));
      scale[v] = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 23));
    }
  }
  void widen(const uint8_t* w, Vec* even, Vec* odd) const {
    __m128i codes = _mm_loadu_si128((const __m128i*)w), nibble = _mm_set1_epi8(15);
    split(_mm_and_si128(codes, nibble), even);
    split(_mm_and_si128(_mm_srli_epi16(codes, 4), nibble), odd);
  }
  void split(__m128i codes, Vec* out) const {
    const __m128i table = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, -128, -126, -124, -122, -120,
                                        -118, -116, -114);
    __m128i high = _mm_shuffle_epi8(table, codes), zero = _mm_setzero_si128();
    out[0] = _mm256_mul_ps(_mm256_cvtph_ps(_mm_unpacklo_epi8(zero, high)), scale[0]);
    out[1] = _mm256_mul_ps(_mm256_cvtph_ps(_mm_unpackhi_epi8(zero, high)), scale[1]);
  }
};

}  // namespace
}  // namespace di_gemm
