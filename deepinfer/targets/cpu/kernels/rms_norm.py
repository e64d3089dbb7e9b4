"""rms_norm on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import LANES, dims
from deepinfer.targets.cpu.kernels._macros import norm_row


@kernel("rms_norm", items="N")
def rms_norm(spec: Spec):
    N, C = dims(spec, "N", "C")
    eps = spec.attrs["eps"]

    @T.prim_func
    def body(x: T.Tensor((N, C), "uint16"), w: T.Tensor((C,), "uint16"),
             y: T.Tensor((N, C), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            acc = T.alloc_local((LANES,), "float32")
            norm_row(acc, x, lo + item, w, y, lo + item, C, eps)

    return body
