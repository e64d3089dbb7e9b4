"""grouped_gate_up on cpu: an item is 16 columns of one expert, for all of its rows."""

import tilelang.language as T

from deepinfer.targets.base import Spec, grid, kernel
from deepinfer.targets.cpu.dialect import bf16, call, const, dims, f32

COLUMNS = 16


# tiles: neighbouring items share an expert over so many tiles, so that its rows stay in the cache;
# few, because a thread's range of items must spread over the experts. rows: of one GEMM call.
@kernel("grouped_gate_up", items="E*B", space=lambda _: grid(tiles=(4, 1, 16), rows=(96, 32)))
def grouped_gate_up(spec: Spec):
    N, K, C, E, B = dims(spec, "N", "K", "C", "E", "B")
    m, limit = spec.attrs["m"], const(spec.attrs["limit"])
    floor = const(-spec.attrs["limit"])
    tiles, rows = spec.schedule["tiles"], spec.schedule["rows"]

    @T.prim_func
    def body(x: T.Tensor((N, C), "uint16"), w1: T.Tensor((E, B, C // 2, COLUMNS), "uint8"),
             s1: T.Tensor((E, B, C // 32, COLUMNS), "uint8"),
             w3: T.Tensor((E, B, C // 2, COLUMNS), "uint8"),
             s3: T.Tensor((E, B, C // 32, COLUMNS), "uint8"), order: T.Tensor((N * K,), "int32"),
             offsets: T.Tensor((E + 1,), "int32"), weight: T.Tensor((N, K), "float32"),
             a: T.Tensor((N * K, m), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            group = (lo + item) // (E * tiles)
            rest = (lo + item) % (E * tiles)
            width = T.min(tiles, B - group * tiles)
            e = rest // width
            b = group * tiles + rest % width
            token = T.alloc_local((rows,), "int32")
            gate = T.alloc_local((rows, COLUMNS), "float32")
            up = T.alloc_local((rows, COLUMNS), "float32")
            first = T.alloc_var("int32")
            first = offsets[e]
            while first < offsets[e + 1]:
                count = T.min(rows, offsets[e + 1] - first)
                for i in T.serial(count):
                    token[i] = order[first + i] // K
                T.evaluate(call("di_gemm_e2m1_rows", T.access_ptr(x[0, 0], "r"), C,
                                T.access_ptr(token[0], "r"), T.access_ptr(w1[e, b, 0, 0], "r"),
                                T.access_ptr(s1[e, b, 0, 0], "r"), C, count,
                                T.access_ptr(gate[0, 0], "w"), 0, type="int32"))
                T.evaluate(call("di_gemm_e2m1_rows", T.access_ptr(x[0, 0], "r"), C,
                                T.access_ptr(token[0], "r"), T.access_ptr(w3[e, b, 0, 0], "r"),
                                T.access_ptr(s3[e, b, 0, 0], "r"), C, count,
                                T.access_ptr(up[0, 0], "w"), 0, type="int32"))
                for i in T.serial(count):
                    for c in T.serial(T.min(COLUMNS, m - b * COLUMNS)):
                        g = f32(bf16(gate[i, c]))
                        v = f32(bf16(up[i, c]))
                        g_low = T.if_then_else(g > limit, limit, g)
                        v_low = T.if_then_else(v > limit, limit, v)
                        v_fit = T.if_then_else(v_low < floor, floor, v_low)
                        product = call("di_silu", g_low) * v_fit
                        row = order[first + i]
                        a[row, b * COLUMNS + c] = bf16(weight[row // K, row % K] * product)
                first = first + count

    return body
