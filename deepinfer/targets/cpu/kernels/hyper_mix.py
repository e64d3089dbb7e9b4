"""hyper_mix on cpu: an item is a few rows, which share the loads of the mixing matrix."""

import tilelang.language as T

from deepinfer.targets.base import Spec, grid, kernel
from deepinfer.targets.cpu.dialect import dims
from deepinfer.targets.cpu.kernels._hyper import mix_macro


@kernel("hyper_mix", items="N/rows", space=lambda _: grid(rows=(4, 1, 2)))
def hyper_mix(spec: Spec):
    rows, hc = spec.schedule["rows"], spec.attrs["hc"]
    N, C, M = dims(spec, "N", "C", "M")
    mix = mix_macro(spec, rows)

    @T.prim_func
    def body(x: T.Tensor((N, hc * C), "uint16"), fn: T.Tensor((M, hc * C), "float32"),
             base: T.Tensor((M,), "float32"), scale: T.Tensor((3,), "float32"),
             pre: T.Tensor((N, hc), "float32"), post: T.Tensor((N, hc), "float32"),
             comb: T.Tensor((N, hc, hc), "float32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            first = (lo + item) * rows
            mix(x, first, T.min(rows, N - first), fn, base, scale, pre, post, comb)

    return body
