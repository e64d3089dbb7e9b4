"""take_step on cpu: an item is a request."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("take_step", items="Z/block")
def take_step(spec: Spec):
    Z, C = dims(spec, "Z", "C")
    step, block = spec.attrs["step"], spec.attrs["block"]

    @T.prim_func
    def body(x: T.Tensor((Z, C), "uint16"), y: T.Tensor((Z // block, C), "uint16"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            for c in T.serial(C):
                y[lo + item, c] = x[(lo + item) * block + step, c]

    return body
