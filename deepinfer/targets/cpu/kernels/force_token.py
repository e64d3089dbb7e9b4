"""force_token on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("force_token", items="Q")
def force_token(spec: Spec):
    Q = dims(spec, "Q")

    @T.prim_func
    def body(chosen: T.Tensor((Q,), "int32"), forced: T.Tensor((Q,), "int32"),
             token: T.Tensor((Q,), "int32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            q = lo + item
            token[q] = T.if_then_else(forced[q] >= 0, forced[q], chosen[q])

    return body
