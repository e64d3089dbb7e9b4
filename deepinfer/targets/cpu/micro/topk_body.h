// The function of topk.h. Compiled once per library, in micro.cc.
#pragma once
#include "functions.h"
#include "topk.h"

// Finite scores as integers in the same order, at least 1, with -0 equal to +0; others are 0.
DI_INLINE uint32_t di_score_key(float score) {
  uint32_t bits = di_bits_of_float(score);
  if ((bits & 0x7FFFFFFFu) >= 0x7F800000u) return 0;
  if (bits == 0x80000000u) bits = 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The k-th largest key (a radix descent of 11, 11 and 10 bits), given that more than k are not 0.
// *above gets the number of larger keys.
inline uint32_t di_kth_key(const float* scores, int32_t n, int32_t k, int32_t forced,
                           int32_t* above) {
  static const int shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
  uint32_t prefix = 0, fixed = 0;
  *above = 0;
  for (int pass = 0; pass < 3; ++pass) {
    int32_t count[1 << 11] = {0};
    const uint32_t digits = (1u << widths[pass]) - 1;
    for (int32_t i = 0; i < n; ++i) {
      const uint32_t key = i == forced ? 0xFFFFFFFFu : di_score_key(scores[i]);
      if ((key & fixed) == prefix) ++count[(key >> shifts[pass]) & digits];
    }
    uint32_t digit = digits;
    while (*above + count[digit] < k) *above += count[digit--];
    prefix |= digit << shifts[pass];
    fixed |= digits << shifts[pass];
  }
  return prefix;
}

extern "C" int32_t di_topk(float* scores, int32_t n, int32_t k, int32_t forced, int32_t* idx) {
  int32_t usable = 0, above = 0, taken = 0;
  for (int32_t i = 0; i < n; ++i) usable += i == forced || di_score_key(scores[i]) != 0;
  // All keys above 0 are wanted if there are not more than k of them.
  uint32_t least = 1;
  int32_t ties = n;
  if (usable > k) {
    least = di_kth_key(scores, n, k, forced, &above);
    ties = k - above;
  }
  for (int32_t i = 0; i < n && taken < k; ++i) {
    const uint32_t key = i == forced ? 0xFFFFFFFFu : di_score_key(scores[i]);
    if (key > least || (key == least && ties-- > 0)) idx[taken++] = i;
  }
  for (int32_t i = taken; i < k; ++i) idx[i] = -1;
  return taken;
}
