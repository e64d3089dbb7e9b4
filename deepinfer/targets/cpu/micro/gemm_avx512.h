// AVX-512 level (F, BW, VL, DQ): a vector is the whole tile of 16 columns. MXCSR has FTZ and DAZ
// set. VDPBF16PS is not used: it adds in another order and keeps no denormal rule of ours.
#pragma once
#include <immintrin.h>

#include "gemm_formats.h"

namespace di_gemm {
namespace {

enum : int { kMaxRows = 12, kVecs = 1, kLanes = 16 };
typedef __m512 Vec;

inline Vec zero_vec() { return _mm512_setzero_ps(); }
inline Vec load_vec(const float* p) { return _mm512_loadu_ps(p); }
inline void store_vec(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline Vec broadcast_vec(const float* p) { return _mm512_set1_ps(*p); }
inline Vec fma_vec(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec add_vec(Vec a, Vec b) { return _mm512_add_ps(a, b); }

inline __m512i odd_mask() { return _mm512_set1_epi32((int)0xFFFF0000u); }

// What is known of the sizes of rows widened so far, as bf16 bits less the sign: the largest, and
// the smallest but zero, less one.
struct RowRange {
  __m512i high = _mm512_setzero_si512(), low = _mm512_set1_epi16(-1);

  void add(__m512i x) {
    const __m512i size = _mm512_and_si512(x, _mm512_set1_epi16(0x7FFF));
    high = _mm512_max_epu16(high, size);
    low = _mm512_min_epu16(low, _mm512_sub_epi16(size, _mm512_set1_epi16(1)));
  }
  bool is_near() const {
    const __m512i most = _mm512_set1_epi16((short)(((127 + kNearRow) << 7) - 1));
    const __m512i least = _mm512_set1_epi16((short)(((127 - kNearRow) << 7) - 1));
    return !(_mm512_cmpgt_epu16_mask(high, most) | _mm512_cmplt_epu16_mask(low, least));
  }
};

template <class Format>
inline void widen_row(const uint16_t* a, RowBlock& row, RowRange& range) {
  __m512i pairs = _mm512_loadu_si512(a);
  if (Format::kScaleBytes) range.add(pairs);
  _mm512_storeu_ps(row.v[0], _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
  _mm512_storeu_ps(row.v[1], _mm512_castsi512_ps(_mm512_and_si512(pairs, odd_mask())));
}

// Widens the codes of one K pair, without their scale. `load_scales` gives what a K block's sums
// are then multiplied by.
template <class Format>
struct Widener;
template <class Format>
inline void load_scales(const uint8_t* sf, Vec* scale);

template <>
struct Widener<Bf16> {
  void widen(const uint8_t* w, Vec* even, Vec* odd) const {
    __m512i pairs = _mm512_loadu_si512(w);
    even[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    odd[0] = _mm512_castsi512_ps(_mm512_and_si512(pairs, odd_mask()));
  }
};

template <>
inline void load_scales<Bf16>(const uint8_t*, Vec* scale) {
  scale[0] = _mm512_set1_ps(1.0f);
}

// The code's bits, moved into fp16, read as value * 2^-8 (fp16 has bias 15, e4m3 has 7), denormals
// included: VCVTPH2PS ignores DAZ. The offset goes into the scale.
template <>
struct Widener<E4m3> {
  void widen(const uint8_t* w, Vec* even, Vec* odd) const {
    __m256i codes = _mm256_loadu_si256((const __m256i*)w);  // a 16-bit lane holds a column's pair
    even[0] = split(_mm256_slli_epi16(codes, 8));
    odd[0] = split(codes);
  }
  static Vec split(__m256i high_bytes) {
    // s|7 bits to s|0|7 bits: shift right by one arithmetically, clear the copy of the sign.
    __m256i half = _mm256_and_si256(_mm256_srai_epi16(high_bytes, 1),
                                    _mm256_set1_epi16((short)0xBF80));
    return _mm512_cvtph_ps(half);
  }
};

template <>
inline void load_scales<E4m3>(const uint8_t* sf, Vec* scale) {
  scale[0] = _mm512_castsi512_ps(_mm512_set1_epi32((sf[0] + 8) << 23));
}

template <>
struct Widener<E2m1> {
  Vec table = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f,
                             -3.f, -4.f, -6.f);
  void widen(const uint8_t* w, Vec* even, Vec* odd) const {
    // The permutation reads the low four bits of a lane only.
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)w));
    even[0] = _mm512_permutexvar_ps(codes, table);
    odd[0] = _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), table);
  }
};

template <>
inline void load_scales<E2m1>(const uint8_t* sf, Vec* scale) {
  const __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)sf));
  scale[0] = _mm512_castsi512_ps(_mm512_slli_epi32(codes, 23));
}

}  // namespace
}  // namespace di_gemm
