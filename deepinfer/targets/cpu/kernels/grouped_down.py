"""grouped_down on cpu: an item is tiles of 16 columns of one expert, for all of its rows."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16, call, dims
from deepinfer.targets.cpu.kernels._experts import COLUMNS, ITEMS, outputs, space


@kernel("grouped_down", items=ITEMS, space=space)
def grouped_down(spec: Spec):
    Z, I, E, B = dims(spec, "Z", "I", "E", "B")
    m, tiles, rows = spec.attrs["m"], spec.schedule["tiles"], spec.schedule["rows"]

    @T.prim_func
    def body(x: T.Tensor((Z, I), "uint16"), w2: T.Tensor((E, B, I // 2, COLUMNS), "uint8"),
             s2: T.Tensor((E, B, I // 32, COLUMNS), "uint8"), order: T.Tensor((Z,), "int32"),
             offsets: T.Tensor((E + 1,), "int32"), y: T.Tensor((Z, m), "uint16"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            e = T.alloc_var("int32")
            b = T.alloc_var("int32")
            e = T.truncmod(lo + item, E)
            b = T.truncdiv(lo + item, E) * tiles
            acc = T.alloc_local((tiles * rows * COLUMNS,), "float32")
            first = T.alloc_var("int32")
            first = offsets[e]
            while first < offsets[e + 1]:
                count = T.min(rows, offsets[e + 1] - first)
                T.evaluate(call("di_gemm_e2m1_rows", T.access_ptr(x[0, 0], "r"), I,
                                T.access_ptr(order[first], "r"), T.access_ptr(w2[e, b, 0, 0], "r"),
                                T.access_ptr(s2[e, b, 0, 0], "r"), I, count,
                                tiles, T.access_ptr(acc[0], "w"), 0, type="int32"))
                for t, i in T.grid(tiles, count):
                    row = order[first + i]
                    for c in T.serial(outputs(m, b + t)):
                        y[row, (b + t) * COLUMNS + c] = bf16(acc[(t * count + i) * COLUMNS + c])
                first = first + count

    return body
