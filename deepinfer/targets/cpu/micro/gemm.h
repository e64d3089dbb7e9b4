// GEMM micro-kernels of the cpu target: tiles of 16 output columns, any number of rows.
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
//   tiles       neighbouring tiles of the weight, at least 1; they share the widening of the rows
//   w_tile      the first tile's packed weights (checkpoint/layouts.py): bf16 uint16 [k/2][16][2], e4m3
//               uint8 [k/2][16][2], e2m1 uint8 [k/2][16] with the even k in the low nibble
//   sf_tile     ue8m0 codes: e4m3 [k/32], e2m1 [k/32][16]
//   k           a positive multiple of 32
//   m           rows, at least 1
//   acc         fp32 [tiles][m][16]
//   accumulate  0: start from +0; 1: continue from acc
// They return 0.
//
// Levels: define DI_ISA_AMX, DI_ISA_AVX512 or DI_ISA_AVX2 and give the compiler the matching flags;
// without one the generic level is built.
#pragma once
#include <stdint.h>

extern "C" int32_t di_gemm_bf16(uint16_t* a, int32_t lda, uint16_t* w_tile, int32_t k, int32_t m,
                                int32_t tiles, float* acc, int32_t accumulate);
extern "C" int32_t di_gemm_e4m3(uint16_t* a, int32_t lda, uint8_t* w_tile, uint8_t* sf_tile,
                                int32_t k, int32_t m, int32_t tiles, float* acc,
                                int32_t accumulate);
extern "C" int32_t di_gemm_e2m1(uint16_t* a, int32_t lda, uint8_t* w_tile, uint8_t* sf_tile,
                                int32_t k, int32_t m, int32_t tiles, float* acc,
                                int32_t accumulate);
extern "C" int32_t di_gemm_bf16_rows(uint16_t* a, int32_t lda, int32_t* rows, uint16_t* w_tile,
                                     int32_t k, int32_t m, int32_t tiles, float* acc,
                                     int32_t accumulate);
extern "C" int32_t di_gemm_e4m3_rows(uint16_t* a, int32_t lda, int32_t* rows, uint8_t* w_tile,
                                     uint8_t* sf_tile, int32_t k, int32_t m, int32_t tiles,
                                     float* acc, int32_t accumulate);
extern "C" int32_t di_gemm_e2m1_rows(uint16_t* a, int32_t lda, int32_t* rows, uint8_t* w_tile,
                                     uint8_t* sf_tile, int32_t k, int32_t m, int32_t tiles,
                                     float* acc, int32_t accumulate);
