"""hyper_gather on cpu: an item is an output row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("hyper_gather", items="K")
def hyper_gather(spec: Spec):
    N, H, C, K = dims(spec, "N", "H", "C", "K")

    @T.prim_func
    def body(x: T.Tensor((N, H, C), "uint16"), rows: T.Tensor((K,), "int32"),
             y: T.Tensor((K, H, C), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            for h, c in T.grid(H, C):
                y[lo + item, h, c] = x[rows[lo + item], h, c]

    return body
