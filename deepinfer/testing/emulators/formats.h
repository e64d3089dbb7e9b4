// Element formats of the tensor core, from their bits.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emu {

inline float bf16_value(uint16_t bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
}

inline float e4m3_value(uint8_t bits) {
    int e = (bits >> 3) & 15, m = bits & 7;
    float v = e == 15 && m == 7 ? NAN
              : e               ? std::ldexp(1.f + m / 8.f, e - 7)
                                : std::ldexp((float)m, -9);
    return bits & 0x80 ? -v : v;
}

inline float e2m1_value(uint8_t bits) {
    static const float values[8] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    return bits & 8 ? -values[bits & 7] : values[bits & 7];
}

inline float ue8m0_value(uint8_t bits) {
    return bits == 255 ? NAN : std::ldexp(1.f, (int)bits - 127);
}

inline uint16_t bf16_bits(float f) {  // to nearest even
    uint32_t u;
    memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

inline uint8_t e4m3_bits(float f) {  // to nearest even, saturating
    if (f != f) return 0x7f;
    uint8_t sign = std::signbit(f) ? 0x80 : 0;
    float a = std::fabs(f);
    if (a >= 448.f) return sign | 0x7e;
    int e = a == 0.f ? -6 : std::max(std::ilogb(a), -6);
    float step = std::ldexp(1.f, e - 3);
    int units = (int)std::nearbyint(a / step);  // 0..16
    if (e == -6) return sign | units;           // 8 carries into the exponent by itself
    return sign | (((e + 7) << 3) + (units - 8));
}

}  // namespace emu
