"""norm_quant on cpu: an item is a row; the normed row stays in the cache."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import LANES, dims
from deepinfer.targets.cpu.kernels._macros import norm_row, quantize_fp8_row


@kernel("norm_quant", items="N")
def norm_quant(spec: Spec):
    N, C = dims(spec, "N", "C")
    eps, block = spec.attrs["eps"], spec.attrs["block"]

    @T.prim_func
    def body(x: T.Tensor((N, C), "uint16"), w: T.Tensor((C,), "uint16"),
             q: T.Tensor((N, C), "uint8"), sf: T.Tensor((N, C // block), "uint8"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            acc = T.alloc_local((LANES,), "float32")
            code = T.alloc_local((1,), "uint8")
            normed = T.alloc_local((1, C), "uint16")
            norm_row(acc, x, lo + item, w, normed, 0, C, eps)
            quantize_fp8_row(acc, code, normed, 0, q, sf, lo + item, C, block)

    return body
