// Weight formats of the GEMM micro-kernels: packed layouts, and decoding one value at a time.
//
// A tile holds 16 output columns. Element (n, 2j+i) of a tile stands at [j][n][i]: two k of a
// column side by side, as AMX reads its second operand. K comes in blocks of 32, i.e. 16 pairs.
// `deepinfer/checkpoint/layouts.py` writes these layouts.
#pragma once
#include <stdint.h>
#include <string.h>

namespace di_gemm {
namespace {

enum : int { kCols = 16, kBlock = 32, kPairs = 16 };

// One K block of a tile widened to fp32: [even or odd k][pair][column], times scale[column].
struct alignas(64) WeightSlab {
  float v[2][kPairs][kCols];
  float scale[kCols];
};

// One K block of one row widened to fp32: [even or odd k][pair].
struct alignas(64) RowBlock {
  float v[2][kPairs];
};

// So many K blocks of a tile, and its accumulators.
struct TileRun {
  const uint8_t *w, *sf;
  float* acc;
  int blocks;
};

inline float bits_to_f32(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t f32_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

// DAZ and FTZ of one value in integer arithmetic: a denormal becomes the zero of its sign.
inline float flush_denormal(float x) {
  uint32_t bits = f32_to_bits(x);
  return bits_to_f32((bits & 0x7F800000u) ? bits : (bits & 0x80000000u));
}

// 2^(code - 127) as float64, where no code under- or overflows; code 255 is NaN.
inline double decode_ue8m0(uint8_t code) {
  uint64_t bits = code == 255 ? 0x7FF8000000000000u : (uint64_t)(code + 1023 - 127) << 52;
  double x;
  memcpy(&x, &bits, 8);
  return x;
}

// Values of all codes. The NaN code of e4m3 (0x7F, 0xFF) reads as +-480 at every level:
// `deepinfer/checkpoint/scales.py` refuses it in weights.
template <int exponent_bits, int mantissa_bits>
struct DecodeTable {
  double value[2 << (exponent_bits + mantissa_bits)];

  constexpr DecodeTable() : value() {
    const int magnitudes = 1 << (exponent_bits + mantissa_bits), one = 1 << mantissa_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const double unit = 1.0 / (one << bias);  // in it, the smallest denormal is 2
    for (int code = 0; code < magnitudes; ++code) {
      const int exponent = code >> mantissa_bits, mantissa = code & (one - 1);
      value[code] = unit * (exponent ? (one + mantissa) << exponent : mantissa << 1);
      value[code + magnitudes] = -value[code];
    }
  }
};
constexpr DecodeTable<4, 3> kE4m3Values;
constexpr DecodeTable<2, 1> kE2m1Values;

// The vector levels widen codes without their scale, sum up a K block of their products, and
// multiply the sum: the same bits as long as nothing on the way, scaled or not, is so small that it
// is flushed or so large that it overflows. That holds if all rows have values that are zero or of
// a size in [2^-40, 2^40), and all scales are 2^-60 .. 2^60: all terms are multiples of
// 2^(-40-7) * 2^-9 * 2^-60, and below 2^40 * 2^9 * 2^60. Other blocks are widened by `decode`, one
// value at a time, under a scale of 1.
enum : int { kNearRow = 40, kNearScale = 60 };

// A format: bytes per K pair, scale bytes per K block, and how many bytes before their use few rows
// ask for weights (found by measuring AVX2). `decode` gives value * scale rounded to fp32 and
// flushed: exact in a valid checkpoint.
struct Bf16 {
  enum : int { kPairBytes = 64, kScaleBytes = 0, kAhead = 2048 };
  static float decode(const uint8_t* w, const uint8_t*, int pair, int col, int odd) {
    uint16_t bits;
    memcpy(&bits, w + pair * kPairBytes + col * 4 + odd * 2, 2);
    return flush_denormal(bits_to_f32((uint32_t)bits << 16));
  }
};

struct E4m3 {
  enum : int { kPairBytes = 32, kScaleBytes = 1, kAhead = 4096 };
  static float decode(const uint8_t* w, const uint8_t* sf, int pair, int col, int odd) {
    double value = kE4m3Values.value[w[pair * kPairBytes + col * 2 + odd]];
    return flush_denormal((float)(value * decode_ue8m0(sf[0])));
  }
};

struct E2m1 {
  enum : int { kPairBytes = 16, kScaleBytes = 16, kAhead = 4096 };
  static float decode(const uint8_t* w, const uint8_t* sf, int pair, int col, int odd) {
    uint8_t codes = w[pair * kPairBytes + col];
    double value = kE2m1Values.value[odd ? codes >> 4 : codes & 15];
    return flush_denormal((float)(value * decode_ue8m0(sf[col])));
  }
};

// Whether all scales of `blocks` K blocks are near 1.
template <class Format>
inline bool scales_are_near(const uint8_t* sf, int blocks) {
  uint8_t farthest = 0;
  for (int i = 0; i < blocks * Format::kScaleBytes; ++i) {
    const uint8_t shifted = (uint8_t)(sf[i] - (127 - kNearScale));
    farthest = shifted > farthest ? shifted : farthest;
  }
  return farthest <= 2 * kNearScale;
}

template <class Format>
inline void widen_block_scalar(const uint8_t* w, const uint8_t* sf, WeightSlab& slab) {
  for (int pair = 0; pair < kPairs; ++pair)
    for (int col = 0; col < kCols; ++col)
      for (int odd = 0; odd < 2; ++odd)
        slab.v[odd][pair][col] = Format::decode(w, sf, pair, col, odd);
  for (int col = 0; col < kCols; ++col) slab.scale[col] = 1.0f;
}

}  // namespace
}  // namespace di_gemm
