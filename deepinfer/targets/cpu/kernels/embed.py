"""embed on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("embed", items="N")
def embed(spec: Spec):
    N, V, C = dims(spec, "N", "V", "C")

    @T.prim_func
    def body(tokens: T.Tensor((N,), "int32"), w: T.Tensor((V, C), "uint16"),
             y: T.Tensor((N, C), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            for c in T.serial(C):
                y[row, c] = w[tokens[row], c]

    return body
