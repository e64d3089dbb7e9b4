// Few rows on AVX2, by their number: one or two, up to six; more share a slab of widened weights.
// Rows of e2m1 weights come here only where gemm_exact_avx2.h cannot take them.
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
  if (n == 2) return add_one<2>(run, a);
  add_one<1>(run, a);
}

// Up to kRows rows at once, in MXCSR mode kMode. `shift_rows`: whether it has changed widened rows
// to what `add` wants.
template <class Format>
struct Few {
  enum : int { kRows = 2 };
  enum : uint32_t { kMode = DI_MXCSR_FLUSH };
  static bool shift_rows(RowBlock*, int) { return false; }
  static void add(const TileRun& run, const RowBlock* a, int n) {
    add_direct_rows<Format, kRows>(n, run.w, run.sf, a, run.blocks, run.acc);
  }
};

template <>
struct Few<E4m3> {
  enum : int { kRows = kFewRows };
  enum : uint32_t { kMode = DI_MXCSR_FLUSH_RESULTS };
  static bool shift_rows(RowBlock* rows, int count) {
    const Vec factor =
        _mm256_castsi256_ps(_mm256_set1_epi32((127 + Widen<E4m3>::kRowShift) << 23));
    for (float *p = rows->v[0], *end = (rows + count)->v[0]; p < end; p += kLanes)
      store_vec(p, _mm256_mul_ps(load_vec(p), factor));
    return true;
  }
  static void add(const TileRun& run, const RowBlock* a, int n) {
    add_few<E4m3>(run, a, n);
  }
};

}  // namespace
}  // namespace di_gemm
