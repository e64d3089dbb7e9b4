"""packed_linear_bf16 on cpu: an item is tiles of 16 outputs, over a range of the rows."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import STORAGE, dims
from deepinfer.targets.cpu.kernels._macros import TILE, store_tiles
from deepinfer.targets.cpu.kernels._packed import ITEMS, first_row, first_tile, row_count, space

PADDED_ROWS = 8  # copied at a time where K is no multiple of 32


@kernel("packed_linear_bf16", items=ITEMS,
        space=lambda spec: space(spec, (PADDED_ROWS,)) if spec.dims["K"] % 32 else space(spec))
def packed_linear_bf16(spec: Spec):
    N, K, B, P = dims(spec, "N", "K", "B", "P")
    m, out, R = spec.attrs["m"], spec.attrs["out"], spec.schedule["rows"]
    full, tiles = 2 * P, spec.schedule["tiles"]  # the micro-kernel wants whole blocks of K
    if spec.dims["K"] % 32:
        return _padded(spec)

    @T.prim_func
    def body(x: T.Tensor((N, K), "uint16"), w: T.Tensor((B, P, 2 * TILE), "uint16"),
             y: T.Tensor((N, m), STORAGE[out]), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            first = first_tile(lo + item, B, spec)
            acc = T.alloc_local((tiles * R * TILE,), "float32")
            for block in T.serial(T.truncdiv(row_count(lo + item, N, B, spec) + R - 1, R)):
                row = first_row(lo + item, N, B, spec) + block * R
                n = T.min(R, row_count(lo + item, N, B, spec) - block * R)
                T.call_extern("int32", "di_gemm_bf16", T.access_ptr(x[row, 0], "r"), K,
                              T.access_ptr(w[first, 0, 0], "r"), full, n, tiles,
                              T.access_ptr(acc[0], "w"), 0)
                store_tiles(y, acc, row, n, first, tiles, m, out)

    return body


def _padded(spec: Spec):
    """Rows are copied, zeros appended, because K is no multiple of 32."""
    N, K, B, P = dims(spec, "N", "K", "B", "P")
    m, out, R = spec.attrs["m"], spec.attrs["out"], spec.schedule["rows"]
    full, tiles = 2 * P, spec.schedule["tiles"]

    @T.prim_func
    def body(x: T.Tensor((N, K), "uint16"), w: T.Tensor((B, P, 2 * TILE), "uint16"),
             y: T.Tensor((N, m), STORAGE[out]), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            first = first_tile(lo + item, B, spec)
            acc = T.alloc_local((tiles * R * TILE,), "float32")
            rows = T.alloc_local((R * full,), "uint16")
            for block in T.serial(T.truncdiv(row_count(lo + item, N, B, spec) + R - 1, R)):
                row = first_row(lo + item, N, B, spec) + block * R
                n = T.min(R, row_count(lo + item, N, B, spec) - block * R)
                for i in T.serial(n):
                    for k in T.serial(K):
                        rows[i * full + k] = x[row + i, k]
                    for k in T.serial(full - K):
                        rows[i * full + K + k] = T.uint16(0)
                T.call_extern("int32", "di_gemm_bf16", T.access_ptr(rows[0], "r"), full,
                              T.access_ptr(w[first, 0, 0], "r"), full, n, tiles,
                              T.access_ptr(acc[0], "w"), 0)
                store_tiles(y, acc, row, n, first, tiles, m, out)

    return body
