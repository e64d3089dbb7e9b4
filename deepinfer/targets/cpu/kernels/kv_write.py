"""kv_write on cpu: an item is a compressed entry, written if it has a position."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims


@kernel("kv_write", items="G")
def kv_write(spec: Spec):
    G, D, F, R, P, E = dims(spec, "G", "D", "F", "R", "P", "E")
    pages_total = dims(spec, "T")
    ratio = spec.attrs["ratio"]

    @T.prim_func
    def body(q: T.Tensor((G, D // 2), "uint8"), sf: T.Tensor((G, F), "uint8"),
             positions: T.Tensor((G,), "int32"), request: T.Tensor((G,), "int32"),
             pages: T.Tensor((R, P), "int32"), cache: T.Tensor((pages_total, E, D // 2), "uint8"),
             cache_sf: T.Tensor((pages_total, E, F), "uint8"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            if positions[row] >= 0:
                entry = positions[row] // ratio
                page = pages[request[row], entry // E]
                for c in T.serial(D // 2):
                    cache[page, entry % E, c] = q[row, c]
                for c in T.serial(F):
                    cache_sf[page, entry % E, c] = sf[row, c]

    return body
