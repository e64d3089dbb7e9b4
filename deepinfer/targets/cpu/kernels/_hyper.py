"""What the hyper-connection kernels share, for rows of ``hc`` streams, [row, stream * C + channel].

``post`` and ``collapse`` finish the sums of ``columns`` channels before they begin the next ones.
"""

import tilelang.language as T

from deepinfer.targets.base import Spec, grid
from deepinfer.targets.cpu.dialect import LANES, bf16, call, const, f32
from deepinfer.targets.cpu.kernels._macros import fake_quantize_fp8_row, norm_row, sum_squares


def columns_of(C: int) -> tuple[int, ...]:
    """columns: whose sums are finished before the next ones begin; they stay in the cache."""
    return (C, *(c for c in (256, 64) if C % c == 0 and c < C))


def mix_space(spec: Spec):
    """rows: that share the loads of the mixing matrix. columns: see above."""
    return grid(rows=(4, 1, 2), columns=columns_of(spec.dims["C"]))


@T.macro
def post_row(acc, y, x, post, comb, out, row, hc, C, columns):
    """``hyper_post`` of one row into ``out``."""
    for block in T.serial(C // columns):
        at = block * columns
        for h in T.serial(hc):
            for c in T.serial(columns):
                acc[c] = post[row, h] * f32(y[row, at + c])
            for d in T.serial(hc):
                for c in T.serial(columns):
                    acc[c] = acc[c] + comb[row, d, h] * f32(x[row, d * C + at + c])
            for c in T.serial(columns):
                out[row, h * C + at + c] = bf16(acc[c])


@T.macro
def collapse_row(acc, x, pre, y, row, hc, C, columns):
    """``hyper_collapse`` of one row into ``y``."""
    for block in T.serial(C // columns):
        at = block * columns
        for c in T.serial(columns):
            acc[c] = pre[row, 0] * f32(x[row, at + c])
        for h in T.serial(hc - 1):
            for c in T.serial(columns):
                acc[c] = acc[c] + pre[row, h + 1] * f32(x[row, (h + 1) * C + at + c])
        for c in T.serial(columns):
            y[row, at + c] = bf16(acc[c])


@T.macro
def divide_sums(c, sums, hc, add, rows):
    """Divide c[j,k] by its row's (or column's) sum plus ``add``; sums are serial, ascending."""
    for j in T.serial(hc):
        sums[j] = c[j, 0] if rows else c[0, j]
        for k in T.serial(hc - 1):
            sums[j] = sums[j] + (c[j, k + 1] if rows else c[k + 1, j])
    for j in T.serial(hc):
        for k in T.serial(hc):
            c[j, k] = c[j, k] / (sums[j if rows else k] + add)


@T.macro
def softmax_rows(c, sums, hc, add):
    """Softmax over k, maximum subtracted, plus ``add``."""
    for j in T.serial(hc):
        sums[hc] = c[j, 0]
        for k in T.serial(hc - 1):
            sums[hc] = T.if_then_else(c[j, k + 1] > sums[hc], c[j, k + 1], sums[hc])
        for k in T.serial(hc):
            c[j, k] = call("di_exp", c[j, k] - sums[hc])
        sums[j] = c[j, 0]
        for k in T.serial(hc - 1):
            sums[j] = sums[j] + c[j, k + 1]
        for k in T.serial(hc):
            c[j, k] = c[j, k] / sums[j] + add


def mix_macro(spec: Spec, rows: int):
    """``hyper_mix`` of ``count`` rows, at most ``rows``, from ``first`` on."""
    hc, iters = spec.attrs["hc"], spec.attrs["iters"]
    hc_eps, eps = spec.attrs["hc_eps"], spec.attrs["eps"]
    K, M = hc * spec.dims["C"], spec.dims["M"]

    @T.macro
    def mix(x, first, count, fn, base, scale, pre, post, comb):
        sums = T.alloc_local((max(LANES, hc + 1),), "float32")
        m = T.alloc_local((rows, M), "float32")
        c = T.alloc_local((hc, hc), "float32")
        call("di_linear_fp32", T.access_ptr(x[first, 0], "r"), K, T.access_ptr(fn[0, 0], "r"),
             K, M, count, T.access_ptr(m[0, 0], "w"), type="int32")
        for r in T.serial(count):
            row = first + r
            sum_squares(sums, x, row, K)
            sums[0] = call("di_rsqrt", sums[0] / const(K) + const(eps))
            for o in T.serial(M):
                m[r, o] = m[r, o] * sums[0]
            for j in T.serial(hc):
                pre[row, j] = call("di_sigmoid", m[r, j] * scale[0] + base[j]) + const(hc_eps)
                post[row, j] = const(2) * call(
                    "di_sigmoid", m[r, hc + j] * scale[1] + base[hc + j])
                for k in T.serial(hc):
                    o = 2 * hc + j * hc + k
                    c[j, k] = m[r, o] * scale[2] + base[o]
            softmax_rows(c, sums, hc, const(hc_eps))
            divide_sums(c, sums, hc, const(hc_eps), False)
            for _ in T.serial(iters - 1):
                divide_sums(c, sums, hc, const(hc_eps), True)
                divide_sums(c, sums, hc, const(hc_eps), False)
            for j in T.serial(hc):
                for k in T.serial(hc):
                    comb[row, j, k] = c[j, k]

    return mix


@T.macro
def enter_row(acc, lanes, x, pre, w, u, u8, row, hc, C, columns, eps, block):
    """``hyper_collapse`` of one row, normed into ``u`` and fake quantised into ``u8``."""
    collapse_row(acc, x, pre, u, row, hc, C, columns)
    norm_row(lanes, u, row, w, u, row, C, eps)
    fake_quantize_fp8_row(u, row, u8, row, C, block)
