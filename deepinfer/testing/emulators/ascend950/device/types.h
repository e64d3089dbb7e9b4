// Element types of generated AscendC text, on the host.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../runtime/api.h"
#include "../../formats.h"

#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __aicore__
#define __global__
#define __cube__
#define __vector__
#define __mix__(cubes, vectors)
#define __simt_vf__
#define __simd_vf__
#define __simt_callee__
#define __launch_bounds__(n)

typedef unsigned int uint;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef int event_t;

struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    bfloat16_t(float f) : bits(emu::bf16_bits(f)) {}
    operator float() const { return emu::bf16_value(bits); }
};

namespace tl {
namespace limits {
constexpr float kFloatInf = INFINITY, kFloatNInf = -INFINITY, kFloatNaN = NAN;
}
struct float_e4m3_t {
    uint8_t data;
    float_e4m3_t() = default;
    float_e4m3_t(float f) : data(emu::e4m3_bits(f)) {}
    operator float() const { return emu::e4m3_value(data); }
};
}  // namespace tl
using float8_e4m3_t = tl::float_e4m3_t;
using fp8_e4_t = float8_e4m3_t;
struct float4_e2m1x2_t {
    uint8_t data;
};
struct fp8_e8m0_t {
    uint8_t data;
};

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct uint1 {
    uint32_t x;
};
struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
struct int2 {
    int32_t x, y;
};
struct int4 {
    int32_t x, y, z, w;
};
struct bfloat16x2_t {
    bfloat16_t x, y;
};
inline float2 make_float2(float a, float b) { return {a, b}; }
inline float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }
inline float2 operator+(float2 a, float2 b) { return {a.x + b.x, a.y + b.y}; }
inline float2 operator-(float2 a, float2 b) { return {a.x - b.x, a.y - b.y}; }
inline float2 operator*(float2 a, float2 b) { return {a.x * b.x, a.y * b.y}; }
inline float2 __bfloat1622float2(bfloat16x2_t v) { return {float(v.x), float(v.y)}; }
inline bfloat16x2_t __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }

template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
    return a > b ? a : b;
}
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
    return a < b ? a : b;
}

template <class T>
constexpr emu::Format format_of() {
    if constexpr (std::is_same_v<T, bfloat16_t>) return emu::Format::bf16;
    else if constexpr (std::is_same_v<T, float>) return emu::Format::f32;
    else if constexpr (std::is_same_v<T, float8_e4m3_t>) return emu::Format::e4m3;
    else return emu::Format::e2m1;
}
