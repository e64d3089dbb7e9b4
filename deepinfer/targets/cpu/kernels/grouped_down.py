"""grouped_down on cpu: an item is 16 columns of one expert, for all of its rows."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16, call, dims
from deepinfer.targets.cpu.kernels.grouped_gate_up import space

COLUMNS = 16  # of a tile


@kernel("grouped_down", items="E*B", space=space)
def grouped_down(spec: Spec):
    Z, I, E, B = dims(spec, "Z", "I", "E", "B")
    m, tiles, rows = spec.attrs["m"], spec.schedule["tiles"], spec.schedule["rows"]

    @T.prim_func
    def body(x: T.Tensor((Z, I), "uint16"), w2: T.Tensor((E, B, I // 2, COLUMNS), "uint8"),
             s2: T.Tensor((E, B, I // 32, COLUMNS), "uint8"), order: T.Tensor((Z,), "int32"),
             offsets: T.Tensor((E + 1,), "int32"), y: T.Tensor((Z, m), "uint16"),
             lo: T.int32, hi: T.int32):
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
            acc = T.alloc_local((rows, COLUMNS), "float32")
            first = T.alloc_var("int32")
            first = offsets[e]
            while first < offsets[e + 1]:
                count = T.min(rows, offsets[e + 1] - first)
                T.evaluate(call("di_gemm_e2m1_rows", T.access_ptr(x[0, 0], "r"), I,
                                T.access_ptr(order[first], "r"), T.access_ptr(w2[e, b, 0, 0], "r"),
                                T.access_ptr(s2[e, b, 0, 0], "r"), I, count,
                                T.access_ptr(acc[0, 0], "w"), 0, type="int32"))
                for i in T.serial(count):
                    for c in T.serial(T.min(COLUMNS, m - b * COLUMNS)):
                        y[order[first + i], b * COLUMNS + c] = bf16(acc[i, c])
                first = first + count

    return body
