// Number formats and the dynamic quantisers' scalar steps: the twin of deepinfer/numerics/formats.py
// (same bits: tests/numerics/test_formats.py). Free of branches and tables, so that a loop calling
// these vectorises. Decoders and encoders never read or make a denormal on the way to a normal
// result, so they are also right where a GEMM micro-kernel has set FTZ and DAZ.
#ifndef DI_MICRO_FORMATS_H
#define DI_MICRO_FORMATS_H

#include "functions.h"

// ---- bf16

DI_INLINE float di_bf16_to_f32(uint16_t x) { return di_float_of_bits((uint32_t)x << 16); }

// Nearest even; a NaN becomes the quiet NaN of its sign.
DI_INLINE uint16_t di_f32_to_bf16(float x) {
  uint32_t bits = di_bits_of_float(x);
  uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  uint32_t nan = 0x7FC0u | ((bits >> 16) & 0x8000u);
  return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}

// ---- e4m3: bias 7, largest 448, no infinity, NaN 0x7F and 0xFF

DI_INLINE float di_e4m3_to_f32(uint8_t code) {
  uint32_t size = code & 0x7Fu;
  // A denormal m * 2^-9 is (1 + m/8) * 2^-6 minus 2^-6.
  float denormal = di_float_of_bits((121u << 23) | (size & 7u) << 20) - 0.015625f;
  uint32_t bits = size < 8u ? di_bits_of_float(denormal) : (size << 20) + (120u << 23);
  bits = size == 0x7Fu ? 0x7FC00000u : bits;
  return di_float_of_bits(bits | (uint32_t)(code & 0x80u) << 24);
}

// Nearest even, saturating at +-448; a NaN becomes the NaN code of its sign.
DI_INLINE uint8_t di_f32_to_e4m3(float x) {
  uint32_t bits = di_bits_of_float(x);
  uint32_t size = bits & 0x7FFFFFFFu;
  uint32_t limited = size > 0x43E00000u ? 0x43E00000u : size;
  uint32_t normal = ((limited + 0x7FFFFu + ((limited >> 20) & 1u)) >> 20) - (120u << 3);
  // Below 2^-6 the codes are multiples of 2^-9, the spacing of floats at 2^14.
  uint32_t denormal = di_bits_of_float(di_float_of_bits(limited) + 16384.0f) - 0x46800000u;
  uint32_t code = limited < 0x3C800000u ? denormal : normal;
  code = size > 0x7F800000u ? 0x7Fu : code;
  return (uint8_t)(code | ((bits >> 24) & 0x80u));
}

// di_e4m3_to_f32(di_f32_to_e4m3(x)) without the code in between: no bytes to pack and unpack.
DI_INLINE float di_round_to_e4m3(float x) {
  uint32_t bits = di_bits_of_float(x);
  uint32_t size = bits & 0x7FFFFFFFu;
  uint32_t limited = size > 0x43E00000u ? 0x43E00000u : size;
  uint32_t normal = (limited + 0x7FFFFu + ((limited >> 20) & 1u)) & 0xFFF00000u;
  uint32_t denormal = di_bits_of_float((di_float_of_bits(limited) + 16384.0f) - 16384.0f);
  uint32_t value = limited < 0x3C800000u ? denormal : normal;
  value = size > 0x7F800000u ? 0x7FC00000u : value;
  return di_float_of_bits(value | (bits & 0x80000000u));
}

// ---- ue8m0: 2^(code - 127), 255 is NaN

DI_INLINE float di_ue8m0_to_f32(uint8_t code) {
  uint32_t bits = code == 0 ? 0x00400000u : (uint32_t)code << 23;
  return di_float_of_bits(code == 255 ? 0x7FC00000u : bits);
}

// 2^(127 - code), the factor that divides by a scale of 1..253; 254 and 255 are not scales here.
DI_INLINE float di_ue8m0_inverse(uint8_t code) {
  return di_float_of_bits((uint32_t)(uint8_t)(254 - code) << 23);
}

// ---- e2m1: codes 0..7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign

DI_INLINE float di_e2m1_to_f32(uint8_t code) {
  uint32_t size = code & 7u;
  uint32_t bits = (size << 22) + (126u << 23);
  bits = size == 1u ? 126u << 23 : bits;
  bits = size == 0u ? 0u : bits;
  return di_float_of_bits(bits | (uint32_t)(code & 8u) << 28);
}

// Nearest, ties to the even code, saturating at +-6; a NaN becomes a zero of its sign.
DI_INLINE uint8_t di_f32_to_e2m1(float x) {
  float size = di_abs(x);
  int32_t code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) +
                 (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
  return (uint8_t)((uint32_t)code | ((di_bits_of_float(x) >> 28) & 8u));
}

// ---- scales of the dynamic quantisers (spec 6.3). amax that is NaN or infinite: the NaN code.

// A running amax as the bits of |x|: m starts at 0, di_float_of_bits(m) is the amax. The order of
// the bits is that of the values with NaN above infinity, so a NaN is kept, where a comparison of
// floats would drop it; and a maximum of integers is a reduction that vectorises.
DI_INLINE int32_t di_amax_bits(int32_t m, float x) {
  int32_t size = (int32_t)(di_bits_of_float(x) & 0x7FFFFFFFu);
  return m > size ? m : size;
}

// One step of the same on floats, m >= 0.
DI_INLINE float di_amax(float m, float x) {
  return di_float_of_bits((uint32_t)di_amax_bits((int32_t)di_bits_of_float(m), x));
}

DI_INLINE uint8_t di_ue8m0_ceil(float x) {
  return (uint8_t)((di_bits_of_float(x) + 0x7FFFFFu) >> 23);
}

DI_INLINE bool di_is_finite(float x) { return (di_bits_of_float(x) & 0x7FFFFFFFu) < 0x7F800000u; }

// Activations and window KV: 2^ceil(log2(max(amax, 1e-4) * fp32(1/448))).
DI_INLINE uint8_t di_fp8_scale(float amax) {
  uint8_t code = di_ue8m0_ceil((amax < 1e-4f ? 1e-4f : amax) * 0.00223214296f);
  return di_is_finite(amax) ? code : (uint8_t)255;
}

// Index queries and keys: 2^ceil(log2(max(amax, 6 * 2^-126) * fp32(1/6))).
DI_INLINE uint8_t di_fp4_scale_ue8m0(float amax) {
  const float floor = 7.05296610e-38f;
  uint8_t code = di_ue8m0_ceil((amax < floor ? floor : amax) * 0.166666672f);
  return di_is_finite(amax) ? code : (uint8_t)255;
}

// Compressed KV: e4m3(min(max(amax, 6 * 2^-9) * fp32(1/6), 448)).
DI_INLINE uint8_t di_fp4_scale_e4m3(float amax) {
  uint8_t code = di_f32_to_e4m3((amax < 0.01171875f ? 0.01171875f : amax) * 0.166666672f);
  return di_is_finite(amax) ? code : (uint8_t)0x7F;
}

// ---- one element, given its block's scale code

DI_INLINE uint8_t di_quantize_fp8(float x, uint8_t scale) {
  uint8_t code = di_f32_to_e4m3(x * di_ue8m0_inverse(scale));
  return scale == 255 ? (uint8_t)0x7F : code;
}

// What the code of di_quantize_fp8 stands for, as bf16 (exact: four bits times a power of two).
DI_INLINE uint16_t di_fake_quantize_fp8(float x, uint8_t scale) {
  float value = di_round_to_e4m3(x * di_ue8m0_inverse(scale)) * di_ue8m0_to_f32(scale);
  return scale == 255 ? (uint16_t)0x7FC0u : (uint16_t)(di_bits_of_float(value) >> 16);
}

DI_INLINE uint8_t di_quantize_fp4_ue8m0(float x, uint8_t scale) {
  uint8_t code = di_f32_to_e2m1(x * di_ue8m0_inverse(scale));
  return scale == 255 ? (uint8_t)0 : code;
}

DI_INLINE uint8_t di_quantize_fp4_e4m3(float x, uint8_t scale) {
  uint8_t code = di_f32_to_e2m1(x / di_e4m3_to_f32(scale));
  return scale == 0x7F ? (uint8_t)0 : code;
}

#endif
