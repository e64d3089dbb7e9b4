"""hyper_post on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16, dims, f32
from deepinfer.targets.cpu.kernels.hyper_collapse import space


@kernel("hyper_post", items="N", space=space)
def hyper_post(spec: Spec):
    N, H, C = dims(spec, "N", "H", "C")
    columns = spec.schedule["columns"]

    @T.prim_func
    def body(y: T.Tensor((N, C), "uint16"), x: T.Tensor((N, H, C), "uint16"),
             post: T.Tensor((N, H), "float32"), comb: T.Tensor((N, H, H), "float32"),
             out: T.Tensor((N, H, C), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            acc = T.alloc_local((columns,), "float32")
            for block in T.serial(C // columns):
                at = block * columns
                for h in T.serial(H):
                    for c in T.serial(columns):
                        acc[c] = post[row, h] * f32(y[row, at + c])
                    for d in T.serial(H):
                        for c in T.serial(columns):
                            acc[c] = acc[c] + comb[row, d, h] * f32(x[row, d, at + c])
                    for c in T.serial(columns):
                        out[row, h, at + c] = bf16(acc[c])

    return body
