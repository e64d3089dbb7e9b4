"""packed_linear_fp4 on cpu: an item is tiles of 16 outputs, over a range of the rows."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import STORAGE, dims
from deepinfer.targets.cpu.kernels._macros import TILE, store_tiles
from deepinfer.targets.cpu.kernels._packed import ITEMS, first_row, first_tile, row_count, space


@kernel("packed_linear_fp4", items=ITEMS, space=space)
def packed_linear_fp4(spec: Spec):
    N, K, B = dims(spec, "N", "K", "B")
    m, out, R = spec.attrs["m"], spec.attrs["out"], spec.schedule["rows"]
    tiles = spec.schedule["tiles"]

    @T.prim_func
    def body(x: T.Tensor((N, K), "uint16"), w: T.Tensor((B, K // 2, TILE), "uint8"),
             sf: T.Tensor((B, K // 32, TILE), "uint8"), y: T.Tensor((N, m), STORAGE[out]),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            first = first_tile(lo + item, B, spec)
            acc = T.alloc_local((tiles * R * TILE,), "float32")
            for block in T.serial(T.truncdiv(row_count(lo + item, N, B, spec) + R - 1, R)):
                row = first_row(lo + item, N, B, spec) + block * R
                n = T.min(R, row_count(lo + item, N, B, spec) - block * R)
                T.call_extern("int32", "di_gemm_e2m1", T.access_ptr(x[row, 0], "r"), K,
                              T.access_ptr(w[first, 0, 0], "r"), T.access_ptr(sf[first, 0, 0], "r"),
                              K, n, tiles, T.access_ptr(acc[0], "w"), 0)
                store_tiles(y, acc, row, n, first, tiles, m, out)

    return body
