"""fake_quantize_fp4 on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims
from deepinfer.targets.cpu.kernels._macros import fake_quantize_row


@kernel("fake_quantize_fp4", items="N")
def fake_quantize_fp4(spec: Spec):
    N, C = dims(spec, "N", "C")
    block = spec.attrs["block"]

    @T.prim_func
    def body(x: T.Tensor((N, C), "uint16"), y: T.Tensor((N, C), "uint16"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            amax = T.alloc_local((1,), "float32")
            code = T.alloc_local((1,), "uint8")
            codes = T.alloc_local((block,), "uint8")
            fake_quantize_row(amax, code, codes, x, lo + item, y, lo + item, C, block,
                              "di_fp4_scale_ue8m0", "di_quantize_fp4_ue8m0", "di_e2m1_to_f32")

    return body
