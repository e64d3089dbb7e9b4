// One or two rows of e4m3 weights on AVX2: the even and the odd chains run at once.
//
// One tile at a time: its weights and the next one's are one stream of memory, which prefetching
// keeps up with; two tiles at once would hide more of an FMA's latency, and measured slower.
#pragma once
#include "gemm_rows_avx2.h"

namespace di_gemm {
namespace {

// The chains of a row: even k and odd k, each of even and of odd columns.
typedef Vec Chains[2 * kVecs];

template <int R>
inline __attribute__((always_inline)) void add_pair(const uint8_t* w, bool first, const RowBlock* a,
                                                    int j, Chains* chain) {
  Vec even[kVecs], odd[kVecs];
  Widen<E4m3>::widen<0>(w, first, even);
  Widen<E4m3>::widen<1>(w, first, odd);
  for (int r = 0; r < R; ++r) {
    const Vec xe = broadcast_vec(&a[r].v[0][j]), xo = broadcast_vec(&a[r].v[1][j]);
    for (int v = 0; v < kVecs; ++v) {
      chain[r][v] = fma_vec(xe, even[v], chain[r][v]);
      chain[r][kVecs + v] = fma_vec(xo, odd[v], chain[r][kVecs + v]);
    }
  }
}

// R rows of one tile.
template <int R>
__attribute__((noinline)) void add_one(const TileRun& run, const RowBlock* a) {
  const uint8_t *w = run.w, *sf = run.sf;
  Sums total[R];
  for (int r = 0; r < R; ++r) total[r].load(run.acc + r * kCols);
  for (int b = 0; b < run.blocks; ++b, a += R) {
    Chains chain[R];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 2 * kVecs; ++c) chain[r][c] = zero_vec();
    prefetch_block<E4m3>(w);
    add_pair<R>(w, true, a, 0, chain);
#pragma GCC unroll 15
    for (int j = 1; j < kPairs; ++j) add_pair<R>(w + j * E4m3::kPairBytes, false, a, j, chain);
    Vec scale[kVecs];
    Widen<E4m3>::scales(sf, scale);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVecs; ++v)
        total[r].v[v] = fma_vec(add_vec(chain[r][v], chain[r][kVecs + v]), scale[v], total[r].v[v]);
    w += kPairs * E4m3::kPairBytes;
    sf += E4m3::kScaleBytes;
  }
  for (int r = 0; r < R; ++r) total[r].store(run.acc + r * kCols);
}

}  // namespace
}  // namespace di_gemm
