"""hyper_collapse on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, grid, kernel
from deepinfer.targets.cpu.dialect import bf16, dims, f32


def space(spec: Spec):
    """columns: whose sums are finished before the next ones begin; they stay in the cache."""
    C = spec.dims["C"]
    return grid(columns=(C, *(c for c in (256, 64) if C % c == 0 and c < C)))


@kernel("hyper_collapse", items="N", space=space)
def hyper_collapse(spec: Spec):
    N, H, C = dims(spec, "N", "H", "C")
    columns = spec.schedule["columns"]

    @T.prim_func
    def body(x: T.Tensor((N, H, C), "uint16"), pre: T.Tensor((N, H), "float32"),
             y: T.Tensor((N, C), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            acc = T.alloc_local((columns,), "float32")
            for block in T.serial(C // columns):
                at = block * columns
                for c in T.serial(columns):
                    acc[c] = pre[row, 0] * f32(x[row, 0, at + c])
                for h in T.serial(H - 1):
                    for c in T.serial(columns):
                        acc[c] = acc[c] + pre[row, h + 1] * f32(x[row, h + 1, at + c])
                for c in T.serial(columns):
                    y[row, at + c] = bf16(acc[c])

    return body
