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

// One K block of a tile widened to fp32: [even or odd k][pair][column].
struct alignas(64) WeightSlab {
  float v[2][kPairs][kCols];
};

// One K block of R rows widened to fp32: [row][even or odd k][pair].
template <int R>
struct alignas(64) RowSlab {
  float v[R][2][kPairs];
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

// A format: bytes per K pair, scale bytes per K block, and the largest scale code that the vector
// widening takes. The vector code folds an fp16 exponent offset into the scale, which must stay
// finite; blocks with a larger code (or NaN) are widened by `decode`, one value at a time.
// `decode` gives value * scale rounded to fp32 and flushed: exact in a valid checkpoint.
struct Bf16 {
  enum : int { kPairBytes = 64, kScaleBytes = 0, kMaxPlainScale = 255 };
  static float decode(const uint8_t* w, const uint8_t*, int pair, int col, int odd) {
    uint16_t bits;
    memcpy(&bits, w + pair * kPairBytes + col * 4 + odd * 2, 2);
    return flush_denormal(bits_to_f32((uint32_t)bits << 16));
  }
};

struct E4m3 {
  enum : int { kPairBytes = 32, kScaleBytes = 1, kMaxPlainScale = 246 };
  static float decode(const uint8_t* w, const uint8_t* sf, int pair, int col, int odd) {
    double value = kE4m3Values.value[w[pair * kPairBytes + col * 2 + odd]];
    return flush_denormal((float)(value * decode_ue8m0(sf[0])));
  }
};

struct E2m1 {
  enum : int { kPairBytes = 16, kScaleBytes = 16, kMaxPlainScale = 240 };
  static float decode(const uint8_t* w, const uint8_t* sf, int pair, int col, int odd) {
    uint8_t codes = w[pair * kPairBytes + col];
    double value = kE2m1Values.value[odd ? codes >> 4 : codes & 15];
    return flush_denormal((float)(value * decode_ue8m0(sf[col])));
  }
};

// Whether all scale codes of `blocks` K blocks suit the vector widening.
template <class Format>
inline bool scales_are_plain(const uint8_t* sf, int blocks) {
  uint8_t largest = 0;
  for (int i = 0; i < blocks * Format::kScaleBytes; ++i)
    largest = sf[i] > largest ? sf[i] : largest;
  return largest <= Format::kMaxPlainScale;
}

template <class Format>
inline void widen_block_scalar(const uint8_t* w, const uint8_t* sf, WeightSlab& slab) {
  for (int pair = 0; pair < kPairs; ++pair)
    for (int col = 0; col < kCols; ++col)
      for (int odd = 0; odd < 2; ++odd)
        slab.v[odd][pair][col] = Format::decode(w, sf, pair, col, odd);
}

}  // namespace
}  // namespace di_gemm
