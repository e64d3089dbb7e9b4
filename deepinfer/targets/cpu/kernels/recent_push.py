"""recent_push on cpu: an item is a draft block."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("recent_push", items="R")
def recent_push(spec: Spec):
    R, B = dims(spec, "R", "B")

    @T.prim_func
    def body(recent: T.Tensor((R, B), "int32"), token: T.Tensor((R,), "int32"),
             grown: T.Tensor((R, B), "int32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            r = lo + item
            grown[r, 0] = token[r]
            for b in T.serial(B - 1):
                grown[r, b + 1] = recent[r, b]

    return body
