"""quantize_fp4 on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims
from deepinfer.targets.cpu.kernels._macros import quantize_fp4_row


@kernel("quantize_fp4", items="N")
def quantize_fp4(spec: Spec):
    N, C = dims(spec, "N", "C")
    block = spec.attrs["block"]

    @T.prim_func
    def body(x: T.Tensor((N, C), "uint16"), q: T.Tensor((N, C // 2), "uint8"),
             sf: T.Tensor((N, C // block), "uint8"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            amax = T.alloc_local((1,), "float32")
            code = T.alloc_local((1,), "uint8")
            quantize_fp4_row(amax, code, x, lo + item, q, sf, C, block, "di_fp4_scale_ue8m0",
                             "di_quantize_fp4_ue8m0")

    return body
