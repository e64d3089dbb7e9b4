"""pending_write on cpu: an item is a request, whose last rows are looked through."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("pending_write", items="R")
def pending_write(spec: Spec):
    N, D, R, S, Q = dims(spec, "N", "D", "R", "S", "Q")

    @T.prim_func
    def body(a: T.Tensor((N, D), "float32"), g: T.Tensor((N, D), "float32"),
             positions: T.Tensor((N,), "int32"), spans: T.Tensor((R, 4), "int32"),
             pending: T.Tensor((S, Q, 2, D), "float32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            r = lo + item
            slot = spans[r, 0]
            for row in T.serial(T.max(spans[r, 1], spans[r, 2] - 2 * Q), spans[r, 2]):
                if positions[row] % 2 == 0:
                    place = positions[row] // 2 % Q
                    for c in T.serial(D):
                        pending[slot, place, 0, c] = a[row, c]
                    for c in T.serial(D):
                        pending[slot, place, 1, c] = g[row, c]

    return body
