// Generic level: the contract order without FMA instructions, whatever MXCSR says of denormals.
//
// A fused multiply-add is done in float64 and then rounded to fp32, which is one rounding in
// effect. The product of two bf16 values is exact. With significands of 16 and 24 bits the sum is
// inexact only if its smaller term is below 2^-28 of the larger one. The larger one is then an fp32
// value, 2^-25 or more (relative) from the middle between two of them, so the sum, exact or not,
// rounds to it. The sum of two fp32 values needs no such care: 53 bits suffice (2 x 24 + 2).
#pragma once
#include "gemm_formats.h"
#include "mxcsr.h"

namespace di_gemm {
namespace {

enum : int { kMaxRows = 4 };

// Two columns at a time, in the vector types of GCC and clang: plain loops are left scalar.
typedef float F32x2 __attribute__((vector_size(8)));
typedef double F64x2 __attribute__((vector_size(16)));
typedef uint64_t U64x2 __attribute__((vector_size(16)));

// A sum rounded to fp32, and flushed if it is still tiny then: FTZ decides after rounding.
inline F64x2 round_to_f32(F64x2 sum) {
  const double limit = 0x1p-126 - 0x1p-151;  // this and more rounds to 2^-126 in 24 bits
  const F64x2 tiny = {limit, limit};
  const U64x2 sign = {1ull << 63, 1ull << 63};
  const U64x2 bits = (U64x2)sum, flushed = (U64x2)((F64x2)(bits & ~sign) < tiny);
  const F64x2 kept = (F64x2)(bits & (~flushed | sign));
  return __builtin_convertvector(__builtin_convertvector(kept, F32x2), F64x2);
}

// The even or the odd chains of 8 columns of one row over a K block, from +0, as fp32 values.
inline void run_chains(const float* a, const float (*w)[kCols], F64x2* chain) {
  for (int v = 0; v < 4; ++v) chain[v] = F64x2{0.0, 0.0};
  for (int j = 0; j < kPairs; ++j)
    for (int v = 0; v < 4; ++v) {
      F32x2 weights;
      memcpy(&weights, w[j] + 2 * v, 8);
      const F64x2 factor = {a[j], a[j]};
      const F64x2 product = factor * __builtin_convertvector(weights, F64x2);
      chain[v] = round_to_f32(product + chain[v]);
    }
}

template <class Format>
inline void widen_block(const uint8_t* w, const uint8_t* sf, bool, WeightSlab& slab) {
  widen_block_scalar<Format>(w, sf, slab);
}

// The vector levels have a path of their own for few rows; here it would save nothing.
template <class Format>
struct Few {
  enum : int { kRows = 0 };
  enum : uint32_t { kMode = DI_MXCSR_FLUSH };  // never entered
  static bool shift_rows(RowBlock*, int) { return false; }
  static void add(const TileRun&, const RowBlock*, int) {}
};

struct RowRange {  // of no use here, where scales are part of the widened weights
  bool is_near() const { return false; }
};

template <class Format>
inline void widen_row(const uint16_t* a, RowBlock& row, RowRange&) {
  for (int j = 0; j < kPairs; ++j)
    for (int odd = 0; odd < 2; ++odd)
      row.v[odd][j] = flush_denormal(bits_to_f32((uint32_t)a[2 * j + odd] << 16));
}

// One K block of R rows: acc[r] = acc[r] + (even chain + odd chain).
template <int R>
inline void add_block(const WeightSlab& w, const RowBlock* a, float* acc) {
  for (int r = 0; r < R; ++r, acc += kCols)
    for (int first = 0; first < kCols; first += 8) {
      F64x2 even[4], odd[4];
      run_chains(a[r].v[0], (const float (*)[kCols])&w.v[0][0][first], even);
      run_chains(a[r].v[1], (const float (*)[kCols])&w.v[1][0][first], odd);
      for (int v = 0; v < 4; ++v) {
        const F64x2 t = round_to_f32(even[v] + odd[v]);
        for (int n = 0; n < 2; ++n) {
          float* out = acc + first + 2 * v + n;
          *out = flush_denormal(flush_denormal(*out) + (float)t[n]);
        }
      }
    }
}

}  // namespace
}  // namespace di_gemm
