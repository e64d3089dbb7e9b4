"""grouped_gate_up on cpu: an item is 16 columns of one expert, for all of its rows."""

import tilelang.language as T

from deepinfer.targets.base import Spec, grid, kernel
from deepinfer.targets.cpu.dialect import bf16, call, const, dims, f32

COLUMNS = 16  # of a tile


def space(spec: Spec):
    """tiles: neighbouring items share an expert over so many, so that its rows stay in the cache;
    few, because a thread's range of items must spread over the experts. rows: of a GEMM call."""
    few = spec.dims["B"] < 8
    return grid(tiles=(4, 1) if few else (4, 1, 2, 8, 16), rows=(96,) if few else (96, 48))


@kernel("grouped_gate_up", items="E*B", space=space)
def grouped_gate_up(spec: Spec):
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
            left = T.alloc_var("int32")  # the first of the tiles that this run of items shares
            rest = T.alloc_var("int32")
            width = T.alloc_var("int32")
            e = T.alloc_var("int32")
            b = T.alloc_var("int32")
            left = T.truncdiv(lo + item, E * tiles) * tiles
            rest = T.truncmod(lo + item, E * tiles)
            width = T.min(tiles, B - left)
            e = T.truncdiv(rest, width)
            b = left + T.truncmod(rest, width)
            token = T.alloc_local((rows,), "int32")
            gate = T.alloc_local((rows, COLUMNS), "float32")
            up = T.alloc_local((rows, COLUMNS), "float32")
            first = T.alloc_var("int32")
            first = offsets[e]
            while first < offsets[e + 1]:
                count = T.min(rows, offsets[e + 1] - first)
                for i in T.serial(count):
                    token[i] = T.truncdiv(order[first + i], K)
                T.evaluate(call("di_gemm_e2m1_rows", T.access_ptr(x[0, 0], "r"), C,
                                T.access_ptr(token[0], "r"), T.access_ptr(w1[e, b, 0, 0], "r"),
                                T.access_ptr(s1[e, b, 0, 0], "r"), C, count,
                                T.access_ptr(gate[0, 0], "w"), 0, type="int32"))
                T.evaluate(call("di_gemm_e2m1_rows", T.access_ptr(x[0, 0], "r"), C,
                                T.access_ptr(token[0], "r"), T.access_ptr(w3[e, b, 0, 0], "r"),
                                T.access_ptr(s3[e, b, 0, 0], "r"), C, count,
                                T.access_ptr(up[0, 0], "w"), 0, type="int32"))
                for i in T.serial(count):
                    row = order[first + i]
                    share = weight[token[i], row - token[i] * K]
                    for c in T.serial(COLUMNS):
                        g = f32(bf16(gate[i, c]))
                        v = f32(bf16(up[i, c]))
                        g_low = T.if_then_else(g > limit, limit, g)
                        v_low = T.if_then_else(v > limit, limit, v)
                        v_fit = T.if_then_else(v_low < floor, floor, v_low)
                        gate[i, c] = share * (call("di_silu", g_low) * v_fit)
                    for c in T.serial(T.min(COLUMNS, m - b * COLUMNS)):
                        a[row, b * COLUMNS + c] = bf16(gate[i, c])
                first = first + count

    return body
