"""rope on cpu: an item is one head of a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16, dims, f32


@kernel("rope", items="N*heads")
def rope(spec: Spec):
    N, C, L, D = dims(spec, "N", "C", "L", "D")
    heads, inverse = spec.attrs["heads"], spec.attrs["inverse"]
    width = C // heads
    fixed = width - D

    @T.prim_func
    def body(x: T.Tensor((N, C), "uint16"), positions: T.Tensor((N,), "int32"),
             table: T.Tensor((L, D), "float32"), y: T.Tensor((N, C), "uint16"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = (lo + item) // heads
            start = (lo + item) % heads * width
            for c in T.serial(fixed):
                y[row, start + c] = x[row, start + c]
            for j in T.serial(D // 2):
                cos = table[positions[row], 2 * j]
                sin = table[positions[row], 2 * j + 1]
                a = f32(x[row, start + fixed + 2 * j])
                b = f32(x[row, start + fixed + 2 * j + 1])
                if inverse:  # a - b * -sin is a + b * sin, bit for bit
                    y[row, start + fixed + 2 * j] = bf16(a * cos + b * sin)
                    y[row, start + fixed + 2 * j + 1] = bf16(b * cos - a * sin)
                else:
                    y[row, start + fixed + 2 * j] = bf16(a * cos - b * sin)
                    y[row, start + fixed + 2 * j + 1] = bf16(a * sin + b * cos)

    return body
