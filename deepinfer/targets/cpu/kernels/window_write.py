"""window_write on cpu: an item is a row, written if it is among its request's last W rows."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("window_write", items="N")
def window_write(spec: Spec):
    N, D, F, R, S, W = dims(spec, "N", "D", "F", "R", "S", "W")

    @T.prim_func
    def body(q: T.Tensor((N, D), "uint8"), sf: T.Tensor((N, F), "uint8"),
             positions: T.Tensor((N,), "int32"), request: T.Tensor((N,), "int32"),
             spans: T.Tensor((R, 4), "int32"), ring: T.Tensor((S, W, D), "uint8"),
             ring_sf: T.Tensor((S, W, F), "uint8"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            r = request[row]
            if row >= spans[r, 2] - W:
                slot = spans[r, 0]
                place = positions[row] % W
                for c in T.serial(D):
                    ring[slot, place, c] = q[row, c]
                for c in T.serial(F):
                    ring_sf[slot, place, c] = sf[row, c]

    return body
