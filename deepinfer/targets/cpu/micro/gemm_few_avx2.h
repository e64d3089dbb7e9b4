// Few rows on AVX2, by their number: one or two, up to six; more share a slab of widened weights.
#pragma once
#include "gemm_one_avx2.h"
#include "gemm_vector.h"
#include "mxcsr.h"

namespace di_gemm {
namespace {

enum : int { kFewRows = 6 };

template <class Format, int R = kFewRows>
inline void add_few(const TileRun& run, const RowBlock* a, int n) {
  if (n == R) return add_few_rows<Format, R>(run, a);
  if constexpr (R > 3) return add_few<Format, R - 1>(run, a, n);
  if (n == 2) return add_one<Format, 2, 1>(run, a);
  if (run.tiles == 2) return add_one<Format, 1, 2>(run, a);
  add_one<Format, 1, 1>(run, a);
}

// Up to kRows rows of up to kTiles tiles at once.
template <class Format>
struct Few {
  enum : int { kRows = kFewRows, kTiles = 2 };  // two tiles of one row, else one
  // Whether it has changed widened rows to what `add` wants.
  static bool shift_rows(RowBlock* rows, int count) {
    if (!Widen<Format>::kRowShift) return false;
    const Vec factor =
        _mm256_castsi256_ps(_mm256_set1_epi32((127 + Widen<Format>::kRowShift) << 23));
    for (float *p = rows->v[0], *end = (rows + count)->v[0]; p < end; p += kLanes)
      store_vec(p, _mm256_mul_ps(load_vec(p), factor));
    return true;
  }
  static void add(const TileRun& run, const RowBlock* a, int n) {
    if (!Widen<Format>::kRowShift) return add_few<Format>(run, a, n);
    const uint32_t mode = di_mxcsr_swap(DI_MXCSR_FLUSH_RESULTS);
    add_few<Format>(run, a, n);
    di_mxcsr_swap(mode);
  }
};

template <>
struct Few<Bf16> {
  enum : int { kRows = 2, kTiles = 1 };
  static bool shift_rows(RowBlock*, int) { return false; }
  static void add(const TileRun& run, const RowBlock* a, int n) {
    add_direct_rows<Bf16, kRows>(n, run.w, run.sf, a, run.blocks, run.acc);
  }
};

}  // namespace
}  // namespace di_gemm
