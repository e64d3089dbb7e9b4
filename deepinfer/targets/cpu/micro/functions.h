// Transcendental functions as fixed sequences of IEEE operations.
//
// The twin of deepinfer/numerics/functions.py: same operations, same order, same constants, same
// bits (tests/numerics/test_functions.py). No libm call and no fused multiply-add: compile with
// -ffp-contract=off and without -ffast-math. All functions are free of branches, so that a loop
// calling them vectorises. A NaN result is always 0x7FC00000.
#ifndef DI_MICRO_FUNCTIONS_H
#define DI_MICRO_FUNCTIONS_H

#ifdef __FAST_MATH__
#error "the order contract needs IEEE arithmetic: compile without -ffast-math"
#endif

#include <cstdint>
#include <cstring>

#define DI_INLINE extern "C" inline __attribute__((always_inline))

DI_INLINE float di_float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

DI_INLINE uint32_t di_bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

DI_INLINE float di_abs(float x) { return di_float_of_bits(di_bits_of_float(x) & 0x7FFFFFFFu); }

// Every NaN becomes the one that the numpy reference returns.
DI_INLINE float di_one_nan(float x) { return x != x ? di_float_of_bits(0x7FC00000u) : x; }

// What a value counts as where the best ones are chosen: NaN as -inf. Kernels ask here because
// TileLang takes x == x for true.
DI_INLINE float di_choice_key(float x) { return x != x ? di_float_of_bits(0xFF800000u) : x; }

// 1.5 * 2^23: adding it rounds to the nearest integer and leaves that integer in the low bits.
#define DI_ROUND_F32 12582912.0f

// x * 2^n in two steps, of which only the second can round.
DI_INLINE float di_times_power_of_two(float x, int32_t n) {
  int32_t half = n >> 1;
  float first = di_float_of_bits((uint32_t)(half + 127) << 23);
  float second = di_float_of_bits((uint32_t)(n - half + 127) << 23);
  return (x * first) * second;
}

// e^x, but any NaN for a NaN: a constant one here makes gcc split the loops of callers.
DI_INLINE float di_exp_any_nan(float x) {
  float v = x > 89.0f ? 89.0f : x;
  v = v < -104.0f ? -104.0f : v;
  float shifted = v * 1.44269502f + DI_ROUND_F32;
  float n = shifted - DI_ROUND_F32;
  int32_t n_int = (int32_t)(di_bits_of_float(shifted) - 0x4B400000u);
  float r = (v - n * 0.693145751953125f) - n * 1.428606765330187e-06f;
  float q = 0.00138382195f;
  q = q * r + 0.00836929586f;
  q = q * r + 0.0416680872f;
  q = q * r + 0.166665152f;
  q = q * r + 0.49999994f;
  return di_times_power_of_two((r + (r * r) * q) + 1.0f, n_int);
}

DI_INLINE float di_exp(float x) { return di_one_nan(di_exp_any_nan(x)); }

DI_INLINE float di_exp2(float x) {
  float v = x > 129.0f ? 129.0f : x;
  v = v < -151.0f ? -151.0f : v;
  float shifted = v + DI_ROUND_F32;
  float r = v - (shifted - DI_ROUND_F32);
  int32_t n_int = (int32_t)(di_bits_of_float(shifted) - 0x4B400000u);
  float p = 0.00015818853f;
  p = p * r + 0.00134182395f;
  p = p * r + 0.00961706415f;
  p = p * r + 0.0555027239f;
  p = p * r + 0.240226552f;
  p = p * r + 0.693147242f;
  return di_one_nan(di_times_power_of_two(r * p + 1.0f, n_int));
}

// log(u) + correction; x is the result for u = +inf and NaN. The correction is ignored there and
// for u <= 0.
DI_INLINE float di_log_sum(float x, float u, float correction) {
  const float infinity = di_float_of_bits(0x7F800000u);
  bool tiny = u < 1.17549435e-38f;
  float scaled = tiny ? u * 8388608.0f : u;
  uint32_t bits = di_bits_of_float(scaled) + (0x3F800000u - 0x3F3504F3u);
  int32_t exponent = ((int32_t)bits >> 23) - (tiny ? 127 + 23 : 127);
  float f = di_float_of_bits((bits & 0x7FFFFFu) + 0x3F3504F3u) - 1.0f;
  float e = (float)exponent;
  float s = f / (f + 2.0f);
  float z = s * s;
  float half_square = (f * f) * 0.5f;
  float l = 0.298741758f;
  l = l * z + 0.399775088f;
  l = l * z + 0.666667759f;
  float small = s * (half_square + z * l) + (e * 1.428606765330187e-06f + correction);
  float result = ((small - half_square) + f) + e * 0.693145751953125f;
  result = u == 0.0f ? -infinity : result;
  result = u < 0.0f ? di_float_of_bits(0x7FC00000u) : result;
  return di_one_nan(u < infinity ? result : x);
}

DI_INLINE float di_log(float x) { return di_log_sum(x, x, 0.0f); }

DI_INLINE float di_log1p(float x) {
  float u = x + 1.0f;
  float back = u - 1.0f;
  float error = (1.0f - (u - back)) + (x - back);
  float result = di_log_sum(x, u, error / u);
  return u == 1.0f ? x : result;
}

DI_INLINE float di_sigmoid(float x) {
  float z = di_exp_any_nan(-di_abs(x));
  return di_one_nan((x >= 0.0f ? 1.0f : z) / (z + 1.0f));
}

DI_INLINE float di_silu(float x) { return di_one_nan(x * di_sigmoid(x)); }

DI_INLINE float di_softplus(float x) {
  float result = di_log1p(di_exp_any_nan(x));
  return x > 20.0f ? x : result;
}

DI_INLINE float di_erf(float x) {
  float size = di_abs(x);
  float low = size < 0.92f ? size : 0.0f;
  float z = low * low;
  float p = 7.99504851e-05f;
  p = p * z + -0.000804951473f;
  p = p * z + 0.00519239251f;
  p = p * z + -0.0268557295f;
  p = p * z + 0.112836257f;
  p = p * z + -0.376126289f;
  p = p * z + 0.128379166f;
  float near = low + low * p;
  float high = size > 3.95f ? 3.95f : size;
  float l = 0.000194934997f;
  l = l * high + -0.00303361635f;
  l = l * high + 0.0221895371f;
  l = l * high + -0.103855975f;
  l = l * high + -0.637266099f;
  l = l * high + -1.12762725f;
  l = l * high + -0.000207032121f;
  float far = 1.0f - di_exp_any_nan(l);
  uint32_t sign = di_bits_of_float(x) & 0x80000000u;
  return di_one_nan(di_float_of_bits(di_bits_of_float(size < 0.92f ? near : far) | sign));
}

DI_INLINE float di_rsqrt(float x) { return di_one_nan(1.0f / __builtin_sqrtf(x)); }

// Cosine and sine of an angle in radians; NaN beyond 1,572,864, where the reduction would round.
DI_INLINE void di_cos_sin(float angle, float* cos_out, float* sin_out) {
  bool usable = di_abs(angle) <= 1572864.0f;
  double x = usable ? (double)angle : 0.0;
  double shifted = x * 0.6366197723675814 + 6755399441055744.0;
  double n = shifted - 6755399441055744.0;
  uint64_t quadrant;
  std::memcpy(&quadrant, &shifted, 8);
  double r = ((x - n * 1.5707963267341256) - n * 6.077100506303966e-11) - n * 2.0222662487959506e-21;
  double z = r * r;
  double s = -2.4762020552943297e-08;
  s = s * z + 2.7555363559845356e-06;
  s = s * z + -0.00019841263855188826;
  s = s * z + 0.008333333325344769;
  s = s * z + -0.16666666666632143;
  double c = 2.064930956351029e-09;
  c = c * z + -2.755559474122555e-07;
  c = c * z + 2.480158114696591e-05;
  c = c * z + -0.0013888888878746703;
  c = c * z + 0.041666666666606754;
  double sin_r = r + (r * z) * s;
  double cos_r = (1.0 - z * 0.5) + (z * z) * c;
  double sin_value = quadrant & 1 ? cos_r : sin_r;
  double cos_value = quadrant & 1 ? sin_r : cos_r;
  float sine = (float)(quadrant & 2 ? -sin_value : sin_value);
  float cosine = (float)((quadrant + 1) & 2 ? -cos_value : cos_value);
  *sin_out = usable ? sine : di_float_of_bits(0x7FC00000u);
  *cos_out = usable ? cosine : di_float_of_bits(0x7FC00000u);
}

#endif
