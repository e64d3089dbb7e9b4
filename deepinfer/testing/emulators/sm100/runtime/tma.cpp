// Tiled TMA loads: boxes of up to five dims, swizzles, zero fill, 16U4_ALIGN16B unpacking.
#include <algorithm>
#include <array>

#include "state.h"

namespace emu {

constexpr int k16U4 = 14;  // CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B

static int element_bytes(
    int dtype) {  // CUtensorMapDataType: u8 u16 u32 i32 u64 i64 f16 f32 f64 bf16 ...
    static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
    return dtype < 13 ? bytes[dtype] : 1;
}

// Visit a box in pieces: fn(shared address, global pointer or null for zero fill, bytes).
template <class Fn>
static void walk(const CUtensorMap& m, const int* coords, uint32_t shared, Fn fn) {
    bool u4 = m.dtype == k16U4;
    int element = element_bytes(m.dtype);
    int64_t row_bytes = int64_t(m.box[0]) * element, rows = 1;  // u4: a byte an element in shared
    for (int i = 1; i < m.rank; i++) rows *= m.box[i];
    for (int64_t row = 0; row < rows; row++) {
        bool inside = true;
        uint8_t* base = m.base;
        int64_t rest = row;
        for (int i = 1; i < m.rank; i++) {
            int64_t x = coords[i] + rest % m.box[i];
            rest /= m.box[i];
            inside = inside && x >= 0 && x < m.dim[i];
            base += x * m.stride[i];
        }
        for (int64_t b = 0; b < row_bytes; b += 16) {
            uint32_t to = swizzle(shared + row * row_bytes + b, m.swizzle);
            if (u4) {  // 16 codes: 8 bytes in global memory, a slot of 16 bytes in shared
                int64_t x = coords[0] + b;
                fn(to, inside && x >= 0 && x < m.dim[0] ? base + x / 2 : nullptr, 8);
                continue;
            }
            int bytes = std::min<int64_t>(16, row_bytes - b);
            for (int k = 0; k < bytes;) {
                int64_t x = coords[0] + (b + k) / element;
                bool in = inside && x >= 0 && x < m.dim[0];
                int64_t run = in ? std::min<int64_t>((m.dim[0] - x) * element, bytes - k) : element;
                fn(to + k, in ? base + x * element : nullptr, (int)run);
                k += run;
            }
        }
    }
}

static int64_t box_bytes(const CUtensorMap& m) {
    int64_t n = 1;
    for (int i = 0; i < m.rank; i++) n *= m.box[i];
    return m.dtype == k16U4 ? n / 2 : n * element_bytes(m.dtype);
}

// What cuTensorMapEncodeTiled refuses.
static void check_map(const CUtensorMap& m) {
    bool u4 = m.dtype == k16U4;
    int align = u4 ? 32 : 16;
    if ((uintptr_t)m.base % align) report("tma", "global address is not a multiple of %d", align);
    for (int i = 1; i < m.rank; i++)
        if (m.stride[i] % align)
            report("tma", "stride %ld is not a multiple of %d", (long)m.stride[i], align);
    if (u4 && (m.dim[0] % 128 || m.box[0] != 128))
        report("tma", "16U4_ALIGN16B: inner dim %ld, box %d; needs a multiple of 128 and 128",
               (long)m.dim[0], m.box[0]);
    for (int i = 0; i < m.rank; i++)
        if (m.box[i] < 1 || m.box[i] > 256) report("tma", "box dim %d is not in 1..256", m.box[i]);
    int64_t row = int64_t(m.box[0]) * element_bytes(m.dtype),
            span = m.swizzle ? 16 << m.swizzle : 0;
    if (span && row > span)
        report("tma", "inner box of %ld bytes, swizzle span %ld", (long)row, (long)span);
}

void tma_load(const CUtensorMap& map, void* barrier, void* destination, int rank,
              const int* coords) {
    state.operations["cp.async.bulk.tensor"]++;
    MBarrier* b = find_mbarrier(barrier);
    if (!b) return;
    touch_mbarrier(barrier);
    require_fenced(b, "a TMA load");
    check_map(map);
    if (rank != map.rank) report("tma", "%d coordinates for rank %d", rank, map.rank);
    uint32_t shared = smem_address(destination);
    if (shared & 127) report("alignment", "TMA destination 0x%x is not a multiple of 128", shared);
    std::array<int, 5> at{};
    std::copy(coords, coords + rank, at.begin());
    bool u4 = map.dtype == k16U4;
    Access write{b->agent, b->phase + 1, &state.causal[state.current],
                 nullptr,  nullptr,      true,
                 false,    true,         "TMA write"};
    walk(map, coords, shared,
         [&](uint32_t to, uint8_t*, int bytes) { check_smem(to, u4 ? 16 : bytes, write, true); });
    CUtensorMap m = map;
    uint32_t phase = b->phase;
    submit(-1, [=] {
        walk(m, at.data(), shared, [&](uint32_t to, uint8_t* from, int bytes) {
            if (to + bytes > state.smem_bytes) return;
            if (!from) {
                memset(state.smem + to, 0, u4 ? 16 : bytes);
                return;
            }
            check_global(from, bytes, false);
            if (inside_global(from, bytes)) memcpy(state.smem + to, from, bytes);
            if (u4) memset(state.smem + to + 8, 0xEE, 8);  // padding: nothing may depend on it
        });
        if (b->phase != phase)
            report("mbarrier", "a TMA load completes in a later phase than its own");
        b->tx -= box_bytes(m);
        complete_if_done(b);
    });
}

}  // namespace emu
