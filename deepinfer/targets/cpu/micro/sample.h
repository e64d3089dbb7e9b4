// Tokens in order of descending logit, equal ones by ascending id, only as far as somebody asks.
//
// A token is one uint64 key that grows with its rank's quality: the logit's bits made monotonic
// above, the complement of its id below. No two keys are equal, so the order is total and does not
// depend on how it is found. The keys form a binary max-heap; popped ones are kept behind it.
#pragma once
#include "functions.h"

// -0 and +0 share a rank.
DI_INLINE uint64_t di_rank_key(float logit, int32_t token) {
  uint32_t bits = di_bits_of_float(logit == 0.0f ? 0.0f : logit);
  uint32_t monotonic = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (uint64_t)monotonic << 32 | (uint32_t)~token;
}

DI_INLINE int32_t di_rank_token(uint64_t key) { return (int32_t)~(uint32_t)key; }

DI_INLINE void di_rank_sift(uint64_t* heap, int32_t count, int32_t at) {
  const uint64_t moving = heap[at];
  for (int32_t child; (child = 2 * at + 1) < count; at = child) {
    if (child + 1 < count && heap[child + 1] > heap[child]) ++child;
    if (heap[child] <= moving) break;
    heap[at] = heap[child];
  }
  heap[at] = moving;
}

// Fills `scratch` (8 bytes a token) with the tokens that can be chosen, logit > -inf and not NaN,
// and returns how many there are.
DI_INLINE int32_t di_rank_start(float* logits, int32_t vocab, uint8_t* scratch) {
  uint64_t* heap = (uint64_t*)scratch;
  int32_t count = 0;
  for (int32_t v = 0; v < vocab; ++v)
    if (logits[v] > di_float_of_bits(0xFF800000u)) heap[count++] = di_rank_key(logits[v], v);
  for (int32_t at = count / 2 - 1; at >= 0; --at) di_rank_sift(heap, count, at);
  return count;
}

// The key of rank `rank`, 0 the best. Ranks below `popped` were asked for before; the next one
// after them is the only other one that may be asked for.
DI_INLINE uint64_t di_rank_at(uint8_t* scratch, int32_t count, int32_t popped, int32_t rank) {
  uint64_t* heap = (uint64_t*)scratch;
  if (rank == popped) {
    const int32_t last = count - 1 - rank;
    const uint64_t best = heap[0];
    heap[0] = heap[last];
    heap[last] = best;
    di_rank_sift(heap, last, 0);
  }
  return heap[count - 1 - rank];
}
