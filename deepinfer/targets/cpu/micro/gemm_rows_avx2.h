// Three to six rows on AVX2: weights are widened in registers instead of being stored as a slab of
// fp32. While FMAs use two of the four vector ports, widening uses the others.
//
// The columns of a vector are not neighbours: splitting a vector of bf16 pairs into fp32 by a shift
// and a mask is the cheapest widening, so a tile is its even and its odd columns. Sums come back
// into natural order once per call.
#pragma once
#include "gemm_avx2.h"
#include "gemm_vector.h"

namespace di_gemm {
namespace {

inline __m256i load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }

// The sums of a row of a tile, even columns and odd columns.
struct Sums {
  Vec v[kVecs];

  // A denormal becomes the zero of its sign, whatever MXCSR says.
  static Vec flush(Vec x) {
    const __m256i bits = _mm256_castps_si256(x), size = _mm256_set1_epi32(0x7FFFFFFF);
    const __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x00800000),
                                            _mm256_and_si256(bits, size));
    return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_and_si256(tiny, size), bits));
  }
  // Exchanges the middle two of the four pairs of columns.
  static Vec in_order(Vec x) {
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(x), 0xD8));
  }
  void load(const float* acc) {
    const Vec low = flush(load_vec(acc)), high = flush(load_vec(acc + kLanes));
    v[0] = in_order(_mm256_shuffle_ps(low, high, 0x88));
    v[1] = in_order(_mm256_shuffle_ps(low, high, 0xDD));
  }
  void store(float* acc) const {
    const Vec low = _mm256_unpacklo_ps(v[0], v[1]), high = _mm256_unpackhi_ps(v[0], v[1]);
    store_vec(acc, _mm256_permute2f128_ps(low, high, 0x20));
    store_vec(acc + kLanes, _mm256_permute2f128_ps(low, high, 0x31));
  }
};

// A vector of 16 bf16 columns to its even and its odd columns.
inline void split_columns(__m256i columns, Vec* out) { split_pairs(columns, out, out + 1); }

// `widen` gives a K pair's even or odd k: of even and of odd columns; `scales` what the sums of a K
// block are multiplied by.
template <class Format>
struct Widen;

// The bits of a code, moved into bf16, are value * 2^-120, denormal if the code is: so DAZ must be
// off, and rows are multiplied by 2^80 beforehand, which keeps products from being flushed.
template <>
struct Widen<E4m3> {
  enum : int { kRowShift = 80 };
  static __m256i codes(__m256i high_bytes) {
    // s|7 bits to s|0000|7 bits: shift arithmetically, clear the copies of the sign.
    return _mm256_and_si256(_mm256_srai_epi16(high_bytes, 4), _mm256_set1_epi16((short)0x87F0));
  }
  // Of one K pair. Even codes are high bytes a byte earlier, which saves a shift; a block's first
  // pair may have no byte before it.
  template <int odd>
  static void widen(const uint8_t* w, bool first, Vec* out) {
    const __m256i high_bytes = odd     ? load_bytes(w)
                               : first ? _mm256_slli_epi16(load_bytes(w), 8)
                                       : load_bytes(w - 1);
    split_columns(codes(high_bytes), out);
  }
  static void scales(const uint8_t* sf, Vec* scale) {
    scale[0] = scale[1] =
        _mm256_castsi256_ps(_mm256_set1_epi32((sf[0] + 120 - kRowShift) << 23));
  }
};

// The even or the odd chains of R rows over one K block, from +0.
template <class Format, int R, int odd>
inline __attribute__((always_inline)) void run_few(const uint8_t* w, const RowBlock* a,
                                                   Vec (&chain)[R][kVecs]) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) chain[r][v] = zero_vec();
#pragma GCC unroll 16
  for (int j = 0; j < kPairs; ++j) {
    Vec weights[kVecs];
    Widen<Format>::template widen<odd>(w + j * Format::kPairBytes, j == 0, weights);
    for (int r = 0; r < R; ++r) {
      const Vec x = broadcast_vec(&a[r].v[odd][j]);
      for (int v = 0; v < kVecs; ++v) chain[r][v] = fma_vec(x, weights[v], chain[r][v]);
    }
  }
}

// R rows of one tile.
template <class Format, int R>
__attribute__((noinline)) void add_few_rows(const TileRun& run, const RowBlock* a) {
  const uint8_t *w = run.w, *sf = run.sf;
  Sums total[R];
  for (int r = 0; r < R; ++r) total[r].load(run.acc + r * kCols);
  for (int b = 0; b < run.blocks; ++b, a += R) {
    Vec even[R][kVecs], odd[R][kVecs], scale[kVecs];
    prefetch_block<Format>(w);
    run_few<Format, R, 0>(w, a, even);
    run_few<Format, R, 1>(w, a, odd);
    Widen<Format>::scales(sf, scale);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVecs; ++v)
        total[r].v[v] = fma_vec(add_vec(even[r][v], odd[r][v]), scale[v], total[r].v[v]);
    w += kPairs * Format::kPairBytes;
    sf += Format::kScaleBytes;
  }
  for (int r = 0; r < R; ++r) total[r].store(run.acc + r * kCols);
}

}  // namespace
}  // namespace di_gemm
