// A linear with fp32 weights, in the order of linear_fp32 of deepinfer/numerics/sums.py: products
// rounded, then added, 16 lanes, a fixed tree.
#pragma once
#include <stdint.h>

extern "C" int32_t di_linear_fp32(uint16_t* x, int32_t ldx, float* w, int32_t k, int32_t m,
                                 int32_t rows, float* y);
