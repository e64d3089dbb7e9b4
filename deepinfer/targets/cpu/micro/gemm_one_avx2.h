// One or two rows on AVX2: the even and the odd chains run at once, for one row those of two tiles,
// so that eight chains hide the latency of an FMA.
#pragma once
#include "gemm_rows_avx2.h"

namespace di_gemm {
namespace {

// `widen` gives four vectors of one K pair's weights, `spread` the row values they multiply, `join`
// the sums of their chains as even and odd columns. kPrefetch: also for one row.
template <class Format>
struct One;

// Vectors: even k and odd k, each of even and of odd columns.
template <>
struct One<E4m3> {
  enum : bool { kPrefetch = true };
  void widen(const uint8_t* w, Vec* out) const {
    const __m256i pairs = load_bytes(w);
    split_columns(Widen<E4m3>::codes(_mm256_slli_epi16(pairs, 8)), out);
    split_columns(Widen<E4m3>::codes(pairs), out + 2);
  }
  static void spread(const RowBlock& a, int pair, Vec* x) {
    x[0] = x[1] = broadcast_vec(&a.v[0][pair]);
    x[2] = x[3] = broadcast_vec(&a.v[1][pair]);
  }
  static void join(const Vec* chain, Vec* sum) {
    for (int v = 0; v < kVecs; ++v) sum[v] = add_vec(chain[v], chain[v + 2]);
  }
};

// A multiplication moves the even columns up instead of a shift: shifts and shuffles share a port
// with half of the FMAs. Compilers would turn a constant factor back into the shift.
inline __m256i up_factor() {
  __m256i factor = _mm256_set1_epi32(1 << 16);
  __asm__("" : "+x"(factor));
  return factor;
}

// Vectors: half of the even or of the odd columns, the even k in the lower and the odd k in the
// upper half, as the nibbles of a byte come.
template <>
struct One<E2m1> {
  enum : bool { kPrefetch = false };  // one row is bound by its instructions: no more of them
  __m256i up = up_factor();
  void widen(const uint8_t* w, Vec* out) const {
    const __m256i codes = _mm256_and_si256(
        _mm256_srlv_epi32(load_twice(w), _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4)),
        _mm256_set1_epi8(15));
    const __m256i low = Widen<E2m1>::low(codes), high = Widen<E2m1>::high(codes);
    const __m256i columns[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
    for (int h = 0; h < 2; ++h) {
      out[2 * h] = _mm256_castsi256_ps(_mm256_mullo_epi32(columns[h], up));
      out[2 * h + 1] = _mm256_castsi256_ps(_mm256_and_si256(columns[h], odd_mask()));
    }
  }
  static void spread(const RowBlock& a, int pair, Vec* x) {
    x[0] = x[1] = x[2] = x[3] = _mm256_blend_ps(broadcast_vec(&a.v[0][pair]),
                                                broadcast_vec(&a.v[1][pair]), 0xF0);
  }
  static void join(const Vec* chain, Vec* sum) {
    for (int v = 0; v < kVecs; ++v)
      sum[v] = add_vec(_mm256_permute2f128_ps(chain[v], chain[v + 2], 0x20),
                       _mm256_permute2f128_ps(chain[v], chain[v + 2], 0x31));
  }
};

// R rows of T tiles.
template <class Format, int R, int T>
__attribute__((noinline)) void add_one(const TileRun& run, const RowBlock* a) {
  const uint8_t *w = run.w, *sf = run.sf;
  const One<Format> one;
  Sums total[T][R];
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) total[t][r].load(run.acc + t * run.acc_step + r * kCols);
  for (int b = 0; b < run.blocks; ++b, a += R) {
    Vec chain[T][R][4];
    for (int t = 0; t < T; ++t)
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < 4; ++c) chain[t][r][c] = zero_vec();
    if (R > 1 || One<Format>::kPrefetch)
      for (int t = 0; t < T; ++t) prefetch_block<Format>(w + t * run.w_step);
#pragma GCC unroll 4
    for (int j = 0; j < kPairs; ++j) {
      Vec x[R][4];
      for (int r = 0; r < R; ++r) One<Format>::spread(a[r], j, x[r]);
      for (int t = 0; t < T; ++t) {
        Vec weights[4];
        one.widen(w + t * run.w_step + j * Format::kPairBytes, weights);
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < 4; ++c) chain[t][r][c] = fma_vec(x[r][c], weights[c], chain[t][r][c]);
      }
    }
    for (int t = 0; t < T; ++t) {
      Vec scale[kVecs], sum[kVecs];
      Widen<Format>::scales(sf + t * run.sf_step, scale);
      for (int r = 0; r < R; ++r) {
        One<Format>::join(chain[t][r], sum);
        for (int v = 0; v < kVecs; ++v)
          total[t][r].v[v] = fma_vec(sum[v], scale[v], total[t][r].v[v]);
      }
    }
    w += kPairs * Format::kPairBytes;
    sf += Format::kScaleBytes;
  }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) total[t][r].store(run.acc + t * run.acc_step + r * kCols);
}

}  // namespace
}  // namespace di_gemm
