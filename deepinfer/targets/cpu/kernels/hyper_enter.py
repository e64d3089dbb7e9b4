"""hyper_enter on cpu: an item is a few rows, which share the loads of the mixing matrix."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import LANES, dims
from deepinfer.targets.cpu.kernels._hyper import enter_row, mix_macro, mix_space


@kernel("hyper_enter", items="N/rows", space=mix_space)
def hyper_enter(spec: Spec):
    rows, columns = spec.schedule["rows"], spec.schedule["columns"]
    hc, eps, block = spec.attrs["hc"], spec.attrs["norm_eps"], spec.attrs["block"]
    N, C, M = dims(spec, "N", "C", "M")
    mix = mix_macro(spec, rows)

    @T.prim_func
    def body(x: T.Tensor((N, hc * C), "uint16"), pre: T.Tensor((N, hc), "float32"),
             fn: T.Tensor((M, hc * C), "float32"), base: T.Tensor((M,), "float32"),
             scale: T.Tensor((3,), "float32"), w: T.Tensor((C,), "uint16"),
             next_pre: T.Tensor((N, hc), "float32"), post: T.Tensor((N, hc), "float32"),
             comb: T.Tensor((N, hc, hc), "float32"), u: T.Tensor((N, C), "uint16"),
             u8: T.Tensor((N, C), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            first = (lo + item) * rows
            count = T.min(rows, N - first)
            acc = T.alloc_local((columns,), "float32")
            lanes = T.alloc_local((LANES,), "float32")
            mix(x, first, count, fn, base, scale, next_pre, post, comb)
            for r in T.serial(count):
                enter_row(acc, lanes, x, pre, w, u, u8, first + r, hc, C, columns,
                          eps, block)

    return body
