"""draft_logits on cpu: an item is a request."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("draft_logits", items="R")
def draft_logits(spec: Spec):
    R, V = dims(spec, "R", "V")
    step, block = spec.attrs["step"], spec.attrs["block"]

    @T.prim_func
    def body(u: T.Tensor((R * block, V), "float32"), bias: T.Tensor((R, V), "float32"),
             y: T.Tensor((R, V), "float32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            r = lo + item
            for v in T.serial(V):
                y[r, v] = u[r * block + step, v] + bias[r, v]

    return body
