"""hyper_mix on cpu: an item is a few rows, which share the loads of the mixing matrix."""

import tilelang.language as T

from deepinfer.targets.base import Spec, grid, kernel
from deepinfer.targets.cpu.dialect import LANES, call, const, dims
from deepinfer.targets.cpu.kernels._macros import sum_squares


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


@kernel("hyper_mix", items="N/rows", space=lambda _: grid(rows=(4, 1, 2)))
def hyper_mix(spec: Spec):
    rows = spec.schedule["rows"]
    N, C, M = dims(spec, "N", "C", "M")
    hc, iters = spec.attrs["hc"], spec.attrs["iters"]
    hc_eps, eps = spec.attrs["hc_eps"], spec.attrs["eps"]
    K = hc * C

    @T.prim_func
    def body(x: T.Tensor((N, K), "uint16"), fn: T.Tensor((M, K), "float32"),
             base: T.Tensor((M,), "float32"), scale: T.Tensor((3,), "float32"),
             pre: T.Tensor((N, hc), "float32"), post: T.Tensor((N, hc), "float32"),
             comb: T.Tensor((N, hc, hc), "float32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            first = (lo + item) * rows
            sums = T.alloc_local((max(LANES, hc + 1),), "float32")
            m = T.alloc_local((rows, M), "float32")
            c = T.alloc_local((hc, hc), "float32")
            call("di_linear_fp32", T.access_ptr(x[first, 0], "r"), K, T.access_ptr(fn[0, 0], "r"),
                 K, M, T.min(rows, N - first), T.access_ptr(m[0, 0], "w"), type="int32")
            for r in T.serial(T.min(rows, N - first)):
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

    return body
