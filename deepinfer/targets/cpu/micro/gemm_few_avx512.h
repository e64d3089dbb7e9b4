// Few rows on AVX-512: weights are widened in registers.
#pragma once
#include "gemm_avx512.h"
#include "gemm_vector.h"
#include "mxcsr.h"

namespace di_gemm {
namespace {

// Up to kRows rows at once, in MXCSR mode kMode.
template <class Format>
struct Few {
  enum : int { kRows = 4 };
  enum : uint32_t { kMode = DI_MXCSR_FLUSH };
  // Whether it has changed widened rows to what `add` wants.
  static bool shift_rows(RowBlock*, int) { return false; }
  static void add(const TileRun& run, const RowBlock* a, int n) {
    add_direct_rows<Format, kRows>(n, run.w, run.sf, a, run.blocks, run.acc);
  }
};

}  // namespace
}  // namespace di_gemm
