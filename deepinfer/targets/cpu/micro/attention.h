// Widening of cached keys to bf16, one key at a time: fp8 window keys and fp4 compressed entries.
// Same bits as dequantize_fp8 and dequantize_fp4 of deepinfer/numerics/formats.py.
#pragma once
#include "formats.h"

// out[c] = bf16(e4m3(code[c]) * ue8m0(sf[c / block])); width is a multiple of block. Returns 0.
DI_INLINE int32_t di_key_e4m3(uint8_t* code, uint8_t* sf, int32_t width, int32_t block,
                              uint16_t* out) {
  for (int32_t b = 0; b < width / block; ++b) {
    const float scale = di_ue8m0_to_f32(sf[b]);
    for (int32_t c = b * block; c < (b + 1) * block; ++c)
      out[c] = di_f32_to_bf16(di_e4m3_to_f32(code[c]) * scale);
  }
  return 0;
}

// The same for packed e2m1 (even channel in the low nibble) with an e4m3 scale per block.
DI_INLINE int32_t di_key_e2m1(uint8_t* packed, uint8_t* sf, int32_t width, int32_t block,
                              uint16_t* out) {
  for (int32_t b = 0; b < width / block; ++b) {
    const float scale = di_e4m3_to_f32(sf[b]);
    for (int32_t c = b * block / 2; c < (b + 1) * block / 2; ++c) {
      out[2 * c] = di_f32_to_bf16(di_e2m1_to_f32(packed[c] & 15) * scale);
      out[2 * c + 1] = di_f32_to_bf16(di_e2m1_to_f32(packed[c] >> 4) * scale);
    }
  }
  return 0;
}
