// Exact selection of the k largest finite scores; equal scores: the lower index.
#pragma once
#include <stdint.h>

// idx[0..k-1] = ascending indices of the k largest finite scores, then -1. `forced`, unless -1,
// is taken whatever its score. Returns how many were taken.
extern "C" int32_t di_topk(float* scores, int32_t n, int32_t k, int32_t forced, int32_t* idx);
