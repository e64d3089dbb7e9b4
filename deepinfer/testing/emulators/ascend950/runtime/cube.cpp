// The cube unit: products of NZ-ordered tiles in L0A and L0B, sums in fp32 in L0C.
//
// The order of the device's sums is not known; here K ascends, one product after the other.
#include <unordered_map>

#include "state.h"

namespace emu {

struct Scales {
    std::vector<uint16_t> pairs;  // [row / 16][pair of K][16]
    int stride = 0;
};
static std::unordered_map<uint64_t, Scales> scales[2];

// Scales belong to the data tile at an address; one granule a fractal stands for its slots.
static void touch_slot(bool is_a, uint64_t tile, bool write) {
    size_t offset = (uint8_t*)(tile * 16) - (is_a ? l0a() : l0b());
    touch(state.scales[!is_a].base + offset / 512 * kGranule, kGranule, write);
}

void load_scales(bool is_a, uint64_t destination, const uint8_t* source, int m0, int k0, int ms,
                 int ks, int source_stride, int destination_stride) {
    Scales& s = scales[!is_a][destination];
    s.stride = destination_stride;
    s.pairs.assign(size_t(ms) * destination_stride * 16, 0xFFFF);
    for (int i = 0; i < ms; i++) {
        const uint8_t* row = source + size_t((m0 + i) * source_stride + k0) * 32;
        touch(row, ks * 32, false);
        memcpy(&s.pairs[size_t(i) * destination_stride * 16], row, ks * 32);
    }
    touch_slot(is_a, destination, true);
}

static float element(const void* p, Format format, size_t i) {
    switch (format) {
        case Format::bf16: return bf16_value(((const uint16_t*)p)[i]);
        case Format::f32: return ((const float*)p)[i];
        case Format::e4m3: return e4m3_value(((const uint8_t*)p)[i]);
        case Format::e2m1: return e2m1_value(((const uint8_t*)p)[i / 2] >> (i & 1) * 4 & 15);
        default: return NAN;
    }
}

static size_t bytes_of(Format format, size_t elements) {
    switch (format) {
        case Format::f32: return elements * 4;
        case Format::e4m3: return elements;
        case Format::e2m1: return elements / 2;
        default: return elements * 2;
    }
}

// An operand as f32 [k][rows], from [k / C0][rows / 16][16][C0], C0 = 32 bytes (64 e2m1).
static std::vector<float> unpack(const void* p, Format format, int rows, int k, const Scales* s) {
    int c0 = format == Format::e2m1 ? 64 : 32 / (int)bytes_of(format, 1);
    int padded = (rows + 15) / 16 * 16;
    touch(p, bytes_of(format, size_t(padded) * k), false);
    std::vector<float> out(size_t(k) * padded);
    for (int r = 0; r < padded; r++)
        for (int c = 0; c < k; c++) {
            size_t at = (size_t(c / c0) * (padded / 16) + r / 16) * 16 * c0 + r % 16 * c0 + c % c0;
            float v = element(p, format, at);
            if (s) {
                uint16_t pair = s->pairs[(size_t(r / 16) * s->stride + c / 64) * 16 + r % 16];
                v *= ue8m0_value(c / 32 & 1 ? pair >> 8 : pair & 255);
            }
            out[size_t(c) * padded + r] = v;
        }
    return out;
}

void mmad(float* c, const void* a, const void* b, Format format, int m, int k, int n, bool clear,
          bool scaled) {
    int mp = (m + 15) / 16 * 16, np = (n + 15) / 16 * 16;
    const Scales *sa = nullptr, *sb = nullptr;
    if (scaled) {
        auto fa = scales[0].find(uint64_t(a) / 16), fb = scales[1].find(uint64_t(b) / 16);
        if (fa == scales[0].end() || fb == scales[1].end())
            return report("scales", "an operand has no scales");
        sa = &fa->second, sb = &fb->second;
        touch_slot(true, fa->first, false);
        touch_slot(false, fb->first, false);
    }
    std::vector<float> left = unpack(a, format, m, k, sa), right = unpack(b, format, n, k, sb);
    if (!clear) touch(c, size_t(mp) * np * 4, false);
    touch(c, size_t(mp) * np * 4, true);
    std::vector<float> row(np);
    for (int i = 0; i < m; i++) {
        for (int j = 0; j < n; j++) row[j] = clear ? 0.f : c[(size_t(j / 16) * mp + i) * 16 + j % 16];
        for (int x = 0; x < k; x++) {
            float v = left[size_t(x) * mp + i];
            const float* other = &right[size_t(x) * np];
            for (int j = 0; j < n; j++) row[j] += v * other[j];
        }
        for (int j = 0; j < n; j++) c[(size_t(j / 16) * mp + i) * 16 + j % 16] = row[j];
    }
}

}  // namespace emu
