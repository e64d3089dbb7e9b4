"""norm_fake_quant on cpu: an item is a row; the normed row stays in the cache."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import LANES, dims
from deepinfer.targets.cpu.kernels._macros import fake_quantize_fp8_row, norm_row


@kernel("norm_fake_quant", items="N")
def norm_fake_quant(spec: Spec):
    N, C = dims(spec, "N", "C")
    eps, block = spec.attrs["eps"], spec.attrs["block"]

    @T.prim_func
    def body(x: T.Tensor((N, C), "uint16"), w: T.Tensor((C,), "uint16"),
             y: T.Tensor((N, C), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            acc = T.alloc_local((LANES,), "float32")
            norm_row(acc, x, lo + item, w, y, lo + item, C, eps)
            fake_quantize_fp8_row(y, lo + item, y, lo + item, C, block)

    return body
