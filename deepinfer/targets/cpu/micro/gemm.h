// GEMM micro-kernels of the cpu target: one tile of 16 output columns, any number of rows.
//
//   acc[i][n] (+)= sum over k of a[i][k] * w[n][k]
//
// Order (the contract of every level, bit for bit): K in blocks of 32, ascending; in a block the
// even and the odd k are two chains of fused multiply-adds from +0, t = even + odd, acc = acc + t.
// Round to nearest even, denormal operands and results flushed (those of acc too), NaN is
// 0x7FC00000. So a row's bits depend neither on m nor on the level, host MXCSR or thread.
//
// Arguments of di_gemm_<format>[_rows]:
//   a           bf16 rows, leading dimension lda elements; with _rows, row i of the product is
//               row rows[i] of a
//   w_tile      the tile's packed weights (packing.py): bf16 uint16 [k/2][16][2],
//               e4m3 uint8 [k/2][16][2], e2m1 uint8 [k/2][16] with the even k in the low nibble
//   sf_tile     ue8m0 codes: e4m3 [k/32], e2m1 [k/32][16]
//   k           a positive multiple of 32
//   m           rows, at least 1
//   acc         fp32 [m][16]
//   accumulate  0: start from +0; 1: continue from acc
// They return 0.
//
// Levels: define DI_ISA_AMX, DI_ISA_AVX512 or DI_ISA_AVX2 and give the compiler the matching flags;
// without one the generic level is built.
#pragma once
#if defined(DI_ISA_AMX) || defined(DI_ISA_AVX512)
#include "gemm_avx512.h"
#include "gemm_vector.h"
#elif defined(DI_ISA_AVX2)
#include "gemm_avx2.h"
#include "gemm_vector.h"
#else
#include "gemm_generic.h"
#endif
#include "gemm_tile.h"
#ifdef DI_ISA_AMX
#include "gemm_amx.h"
#endif

namespace di_gemm {
namespace {

// Not inlined: arithmetic of the caller must not move to where denormals are flushed.
template <class Format>
__attribute__((noinline)) int32_t multiply(const void* a, int32_t lda, const int32_t* rows,
                                           const void* w, const uint8_t* sf, int32_t k, int32_t m,
                                           float* acc, int32_t accumulate) {
#if defined(DI_ISA_AMX) || defined(DI_ISA_AVX512) || defined(DI_ISA_AVX2)
  const uint32_t host = di_mxcsr_swap(DI_MXCSR_FLUSH);
#else
  const uint32_t host = di_mxcsr_swap(DI_MXCSR_DEFAULT);
#endif
  if (!accumulate) memset(acc, 0, sizeof(float) * kCols * (size_t)m);
  const Operands x = {(const uint16_t*)a, lda, rows, (const uint8_t*)w, sf, k / kBlock, m, acc};
#ifdef DI_ISA_AMX
  add_all_amx<Format>(x);
#else
  add_all<Format>(x);
#endif
  canonicalize_nan(acc, m * kCols);
  di_mxcsr_swap(host);
  return 0;
}

}  // namespace
}  // namespace di_gemm

#define DI_GEMM_API extern "C" inline __attribute__((always_inline)) int32_t

DI_GEMM_API di_gemm_bf16(uint16_t* a, int32_t lda, uint16_t* w_tile, int32_t k, int32_t m,
                         float* acc, int32_t accumulate) {
  return di_gemm::multiply<di_gemm::Bf16>(a, lda, nullptr, w_tile, nullptr, k, m, acc, accumulate);
}

DI_GEMM_API di_gemm_e4m3(uint16_t* a, int32_t lda, uint8_t* w_tile, uint8_t* sf_tile, int32_t k,
                         int32_t m, float* acc, int32_t accumulate) {
  return di_gemm::multiply<di_gemm::E4m3>(a, lda, nullptr, w_tile, sf_tile, k, m, acc, accumulate);
}

DI_GEMM_API di_gemm_e2m1(uint16_t* a, int32_t lda, uint8_t* w_tile, uint8_t* sf_tile, int32_t k,
                         int32_t m, float* acc, int32_t accumulate) {
  return di_gemm::multiply<di_gemm::E2m1>(a, lda, nullptr, w_tile, sf_tile, k, m, acc, accumulate);
}

DI_GEMM_API di_gemm_bf16_rows(uint16_t* a, int32_t lda, int32_t* rows, uint16_t* w_tile, int32_t k,
                              int32_t m, float* acc, int32_t accumulate) {
  return di_gemm::multiply<di_gemm::Bf16>(a, lda, rows, w_tile, nullptr, k, m, acc, accumulate);
}

DI_GEMM_API di_gemm_e4m3_rows(uint16_t* a, int32_t lda, int32_t* rows, uint8_t* w_tile,
                              uint8_t* sf_tile, int32_t k, int32_t m, float* acc,
                              int32_t accumulate) {
  return di_gemm::multiply<di_gemm::E4m3>(a, lda, rows, w_tile, sf_tile, k, m, acc, accumulate);
}

DI_GEMM_API di_gemm_e2m1_rows(uint16_t* a, int32_t lda, int32_t* rows, uint8_t* w_tile,
                              uint8_t* sf_tile, int32_t k, int32_t m, float* acc,
                              int32_t accumulate) {
  return di_gemm::multiply<di_gemm::E2m1>(a, lda, rows, w_tile, sf_tile, k, m, acc, accumulate);
}

#undef DI_GEMM_API
