// Generic level: the contract order without FMA instructions and whatever MXCSR says of denormals.
//
// A fused multiply-add of fp32 is done in float64: the product of two bf16 values is exact there;
// the sum is rounded to odd, which makes the second rounding, to fp32, the only one that shows.
#pragma once
#include "gemm_formats.h"

namespace di_gemm {
namespace {

enum : int { kMaxRows = 4, kDirectRows = 0 };

// Flushes |x| < 2^-126 (1 - 2^-25), the values still tiny after rounding to 24 bits: FTZ decides
// after rounding. c[n] = flush(round(a * w[n] + c[n])) for 16 columns; all inputs are flushed.
inline void fma_columns(float a, const float* w, float* c) {
  const double tiny = 0x1p-126 - 0x1p-151;
  double sum[kCols], error[kCols];
  for (int n = 0; n < kCols; ++n) {
    double product = (double)a * (double)w[n], addend = c[n];
    sum[n] = product + addend;
    double rounded = sum[n] - product;
    error[n] = (product - (sum[n] - rounded)) + (addend - rounded);  // TwoSum: exact
  }
  uint64_t bits[kCols];
  for (int n = 0; n < kCols; ++n) {
    uint64_t error_bits;
    double magnitude = __builtin_fabs(error[n]);
    memcpy(&bits[n], &sum[n], 8);
    memcpy(&error_bits, &error[n], 8);
    uint64_t inexact = magnitude > 0.0 ? 1 : 0;  // false for the NaN of an infinite sum
    // An error against the sum's sign means that the sum was rounded away from zero.
    bits[n] = (bits[n] - (((bits[n] ^ error_bits) >> 63) & inexact)) | inexact;
  }
  for (int n = 0; n < kCols; ++n) {
    double odd;
    memcpy(&odd, &bits[n], 8);
    uint32_t value = f32_to_bits((float)odd);
    c[n] = bits_to_f32(__builtin_fabs(odd) < tiny ? value & 0x80000000u : value);
  }
}

template <class Format>
inline void widen_block(const uint8_t* w, const uint8_t* sf, WeightSlab& slab) {
  widen_block_scalar<Format>(w, sf, slab);
}

inline void widen_row(const uint16_t* a, float (*row)[kPairs]) {
  for (int j = 0; j < kPairs; ++j)
    for (int odd = 0; odd < 2; ++odd)
      row[odd][j] = flush_denormal(bits_to_f32((uint32_t)a[2 * j + odd] << 16));
}

// One K block of R rows: acc[r] = acc[r] + (even chain + odd chain).
template <int R>
inline void add_block(const WeightSlab& w, const RowSlab<R>& a, float* acc) {
  for (int r = 0; r < R; ++r, acc += kCols) {
    float chain[2][kCols] = {};
    for (int odd = 0; odd < 2; ++odd)
      for (int j = 0; j < kPairs; ++j) fma_columns(a.v[r][odd][j], w.v[odd][j], chain[odd]);
    for (int n = 0; n < kCols; ++n) {
      float t = flush_denormal(chain[0][n] + chain[1][n]);  // a tiny sum of fp32 values is exact
      acc[n] = flush_denormal(flush_denormal(acc[n]) + t);
    }
  }
}

}  // namespace
}  // namespace di_gemm
