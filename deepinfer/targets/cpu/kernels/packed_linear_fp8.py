"""packed_linear_fp8 on cpu: an item is tiles of 16 outputs, over a range of the rows."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import STORAGE, dims
from deepinfer.targets.cpu.kernels._macros import TILE, store_tiles
from deepinfer.targets.cpu.kernels._packed import ITEMS, first_row, first_tile, row_count, space


@kernel("packed_linear_fp8", items=ITEMS, space=space)
def packed_linear_fp8(spec: Spec):
    N, K, B = dims(spec, "N", "K", "B")
    m, out, R = spec.attrs["m"], spec.attrs["out"], spec.schedule["rows"]
    groups, tiles = spec.attrs["groups"], spec.schedule["tiles"]
    per_group = m // groups  # outputs; a multiple of the tile where there are several groups
    # Tiles of one call read the same channels; the last one may be padding altogether.
    run = tiles if groups == 1 or per_group // TILE % tiles == 0 else 1

    @T.prim_func
    def body(x: T.Tensor((N, K * groups), "uint16"), w: T.Tensor((B, K // 2, 2 * TILE), "uint8"),
             sf: T.Tensor((B, K // 32), "uint8"), y: T.Tensor((N, m), STORAGE[out]),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            first = first_tile(lo + item, B, spec)
            acc = T.alloc_local((run * R * TILE,), "float32")
            for block in T.serial(T.truncdiv(row_count(lo + item, N, B, spec) + R - 1, R)):
                row = first_row(lo + item, N, B, spec) + block * R
                n = T.min(R, row_count(lo + item, N, B, spec) - block * R)
                for t in T.serial(tiles // run):
                    b = first + t * run
                    count = T.min(run, -(-m // TILE) - b)
                    if count > 0:
                        T.call_extern(
                            "int32", "di_gemm_e4m3",
                            T.access_ptr(x[row, b * TILE // per_group * K], "r"), K * groups,
                            T.access_ptr(w[b, 0, 0], "r"), T.access_ptr(sf[b, 0], "r"), K, n,
                            count, T.access_ptr(acc[0], "w"), 0)
                        store_tiles(y, acc, row, n, b, count, m, out)

    return body
