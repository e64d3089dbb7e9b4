"""The first half of the routed experts, for the kernels that differ in how they store its rows."""

import tilelang.language as T

from deepinfer.targets.base import Spec, grid
from deepinfer.targets.cpu.dialect import bf16, call, const, dims, f32
from deepinfer.targets.cpu.kernels._packed import tile_counts

COLUMNS = 16  # of a tile
ITEMS = "E*B/tiles"


def space(spec: Spec, least: int = 1):
    """tiles: of an item, in one GEMM call, which widens the rows once for all of them; items of all
    experts come before the next tiles, so that every range of items spreads over the experts.
    rows: of a GEMM call. least: the fewest tiles an item may have, a power of two."""
    B = spec.dims["B"]
    return grid(tiles=tile_counts(B, least, 1), rows=(96,) if B < 8 else (96, 48))


def outputs(m: int, tile):
    """How many outputs a tile has: all of its columns, known beforehand, where none is padded, so
    that a loop over them vectorises."""
    return COLUMNS if m % COLUMNS == 0 else T.min(COLUMNS, m - tile * COLUMNS)


def gate_up(spec: Spec, store):
    """The kernel's body. ``store(a, acc, row, first, at, stride, tiles)`` writes row ``row`` of a
    from the tiles ``first``..: column c of the t-th one is ``acc[at + t * stride + c]``."""
    N, K, C, E, B = dims(spec, "N", "K", "C", "E", "B")
    m, tiles, rows = spec.attrs["m"], spec.schedule["tiles"], spec.schedule["rows"]
    limit, floor = const(spec.attrs["limit"]), const(-spec.attrs["limit"])

    @T.prim_func
    def body(x: T.Tensor((N, C), "uint16"), w1: T.Tensor((E, B, C // 2, COLUMNS), "uint8"),
             s1: T.Tensor((E, B, C // 32, COLUMNS), "uint8"),
             w3: T.Tensor((E, B, C // 2, COLUMNS), "uint8"),
             s3: T.Tensor((E, B, C // 32, COLUMNS), "uint8"), order: T.Tensor((N * K,), "int32"),
             offsets: T.Tensor((E + 1,), "int32"), weight: T.Tensor((N, K), "float32"),
             a: T.Tensor((N * K, m), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            e = T.alloc_var("int32")
            b = T.alloc_var("int32")
            e = T.truncmod(lo + item, E)
            b = T.truncdiv(lo + item, E) * tiles
            token = T.alloc_local((rows,), "int32")
            gate = T.alloc_local((tiles * rows * COLUMNS,), "float32")
            up = T.alloc_local((tiles * rows * COLUMNS,), "float32")
            first = T.alloc_var("int32")
            first = offsets[e]
            while first < offsets[e + 1]:
                count = T.min(rows, offsets[e + 1] - first)
                for i in T.serial(count):
                    token[i] = T.truncdiv(order[first + i], K)
                T.evaluate(call("di_gemm_e2m1_rows", T.access_ptr(x[0, 0], "r"), C,
                                T.access_ptr(token[0], "r"), T.access_ptr(w1[e, b, 0, 0], "r"),
                                T.access_ptr(s1[e, b, 0, 0], "r"), C, count,
                                tiles, T.access_ptr(gate[0], "w"), 0, type="int32"))
                T.evaluate(call("di_gemm_e2m1_rows", T.access_ptr(x[0, 0], "r"), C,
                                T.access_ptr(token[0], "r"), T.access_ptr(w3[e, b, 0, 0], "r"),
                                T.access_ptr(s3[e, b, 0, 0], "r"), C, count,
                                tiles, T.access_ptr(up[0], "w"), 0, type="int32"))
                for t, i in T.grid(tiles, count):
                    share = weight[token[i], order[first + i] - token[i] * K]
                    at = (t * count + i) * COLUMNS
                    for c in T.serial(COLUMNS):
                        g = f32(bf16(gate[at + c]))
                        v = f32(bf16(up[at + c]))
                        g_low = T.if_then_else(g > limit, limit, g)
                        v_low = T.if_then_else(v > limit, limit, v)
                        v_fit = T.if_then_else(v_low < floor, floor, v_low)
                        gate[at + c] = share * (call("di_silu", g_low) * v_fit)
                for i in T.serial(count):
                    store(a, gate, order[first + i], b, i * COLUMNS, count * COLUMNS, tiles)
                first = first + count

    return body
