// Copies between global memory, UB, L1, L0 and L0C. Strides and lengths as the C API has them:
// bytes for UB and global memory, 32-byte units in L1, fractals (512 bytes) for L0A and L0B.
#pragma once
#include "sync.h"

enum asc_load_l2_cache_mode : int {};
enum asc_store_l2_cache_mode : int {};
enum asc_unit_flag_mode : int {};
enum asc_quant_mode : int {};
enum asc_relu_pre_mode : int {};
enum asc_dual_dst_mode : int {};

constexpr size_t kC0 = 32, kFractal = 512;

inline size_t round_up(size_t n) { return (n + kC0 - 1) / kC0 * kC0; }

inline void asc_copy_gm2ub_align(uint8_t* dst, uint8_t* src, uint32_t bursts, uint32_t bytes,
                                 int left, int right, bool, asc_load_l2_cache_mode,
                                 uint64_t src_stride, uint64_t dst_stride) {
    emu::issue(PIPE_MTE2, "gm2ub", [=] {
        if (left || right) emu::report("not emulated", "a padded copy to UB");
        for (uint32_t i = 0; i < bursts; i++) {
            uint8_t *d = dst + i * dst_stride, *s = src + i * src_stride;
            emu::require_aligned(d, kC0, "UB destination");
            emu::touch(s, bytes, false);
            emu::touch(d, round_up(bytes), true);
            memset(d, 0xFF, round_up(bytes));  // what the last unit holds behind the data
            memcpy(d, s, bytes);
        }
    });
}

inline void asc_copy_ub2gm_align(uint8_t* dst, uint8_t* src, uint32_t bursts, uint32_t bytes,
                                 asc_store_l2_cache_mode, uint64_t dst_stride,
                                 uint64_t src_stride) {
    emu::issue(PIPE_MTE3, "ub2gm", [=] {
        for (uint32_t i = 0; i < bursts; i++) {
            uint8_t *d = dst + i * dst_stride, *s = src + i * src_stride;
            emu::require_aligned(s, kC0, "UB source");
            emu::touch(s, bytes, false, emu::kInitialised);
            emu::touch(d, bytes, true);
            memcpy(d, s, bytes);
        }
    });
}

struct NzParameters {
    uint64_t row = 1, column = 0;  // strides in L1 between rows and between 32-byte columns
};
inline NzParameters nz;
inline void asc_set_gm2l1_nz_para(uint16_t, uint16_t row, uint16_t column, uint16_t) {
    nz = {row, column};
}

// Rows i < n of d elements into 32-byte columns; a ragged last column is filled with zeros.
template <class T>
inline void copy_to_nz(const char* name, T* dst, T* src, uint64_t row_step, uint64_t element_step,
                       uint16_t n, uint32_t d) {
    emu::issue(PIPE_MTE2, name, [=, p = nz] {
        constexpr uint32_t width = kC0 / sizeof(T);
        emu::require_aligned(dst, kC0, "L1 destination");
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t c = 0; c < (d + width - 1) / width; c++) {
                uint8_t* to = (uint8_t*)dst + (c * p.column + i * p.row) * kC0;
                emu::touch(to, kC0, true);
                memset(to, 0, kC0);
                uint32_t count = d - c * width < width ? d - c * width : width;
                for (uint32_t j = 0; j < count; j++) {
                    uint8_t* from =
                        (uint8_t*)src + i * row_step + (c * width + j) * element_step;
                    emu::touch(from, sizeof(T), false);
                    memcpy(to + j * sizeof(T), from, sizeof(T));
                }
            }
    });
}
template <class T>
inline void asc_copy_gm2l1_nd2nz(T* dst, T* src, uint64_t stride, asc_load_l2_cache_mode,
                                 uint16_t n, uint32_t d, uint64_t, bool) {
    copy_to_nz("nd2nz", dst, src, stride, sizeof(T), n, d);
}
template <class T>
inline void asc_copy_gm2l1_dn2nz(T* dst, T* src, uint64_t stride, asc_load_l2_cache_mode,
                                 uint16_t n, uint32_t d, uint64_t, bool) {
    copy_to_nz("dn2nz", dst, src, sizeof(T), stride, n, d);
}

struct FillParameters {
    uint64_t repeat, blk_num, dst_gap;
};
inline void asc_fill_l1(uint16_t* dst, uint32_t value, FillParameters p) {
    emu::issue(PIPE_MTE2, "fill_l1", [=] {
        uint8_t* to = (uint8_t*)dst;
        for (uint64_t r = 0; r < p.repeat; r++, to += (p.blk_num + p.dst_gap) * kC0) {
            emu::touch(to, p.blk_num * kC0, true);
            for (uint64_t i = 0; i < p.blk_num * kC0; i += 4) memcpy(to + i, &value, 4);
        }
    });
}

inline void asc_copy_ub2l1(void* dst, void* src, int bursts, int units, int src_gap, int dst_gap) {
    emu::issue(PIPE_MTE3, "ub2l1", [=] {
        uint8_t *d = (uint8_t*)dst, *s = (uint8_t*)src;
        emu::require_aligned(s, kC0, "UB source");
        emu::require_aligned(d, kC0, "L1 destination");
        for (int i = 0; i < bursts; i++) {
            emu::touch(s, units * kC0, false, emu::kInitialised);
            emu::touch(d, units * kC0, true);
            memcpy(d, s, units * kC0);
            s += (units + src_gap) * kC0, d += (units + dst_gap) * kC0;
        }
    });
}

template <class T>
inline void copy_to_l0(const char* name, T* dst, T* src, int m0, int k0, int ms, int ks,
                       int src_stride, int dst_stride) {
    emu::issue(PIPE_MTE1, name, [=] {
        emu::require_aligned(dst, kFractal, "L0 destination");
        for (int k = 0; k < ks; k++) {
            uint8_t* d = (uint8_t*)dst + size_t(k) * dst_stride * kFractal;
            uint8_t* s = (uint8_t*)src + (size_t(k0 + k) * src_stride + m0) * kFractal;
            emu::touch(s, ms * kFractal, false);
            emu::touch(d, ms * kFractal, true);
            memcpy(d, s, ms * kFractal);
        }
    });
}
template <class T>
inline void asc_copy_l12l0a(T* d, T* s, int m0, int k0, int ms, int ks, int ss, int ds) {
    copy_to_l0("l12l0a", d, s, m0, k0, ms, ks, ss, ds);
}
template <class T>
inline void asc_copy_l12l0b(T* d, T* s, int m0, int k0, int ms, int ks, int ss, int ds) {
    copy_to_l0("l12l0b", d, s, m0, k0, ms, ks, ss, ds);
}
inline void asc_copy_l12l0a_mx(uint64_t d, fp8_e8m0_t* s, int m0, int k0, int ms, int ks, int ss,
                               int ds) {
    emu::issue(PIPE_MTE1, "l12l0a_mx",
               [=] { emu::load_scales(true, d, (uint8_t*)s, m0, k0, ms, ks, ss, ds); });
}
inline void asc_copy_l12l0b_mx(uint64_t d, fp8_e8m0_t* s, int m0, int k0, int ms, int ks, int ss,
                               int ds) {
    emu::issue(PIPE_MTE1, "l12l0b_mx",
               [=] { emu::load_scales(false, d, (uint8_t*)s, m0, k0, ms, ks, ss, ds); });
}
