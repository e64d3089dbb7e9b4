// The function of linear_fp32.h. Compiled once per library, in micro.cc.
#pragma once
#include "formats.h"
#include "linear_fp32.h"

namespace di_linear {
namespace {

// kColumns: a page of each output's weights at a time, so that each page is looked up once.
enum : int { kLanes = 16, kRows = 4, kOutputs = 32, kColumns = 1024 };

// Vectors of GCC and clang. A sum's 16 lanes are kVecs of them.
#if defined(DI_ISA_AVX2) || defined(DI_ISA_AVX512) || defined(DI_ISA_AMX)
enum : int { kWidth = 8 };
#else
enum : int { kWidth = 4 };
#endif
enum : int { kVecs = kLanes / kWidth };
typedef float Vec __attribute__((vector_size(4 * kWidth)));

inline Vec load(const float* p) {
  Vec x;
  memcpy(&x, p, sizeof x);
  return x;
}

// acc[o][r] += the lanes of x[r] * w[o] over `n` columns, a multiple of 16. Asks for the weights of
// the next output: hardware takes each output's columns for a stream of their own, too short to
// be seen in time.
template <int R>
inline void add_columns(const float (*x)[kColumns], const float* w, int64_t k, int n, int m,
                        float (*acc)[kRows][kLanes]) {
  for (int o = 0; o < m; ++o) {
    Vec sum[R][kVecs];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVecs; ++v) sum[r][v] = load(&acc[o][r][v * kWidth]);
    const float* later = o + 1 < m ? w + (o + 1) * k : w + kColumns;
    for (int c = 0; c < n; c += kLanes) {
      __builtin_prefetch(later + c);
      for (int v = 0; v < kVecs; ++v) {
        const Vec weights = load(w + o * k + c + v * kWidth);
        for (int r = 0; r < R; ++r) sum[r][v] += load(&x[r][c + v * kWidth]) * weights;
      }
    }
    for (int r = 0; r < R; ++r) memcpy(acc[o][r], sum[r], sizeof acc[o][r]);
  }
}

inline float fold(float* lanes) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  return lanes[0];
}

// At most kRows rows and kOutputs outputs.
template <int R>
void multiply(const uint16_t* x, int64_t ldx, const float* w, int k, int m, float* y, int ldy) {
  float acc[kOutputs][kRows][kLanes] = {}, wide[kRows][kColumns];
  for (int first = 0; first < k; first += kColumns) {
    const int n = k - first < kColumns ? k - first : kColumns;
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < n; ++c) wide[r][c] = di_bf16_to_f32(x[r * ldx + first + c]);
    const int whole = n / kLanes * kLanes;
    add_columns<R>(wide, w + first, k, whole, m, acc);
    for (int o = 0; o < m; ++o)
      for (int r = 0; r < R; ++r)
        for (int c = whole; c < n; ++c)
          acc[o][r][c - whole] = acc[o][r][c - whole] + wide[r][c] * w[(int64_t)o * k + first + c];
  }
  for (int o = 0; o < m; ++o)
    for (int r = 0; r < R; ++r) y[r * ldy + o] = fold(acc[o][r]);
}

template <int R>
void multiply_rows(int rows, const uint16_t* x, int64_t ldx, const float* w, int k, int m,
                   float* y, int ldy) {
  if (rows == R) return multiply<R>(x, ldx, w, k, m, y, ldy);
  if constexpr (R > 1) multiply_rows<R - 1>(rows, x, ldx, w, k, m, y, ldy);
}

}  // namespace
}  // namespace di_linear

// y[i][o] = sum over c of x[i][c] * w[o][c]: x bf16 rows, leading dimension ldx elements; w fp32
// [m][k]; y fp32 [rows][m]. Weights are read once for 4 rows. Returns 0.
extern "C" int32_t di_linear_fp32(uint16_t* x, int32_t ldx, float* w, int32_t k, int32_t m,
                                 int32_t rows, float* y) {
  using namespace di_linear;
  for (int32_t r = 0; r < rows; r += kRows)
    for (int32_t o = 0; o < m; o += kOutputs)
      multiply_rows<kRows>(rows - r < kRows ? rows - r : kRows, x + (int64_t)r * ldx, ldx,
                           w + (int64_t)o * k, k, m - o < kOutputs ? m - o : kOutputs,
                           y + (int64_t)r * m + o, m);
  return 0;
}
