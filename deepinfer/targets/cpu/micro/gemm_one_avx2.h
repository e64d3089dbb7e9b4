// One or two rows on AVX2: the even and the odd chains run at once, for one row those of two tiles,
// so that eight chains hide the latency of an FMA.
#pragma once
#include "gemm_rows_avx2.h"

namespace di_gemm {
namespace {

// `widen` gives four vectors of one K pair's weights, `spread` the row values they multiply, `join`
// the sums of their chains as even and odd columns.
template <class Format>
struct One;

// Vectors: even k and odd k, each of even and of odd columns.
template <>
struct One<E4m3> {
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
