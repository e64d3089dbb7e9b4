// The contract order on vector registers, shared by the AVX2 and AVX-512 levels.
//
// Needs from the level's header: Vec and its operations, kVecs, kLanes, Widener<Format>,
// load_scales<Format>.
#pragma once
#include "gemm_formats.h"

namespace di_gemm {
namespace {

template <class Format>
inline void widen_block(const uint8_t* w, const uint8_t* sf, bool near, WeightSlab& slab) {
  if (!near) return widen_block_scalar<Format>(w, sf, slab);
  const Widener<Format> widener;
  for (int j = 0; j < kPairs; ++j) {
    Vec even[kVecs], odd[kVecs];
    widener.widen(w + j * Format::kPairBytes, even, odd);
    for (int v = 0; v < kVecs; ++v) {
      store_vec(&slab.v[0][j][v * kLanes], even[v]);
      store_vec(&slab.v[1][j][v * kLanes], odd[v]);
    }
  }
  Vec scale[kVecs];
  load_scales<Format>(sf, scale);
  for (int v = 0; v < kVecs; ++v) store_vec(&slab.scale[v * kLanes], scale[v]);
}

// The even or the odd chains of R rows over one K block, from +0.
template <int R>
inline __attribute__((always_inline)) void run_chains(const WeightSlab& w, const RowBlock* a,
                                                      int odd, Vec (&chain)[R][kVecs]) {
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) chain[r][v] = zero_vec();
#pragma GCC unroll 16
  for (int j = 0; j < kPairs; ++j) {
    Vec weights[kVecs];
    for (int v = 0; v < kVecs; ++v) weights[v] = load_vec(&w.v[odd][j][v * kLanes]);
    for (int r = 0; r < R; ++r) {
      const Vec x = broadcast_vec(&a[r].v[odd][j]);
      for (int v = 0; v < kVecs; ++v) chain[r][v] = fma_vec(x, weights[v], chain[r][v]);
    }
  }
}

// One K block of R rows: acc[r] = acc[r] + (even chain + odd chain) * scale, where the product is
// exact, so that a fused multiply-add is the addition. The even chains of all rows run first, then
// the odd ones, so that R can be large; which chain runs first changes no bit.
template <int R>
inline __attribute__((always_inline)) void add_block(const WeightSlab& w, const RowBlock* a,
                                                     float* acc) {
  Vec even[R][kVecs], odd[R][kVecs];
  run_chains<R>(w, a, 0, even);
  run_chains<R>(w, a, 1, odd);
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) {
      float* out = acc + r * kCols + v * kLanes;
      const Vec scale = load_vec(&w.scale[v * kLanes]);
      store_vec(out, fma_vec(add_vec(even[r][v], odd[r][v]), scale, load_vec(out)));
    }
}

// Asks for a K block that comes soon: the loads' own distance covers too little of what a read from
// memory takes, and hardware stops at the end of a page. Tiles follow each other in memory, so that
// the next one is asked for, too.
template <class Format>
inline void prefetch_block(const uint8_t* w) {
  w += Format::kAhead;
  for (int i = 0; i < kPairs * Format::kPairBytes; i += 64) __builtin_prefetch(w + i);
}

// Some K blocks of R rows, widening the weights in registers: for so few rows that a slab of
// widened weights would be stored and loaded again for little use. `a` is [K block][row].
template <class Format, int R>
inline void add_direct(const uint8_t* w, const uint8_t* sf, const RowBlock* a, int blocks,
                       float* acc) {
  const Widener<Format> widener;
  Vec total[R][kVecs];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) total[r][v] = load_vec(acc + r * kCols + v * kLanes);
  for (int b = 0; b < blocks; ++b, a += R) {
    Vec even[R][kVecs], odd[R][kVecs], scale[kVecs];
    prefetch_block<Format>(w);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVecs; ++v) even[r][v] = odd[r][v] = zero_vec();
#pragma GCC unroll 4
    for (int j = 0; j < kPairs; ++j) {
      Vec we[kVecs], wo[kVecs];
      widener.widen(w + j * Format::kPairBytes, we, wo);
      for (int r = 0; r < R; ++r) {
        const Vec xe = broadcast_vec(&a[r].v[0][j]), xo = broadcast_vec(&a[r].v[1][j]);
        for (int v = 0; v < kVecs; ++v) {
          even[r][v] = fma_vec(xe, we[v], even[r][v]);
          odd[r][v] = fma_vec(xo, wo[v], odd[r][v]);
        }
      }
    }
    load_scales<Format>(sf, scale);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVecs; ++v)
        total[r][v] = fma_vec(add_vec(even[r][v], odd[r][v]), scale[v], total[r][v]);
    w += kPairs * Format::kPairBytes;
    sf += Format::kScaleBytes;
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) store_vec(acc + r * kCols + v * kLanes, total[r][v]);
}

template <class Format, int R>
inline void add_direct_rows(int n, const uint8_t* w, const uint8_t* sf, const RowBlock* a,
                            int blocks, float* acc) {
  if (n == R) return add_direct<Format, R>(w, sf, a, blocks, acc);
  if constexpr (R > 1) add_direct_rows<Format, R - 1>(n, w, sf, a, blocks, acc);
}

}  // namespace
}  // namespace di_gemm
