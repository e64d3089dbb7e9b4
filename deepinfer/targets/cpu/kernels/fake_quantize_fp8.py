"""fake_quantize_fp8 on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims
from deepinfer.targets.cpu.kernels._macros import fake_quantize_fp8_row


@kernel("fake_quantize_fp8", items="N")
def fake_quantize_fp8(spec: Spec):
    N, C = dims(spec, "N", "C")
    block = spec.attrs["block"]

    @T.prim_func
    def body(x: T.Tensor((N, C), "uint16"), y: T.Tensor((N, C), "uint16"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            fake_quantize_fp8_row(x, lo + item, y, lo + item, C, block)

    return body
