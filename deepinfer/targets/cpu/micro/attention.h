// Widening of cached keys to bf16, one key at a time: fp8 window keys and fp4 compressed entries.
// Same bits as dequantize_fp8 and dequantize_fp4 of deepinfer/numerics/formats.py.
#pragma once
#include <stdint.h>

extern "C" int32_t di_key_e4m3(uint8_t* code, uint8_t* sf, int32_t width, int32_t block,
                               uint16_t* out);
extern "C" int32_t di_key_e2m1(uint8_t* packed, uint8_t* sf, int32_t width, uint16_t* out);
