// CUDA's types and intrinsics as generated kernels use them, on the host. A closed list: a name
// that is not here does not compile, and so is never emulated wrongly.
#pragma once
#include <sys/types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../runtime/api.h"
#include "../../formats.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n)
#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")

using std::max;
using std::min;
typedef unsigned char uchar;

#define VECTOR_TYPE(name, T)                                   \
    struct name##1 { T x; };                                   \
    struct name##2 { T x, y; };                                \
    struct name##4 { T x, y, z, w; };                          \
    inline name##2 make_##name##2(T a, T b) { return {a, b}; } \
    inline name##4 make_##name##4(T a, T b, T c, T d) { return {a, b, c, d}; }
VECTOR_TYPE(float, float)
VECTOR_TYPE(int, int)
VECTOR_TYPE(uint, unsigned)
VECTOR_TYPE(ushort, unsigned short)
VECTOR_TYPE(uchar, unsigned char)
VECTOR_TYPE(longlong, long long)
VECTOR_TYPE(ulonglong, unsigned long long)
#undef VECTOR_TYPE

// ---- bfloat16

struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    bfloat16_t(float f) : bits(emu::bf16_bits(f)) {}
    bfloat16_t(double f) : bfloat16_t((float)f) {}
    bfloat16_t(int i) : bfloat16_t((float)i) {}
    operator float() const { return emu::bf16_value(bits); }
};
struct bfloat16x2 {
    bfloat16_t x, y;
};
typedef bfloat16_t __nv_bfloat16;
typedef bfloat16x2 __nv_bfloat162;
inline __nv_bfloat162 __float22bfloat162_rn(float2 v) { return {bfloat16_t(v.x), bfloat16_t(v.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {float(v.x), float(v.y)}; }
inline unsigned __pack_nv_bfloat162(bfloat16_t a, bfloat16_t b) {
    return a.bits | unsigned(b.bits) << 16;
}

// ---- fp8: conversions round to nearest even and saturate

struct fp8_e4_t {
    uint8_t bits;
    fp8_e4_t() = default;
    fp8_e4_t(float f) : bits(emu::e4m3_bits(f)) {}
    operator float() const { return emu::e4m3_value(bits); }
};
struct fp8_e4_2_t {
    fp8_e4_t x, y;
};
struct fp8_e4_4_t {
    fp8_e4_t x, y, z, w;
};
struct fp8_e4_8_t {
    fp8_e4_4_t x, y;
};
struct fp8_e4_16_t {
    fp8_e4_8_t x, y;
};
typedef uint16_t __nv_fp8x2_storage_t;
enum { __NV_SATFINITE, __NV_NOSAT };
enum { __NV_E4M3, __NV_E5M2 };
inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 v, int, int format) {
    if (format != __NV_E4M3) emu::report("unsupported", "conversion to e5m2");
    return emu::e4m3_bits(v.x) | uint16_t(emu::e4m3_bits(v.y)) << 8;
}
inline float2 __tl_cvt_fp8x2_to_float2(uint16_t v, int) {
    return {emu::e4m3_value(v & 255), emu::e4m3_value(v >> 8)};
}

// ---- threads

inline void __syncthreads() { emu::barrier_sync(0, blockDim.x); }
inline void __syncwarp(unsigned = ~0u) { emu::sync_warp(); }
inline unsigned __ballot_sync(unsigned, int predicate) { return emu::ballot(predicate); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

template <class T>
inline T emu_shuffle(T v, int source) {
    static_assert(sizeof(T) == 4, "only 4-byte shuffles are emulated");
    uint32_t bits;
    memcpy(&bits, &v, 4);
    bits = emu::shuffle(bits, source);
    memcpy(&v, &bits, 4);
    return v;
}
template <class T>
inline T __shfl_sync(unsigned, T v, int source, int width = 32) {
    return emu_shuffle(v, (emu::lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned, T v, int mask, int = 32) {
    return emu_shuffle(v, emu::lane() ^ mask);
}
template <class T>
inline T __shfl_up_sync(unsigned, T v, int delta, int width = 32) {
    int l = emu::lane();
    return emu_shuffle(v, (l & (width - 1)) >= delta ? l - delta : l);
}
template <class T>
inline T __shfl_down_sync(unsigned, T v, int delta, int width = 32) {
    int l = emu::lane();
    return emu_shuffle(v, (l & (width - 1)) + delta < width ? l + delta : l);
}
inline void AtomicAdd(int* p, int v, int = 0) { emu::atomic_add(p, v); }
inline int AtomicAddRet(int* p, int v, int = 0) { return emu::atomic_add(p, v); }
