"""hyper_collapse on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, grid, kernel
from deepinfer.targets.cpu.dialect import dims
from deepinfer.targets.cpu.kernels._hyper import collapse_row, columns_of


@kernel("hyper_collapse", items="N", space=lambda spec: grid(columns=columns_of(spec.dims["C"])))
def hyper_collapse(spec: Spec):
    N, H, C = dims(spec, "N", "H", "C")
    columns = spec.schedule["columns"]

    @T.prim_func
    def body(x: T.Tensor((N, H * C), "uint16"), pre: T.Tensor((N, H), "float32"),
             y: T.Tensor((N, C), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            acc = T.alloc_local((columns,), "float32")
            collapse_row(acc, x, pre, y, lo + item, H, C, columns)

    return body
