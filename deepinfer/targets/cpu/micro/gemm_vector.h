// The contract order on vector registers, shared by the AVX2 and AVX-512 levels.
//
// Needs from the level's header: Vec and its operations, kVecs, widen_row, PairWidener<Format>.
#pragma once
#include "gemm_formats.h"

namespace di_gemm {
namespace {

template <class Format>
inline void widen_block(const uint8_t* w, const uint8_t* sf, WeightSlab& slab) {
  if (!scales_are_plain<Format>(sf, 1)) return widen_block_scalar<Format>(w, sf, slab);
  const PairWidener<Format> widener(sf);
  for (int j = 0; j < kPairs; ++j) {
    Vec even[kVecs], odd[kVecs];
    widener.widen(w + j * Format::kPairBytes, even, odd);
    for (int v = 0; v < kVecs; ++v) {
      store_vec(&slab.v[0][j][v * (kCols / kVecs)], even[v]);
      store_vec(&slab.v[1][j][v * (kCols / kVecs)], odd[v]);
    }
  }
}

// One K block of R rows: acc[r] = acc[r] + (even chain + odd chain). The even chains of all rows
// run first, then the odd ones, so that R can be large; which chain runs first changes no bit.
template <int R>
inline __attribute__((always_inline)) void add_block(const WeightSlab& w, const RowSlab<R>& a,
                                                     float* acc) {
  const int lanes = kCols / kVecs;
  Vec chain[R][kVecs], even[R][kVecs];
  for (int odd = 0; odd < 2; ++odd) {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVecs; ++v) chain[r][v] = zero_vec();
    for (int j = 0; j < kPairs; ++j) {
      Vec weights[kVecs];
      for (int v = 0; v < kVecs; ++v) weights[v] = load_vec(&w.v[odd][j][v * lanes]);
      for (int r = 0; r < R; ++r) {
        Vec x = broadcast_vec(&a.v[r][odd][j]);
        for (int v = 0; v < kVecs; ++v) chain[r][v] = fma_vec(x, weights[v], chain[r][v]);
      }
    }
    if (odd) break;
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVecs; ++v) even[r][v] = chain[r][v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) {
      float* out = acc + r * kCols + v * lanes;
      store_vec(out, add_vec(load_vec(out), add_vec(even[r][v], chain[r][v])));
    }
}

// All K of R rows, widening the weights in registers: for so few rows that a slab of widened
// weights would be stored and loaded again for little use.
template <class Format, int R>
inline void add_direct(const uint8_t* w, const uint8_t* sf, const uint16_t* const* rows, int blocks,
                       float* acc) {
  const int lanes = kCols / kVecs;
  Vec total[R][kVecs];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) total[r][v] = load_vec(acc + r * kCols + v * lanes);
  for (int b = 0; b < blocks; ++b) {
    RowSlab<R> a;
    for (int r = 0; r < R; ++r) widen_row(rows[r] + b * kBlock, a.v[r]);
    Vec even[R][kVecs], odd[R][kVecs];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVecs; ++v) even[r][v] = odd[r][v] = zero_vec();
    const PairWidener<Format> widener(sf);
    for (int j = 0; j < kPairs; ++j) {
      Vec we[kVecs], wo[kVecs];
      widener.widen(w + j * Format::kPairBytes, we, wo);
      for (int r = 0; r < R; ++r) {
        Vec xe = broadcast_vec(&a.v[r][0][j]), xo = broadcast_vec(&a.v[r][1][j]);
        for (int v = 0; v < kVecs; ++v) {
          even[r][v] = fma_vec(xe, we[v], even[r][v]);
          odd[r][v] = fma_vec(xo, wo[v], odd[r][v]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVecs; ++v)
        total[r][v] = add_vec(total[r][v], add_vec(even[r][v], odd[r][v]));
    w += kPairs * Format::kPairBytes;
    sf += Format::kScaleBytes;
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < kVecs; ++v) store_vec(acc + r * kCols + v * lanes, total[r][v]);
}

}  // namespace
}  // namespace di_gemm
