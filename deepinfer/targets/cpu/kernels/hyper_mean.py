"""hyper_mean on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16, const, dims, f32


@kernel("hyper_mean", items="N")
def hyper_mean(spec: Spec):
    N, H, C = dims(spec, "N", "H", "C")

    @T.prim_func
    def body(x: T.Tensor((N, H, C), "uint16"), y: T.Tensor((N, C), "uint16"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            acc = T.alloc_local((C,), "float32")
            for c in T.serial(C):
                acc[c] = f32(x[row, 0, c])
            for h in T.serial(H - 1):
                for c in T.serial(C):
                    acc[c] = acc[c] + f32(x[row, h + 1, c])
            for c in T.serial(C):
                y[row, c] = bf16(acc[c] / const(H))

    return body
