"""confidence on cpu: an item is a request."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import call, dims


@kernel("confidence", items="R")
def confidence(spec: Spec):
    R, B = dims(spec, "R", "B")
    step = spec.attrs["step"]

    @T.prim_func
    def body(z: T.Tensor((R, 1), "float32"), temperatures: T.Tensor((B,), "float32"),
             c: T.Tensor((R,), "float32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            c[lo + item] = call("di_sigmoid", z[lo + item, 0] / temperatures[step])

    return body
