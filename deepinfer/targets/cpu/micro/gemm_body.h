// The GEMM micro-kernels of gemm.h for the level that the DI_ISA_* macro names. Compiled once per
// library, in micro.cc.
#pragma once
#include "gemm.h"
#if defined(DI_ISA_AMX) || defined(DI_ISA_AVX512)
#include "gemm_few_avx512.h"
#elif defined(DI_ISA_AVX2)
#include "gemm_few_avx2.h"
#else
#include "gemm_generic.h"
#endif
#include "gemm_tile.h"
#if defined(DI_ISA_AMX)
#include "gemm_amx.h"
#elif defined(DI_ISA_AVX2) && !defined(DI_ISA_AVX512)
#include "gemm_exact_avx2.h"
#endif

namespace di_gemm {
namespace {

// Not inlined: arithmetic of the caller must not move to where denormals are flushed.
template <class Format>
__attribute__((noinline)) int32_t multiply(const void* a, int32_t lda, const int32_t* rows,
                                           const void* w, const uint8_t* sf, int32_t k, int32_t m,
                                           int32_t tiles, float* acc, int32_t accumulate) {
#if defined(DI_ISA_AMX) || defined(DI_ISA_AVX512) || defined(DI_ISA_AVX2)
  const uint32_t host = di_mxcsr_swap(DI_MXCSR_FLUSH);
#else
  const uint32_t host = di_mxcsr_swap(DI_MXCSR_DEFAULT);
#endif
  const int64_t count = (int64_t)tiles * m * kCols;
  if (!accumulate) memset(acc, 0, sizeof(float) * count);
  const Operands x = {(const uint16_t*)a, lda,   rows, (const uint8_t*)w, sf, k / kBlock, m,
                      tiles,              acc};
#ifdef DI_ISA_AMX
  add_all_amx<Format>(x);
#else
  add_all<Format>(x);
#endif
  canonicalize_nan(acc, count);
  di_mxcsr_swap(host);
  return 0;
}

}  // namespace
}  // namespace di_gemm

#define DI_GEMM_API extern "C" int32_t

DI_GEMM_API di_gemm_bf16(uint16_t* a, int32_t lda, uint16_t* w_tile, int32_t k, int32_t m,
                         int32_t tiles, float* acc, int32_t accumulate) {
  return di_gemm::multiply<di_gemm::Bf16>(a, lda, nullptr, w_tile, nullptr, k, m, tiles, acc,
                                          accumulate);
}

DI_GEMM_API di_gemm_e4m3(uint16_t* a, int32_t lda, uint8_t* w_tile, uint8_t* sf_tile, int32_t k,
                         int32_t m, int32_t tiles, float* acc, int32_t accumulate) {
  return di_gemm::multiply<di_gemm::E4m3>(a, lda, nullptr, w_tile, sf_tile, k, m, tiles, acc,
                                          accumulate);
}

DI_GEMM_API di_gemm_e2m1(uint16_t* a, int32_t lda, uint8_t* w_tile, uint8_t* sf_tile, int32_t k,
                         int32_t m, int32_t tiles, float* acc, int32_t accumulate) {
  return di_gemm::multiply<di_gemm::E2m1>(a, lda, nullptr, w_tile, sf_tile, k, m, tiles, acc,
                                          accumulate);
}

DI_GEMM_API di_gemm_bf16_rows(uint16_t* a, int32_t lda, int32_t* rows, uint16_t* w_tile, int32_t k,
                              int32_t m, int32_t tiles, float* acc, int32_t accumulate) {
  return di_gemm::multiply<di_gemm::Bf16>(a, lda, rows, w_tile, nullptr, k, m, tiles, acc,
                                          accumulate);
}

DI_GEMM_API di_gemm_e4m3_rows(uint16_t* a, int32_t lda, int32_t* rows, uint8_t* w_tile,
                              uint8_t* sf_tile, int32_t k, int32_t m, int32_t tiles, float* acc,
                              int32_t accumulate) {
  return di_gemm::multiply<di_gemm::E4m3>(a, lda, rows, w_tile, sf_tile, k, m, tiles, acc,
                                          accumulate);
}

DI_GEMM_API di_gemm_e2m1_rows(uint16_t* a, int32_t lda, int32_t* rows, uint8_t* w_tile,
                              uint8_t* sf_tile, int32_t k, int32_t m, int32_t tiles, float* acc,
                              int32_t accumulate) {
  return di_gemm::multiply<di_gemm::E2m1>(a, lda, rows, w_tile, sf_tile, k, m, tiles, acc,
                                          accumulate);
}

#undef DI_GEMM_API
