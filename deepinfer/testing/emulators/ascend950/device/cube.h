// Matrix products and the way out of L0C.
#pragma once
#include "move.h"

template <class T>
inline void asc_mmad(float* c, T* a, T* b, int m, int k, int n, int, bool, bool, bool clear) {
    emu::issue(PIPE_M, "mmad",
               [=] { emu::mmad(c, a, b, format_of<T>(), m, k, n, clear, false); });
}
template <class T>
inline void asc_mmad_mx(float* c, T* a, T* b, int m, int k, int n, int, bool, bool, bool clear) {
    emu::issue(PIPE_M, "mmad_mx",
               [=] { emu::mmad(c, a, b, format_of<T>(), m, k, n, clear, true); });
}

inline void asc_set_l0c_copy_nz_para(int, int, int) {}

// Rows r0..r1 and columns c0..c1 of an accumulator, row-major, converted to D.
template <class D>
inline void drain(D* dst, const float* src, int r0, int r1, int c0, int c1, int dst_stride,
                  int src_stride) {
    for (int i = r0; i < r1; i++) {
        emu::touch(dst + size_t(i - r0) * dst_stride, (c1 - c0) * sizeof(D), true);
        for (int j = c0; j < c1; j++) {
            const float* from = src + (size_t(j / 16) * src_stride + i) * 16 + j % 16;
            dst[size_t(i - r0) * dst_stride + j - c0] = D(*from);
        }
    }
}
inline void read_l0c(const float* src, int n, int stride) {
    emu::touch(src, size_t(stride) * ((n + 15) / 16 * 16) * 4, false, emu::kInitialised);
}

template <class D>
inline void asc_copy_l0c2gm(D* dst, float* src, int n, int m, int dst_stride, int src_stride,
                            asc_store_l2_cache_mode, asc_unit_flag_mode, asc_quant_mode,
                            asc_relu_pre_mode relu, int, int, int, int) {
    emu::issue(PIPE_FIX, "l0c2gm", [=] {
        if (relu) emu::report("not emulated", "relu on the way out of L0C");
        read_l0c(src, n, src_stride);
        drain(dst, src, 0, m, 0, n, dst_stride, src_stride);
    });
}

// dual: 0 one vector core, 1 rows are split over both, 2 columns are.
template <class D>
inline void asc_copy_l0c2ub(D* dst, float* src, int n, int m, int dst_stride, int src_stride,
                            int sub, asc_dual_dst_mode dual, asc_unit_flag_mode, asc_quant_mode,
                            asc_relu_pre_mode relu, int, int, int, int) {
    size_t offset = (uint8_t*)dst - emu::ub();
    emu::issue(PIPE_FIX, "l0c2ub", [=] {
        if (relu) emu::report("not emulated", "relu on the way out of L0C");
        read_l0c(src, n, src_stride);
        D *first = (D*)(emu::ub_of(0) + offset), *second = (D*)(emu::ub_of(1) + offset);
        if (dual == 1) {
            drain(first, src, 0, m / 2, 0, n, dst_stride, src_stride);
            drain(second, src, m / 2, m, 0, n, dst_stride, src_stride);
        } else if (dual == 2) {
            drain(first, src, 0, m, 0, n / 2, dst_stride, src_stride);
            drain(second, src, 0, m, n / 2, n, dst_stride, src_stride);
        } else {
            drain(sub ? second : first, src, 0, m, 0, n, dst_stride, src_stride);
        }
    });
}
