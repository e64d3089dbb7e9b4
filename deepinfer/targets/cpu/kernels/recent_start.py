"""recent_start on cpu: an item is a draft block."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("recent_start", items="R")
def recent_start(spec: Spec):
    R, width = dims(spec, "R"), spec.attrs["width"]

    @T.prim_func
    def body(anchor: T.Tensor((R,), "int32"), recent: T.Tensor((R, width), "int32"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            for b in T.serial(width):
                recent[lo + item, b] = -1

    return body
