"""hyper_start on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import const, dims


@kernel("hyper_start", items="N")
def hyper_start(spec: Spec):
    N = dims(spec, "N")
    copies = spec.attrs["copies"]

    @T.prim_func
    def body(tokens: T.Tensor((N,), "int32"), pre: T.Tensor((N, copies), "float32"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            for h in T.serial(copies):
                pre[lo + item, h] = T.if_then_else(h == 0, const(1), const(0))

    return body
