"""hyper_expand on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("hyper_expand", items="N")
def hyper_expand(spec: Spec):
    N, C = dims(spec, "N", "C")
    copies = spec.attrs["copies"]

    @T.prim_func
    def body(x: T.Tensor((N, C), "uint16"), y: T.Tensor((N, copies, C), "uint16"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            for h in T.serial(copies):
                for c in T.serial(C):
                    y[lo + item, h, c] = x[lo + item, c]

    return body
