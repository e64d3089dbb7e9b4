// Counter-based noise for sampling: the twin of deepinfer/numerics/noise.py, with the same bits.
#pragma once
#include "functions.h"

DI_INLINE uint64_t di_noise_mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// The key of one choice: everything but the token id.
DI_INLINE uint64_t di_noise_stream(uint64_t seed, int32_t position, uint32_t purpose) {
  uint64_t counter = (uint64_t)(uint32_t)position | (uint64_t)purpose << 32;
  return di_noise_mix(di_noise_mix(seed + 0x9E3779B97F4A7C15u) ^ counter);
}

// In the open interval (0, 1), with 24 significant bits down to 2^-41.
DI_INLINE float di_noise_uniform(uint64_t key, int32_t token) {
  uint64_t bits = di_noise_mix(key + ((uint64_t)(int64_t)token + 1) * 0x9E3779B97F4A7C15u);
  float u = (float)(int64_t)((bits >> 24) << 1 | 1) * 0x1p-41f;
  return u < 1.0f ? u : 0x1.fffffep-1f;
}

DI_INLINE float di_noise_gumbel(uint64_t key, int32_t token) {
  return -di_log(-di_log1p(-di_noise_uniform(key, token)));
}
