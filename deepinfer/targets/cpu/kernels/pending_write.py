"""pending_write on cpu: an item is a request."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("pending_write", items="R")
def pending_write(spec: Spec):
    N, D, R, S = dims(spec, "N", "D", "R", "S")

    @T.prim_func
    def body(a: T.Tensor((N, D), "float32"), g: T.Tensor((N, D), "float32"),
             positions: T.Tensor((N,), "int32"), spans: T.Tensor((R, 3), "int32"),
             pending: T.Tensor((S, 2, D), "float32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            r = lo + item
            last = spans[r, 2] - 1
            if last >= spans[r, 1]:
                if positions[last] % 2 == 0:
                    slot = spans[r, 0]
                    for c in T.serial(D):
                        pending[slot, 0, c] = a[last, c]
                    for c in T.serial(D):
                        pending[slot, 1, c] = g[last, c]

    return body
