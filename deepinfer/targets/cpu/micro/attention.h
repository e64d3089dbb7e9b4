// Widening of cached keys to bf16, one key at a time: fp8 window keys and fp4 compressed entries.
// Same bits as dequantize_fp8 and dequantize_fp4 of deepinfer/numerics/formats.py.
//
// And the same keys as values, packed like a bf16 weight of 64 inputs (gemm.h): the element of key
// 2j+i at channel 16t+c stands at [t][j][c][i]. Width is a multiple of 16.
#pragma once
#include <stdint.h>

extern "C" int32_t di_key_e4m3(uint8_t* code, uint8_t* sf, int32_t width, int32_t block,
                               uint16_t* out);
extern "C" int32_t di_key_e2m1(uint8_t* packed, uint8_t* sf, int32_t width, uint16_t* out);
extern "C" int32_t di_pack_keys(uint16_t* keys, int32_t width, uint16_t* values);
extern "C" int32_t di_set_value(uint16_t* key, int32_t width, int32_t lane, uint16_t* values);
extern "C" int32_t di_drop_value(uint16_t* values, int32_t width, int32_t lane);
