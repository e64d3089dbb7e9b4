// The functions of attention.h. Compiled once per library, in micro.cc.
#pragma once
#if defined(DI_ISA_AVX2) || defined(DI_ISA_AVX512) || defined(DI_ISA_AMX)
#include <immintrin.h>
#endif

#include "attention.h"
#include "formats.h"

// out[c] = bf16(e4m3(code[c]) * ue8m0(sf[c / block])); width is a multiple of block. Returns 0.
extern "C" int32_t di_key_e4m3(uint8_t* __restrict code, uint8_t* __restrict sf, int32_t width,
                              int32_t block, uint16_t* __restrict out) {
  for (int32_t b = 0; b < width / block; ++b) {
    const float scale = di_ue8m0_to_f32(sf[b]);
    for (int32_t c = b * block; c < (b + 1) * block; ++c)
      out[c] = di_f32_to_bf16(di_e4m3_to_f32(code[c]) * scale);
  }
  return 0;
}

// out[i] = bf16(e2m1(nibble i) * scale) for the 16 nibbles of 8 bytes, the low one of a byte first.
// An e2m1 value times an e4m3 scale has at most 6 significant bits: cutting to bf16 is exact.
DI_INLINE void di_widen_e2m1(const uint8_t* packed, float scale, uint16_t* out) {
#if defined(DI_ISA_AVX2) || defined(DI_ISA_AVX512) || defined(DI_ISA_AMX)
  // The 16 values that this block can hold, then a look-up of their low and high bytes.
  const __m256 size = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const __m256i plus = _mm256_castps_si256(_mm256_mul_ps(size, _mm256_set1_ps(scale)));
  const __m256i minus = _mm256_xor_si256(plus, _mm256_set1_epi32((int)0x80000000u));
  const __m256i lows = _mm256_and_si256(_mm256_srli_epi32(plus, 16), _mm256_set1_epi32(0xFF));
  const __m256i highs =
      _mm256_packus_epi32(_mm256_srli_epi32(plus, 24), _mm256_srli_epi32(minus, 24));
  const __m256i twice = _mm256_packus_epi32(lows, lows);
  const __m128i high = _mm_packus_epi16(_mm256_castsi256_si128(highs),
                                        _mm256_extracti128_si256(highs, 1));
  const __m128i low = _mm_packus_epi16(_mm256_castsi256_si128(twice),
                                       _mm256_extracti128_si256(twice, 1));
  // Both tables stand as codes 0-3, 8-11, 4-7, 12-15.
  const __m128i order = _mm_setr_epi8(0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15);
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)packed), nibble = _mm_set1_epi8(15);
  const __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(bytes, nibble),
                                          _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble));
  const __m128i l = _mm_shuffle_epi8(_mm_shuffle_epi8(low, order), codes);
  const __m128i h = _mm_shuffle_epi8(_mm_shuffle_epi8(high, order), codes);
  _mm_storeu_si128((__m128i*)out, _mm_unpacklo_epi8(l, h));
  _mm_storeu_si128((__m128i*)(out + 8), _mm_unpackhi_epi8(l, h));
#else
  for (int32_t i = 0; i < 8; ++i) {
    out[2 * i] = di_f32_to_bf16(di_e2m1_to_f32(packed[i] & 15) * scale);
    out[2 * i + 1] = di_f32_to_bf16(di_e2m1_to_f32(packed[i] >> 4) * scale);
  }
#endif
}

// The same for packed e2m1 (even channel in the low nibble) with an e4m3 scale per 16 channels.
extern "C" int32_t di_key_e2m1(uint8_t* __restrict packed, uint8_t* __restrict sf, int32_t width,
                              uint16_t* __restrict out) {
  for (int32_t b = 0; b < width / 16; ++b)
    di_widen_e2m1(packed + 8 * b, di_e4m3_to_f32(sf[b]), out + 16 * b);
  return 0;
}

enum : int32_t { kTileKeys = 64, kTileChannels = 16 };

// values = the 64 keys of a tile, pairs of keys side by side. Returns 0.
extern "C" int32_t di_pack_keys(uint16_t* __restrict keys, int32_t width,
                               uint16_t* __restrict values) {
  for (int32_t j = 0; j < kTileKeys / 2; ++j)
    for (int32_t t = 0; t < width / kTileChannels; ++t) {
      const uint16_t* even = keys + 2 * j * width + t * kTileChannels;
      uint16_t* out = values + (t * kTileKeys + 2 * j) * kTileChannels;
#if defined(DI_ISA_AVX2) || defined(DI_ISA_AVX512) || defined(DI_ISA_AMX)
      const __m256i e = _mm256_loadu_si256((const __m256i*)even);
      const __m256i o = _mm256_loadu_si256((const __m256i*)(even + width));
      const __m256i low = _mm256_unpacklo_epi16(e, o), high = _mm256_unpackhi_epi16(e, o);
      _mm256_storeu_si256((__m256i*)out, _mm256_permute2x128_si256(low, high, 0x20));
      _mm256_storeu_si256((__m256i*)(out + 16), _mm256_permute2x128_si256(low, high, 0x31));
#else
      for (int32_t c = 0; c < kTileChannels; ++c) {
        out[2 * c] = even[c];
        out[2 * c + 1] = even[width + c];
      }
#endif
    }
  return 0;
}

// The values of one lane become `key`. Returns 0.
extern "C" int32_t di_set_value(uint16_t* __restrict key, int32_t width, int32_t lane,
                               uint16_t* __restrict values) {
  uint16_t* out = values + (lane / 2) * 2 * kTileChannels + lane % 2;
  for (int32_t t = 0; t < width / kTileChannels; ++t)
    for (int32_t c = 0; c < kTileChannels; ++c)
      out[t * kTileKeys * kTileChannels + 2 * c] = key[t * kTileChannels + c];
  return 0;
}

// The values of one lane become zero. Returns 0.
extern "C" int32_t di_drop_value(uint16_t* values, int32_t width, int32_t lane) {
  uint16_t* out = values + (lane / 2) * 2 * kTileChannels + lane % 2;
  for (int32_t t = 0; t < width / kTileChannels; ++t)
    for (int32_t c = 0; c < kTileChannels; ++c) out[t * kTileKeys * kTileChannels + 2 * c] = 0;
  return 0;
}
