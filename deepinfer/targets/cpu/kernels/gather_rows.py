"""gather_rows on cpu: an item is an output row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import STORAGE, dims


@kernel("gather_rows", items="Q")
def gather_rows(spec: Spec):
    N, C, Q = dims(spec, "N", "C", "Q")
    storage = STORAGE[spec.dtypes["t"].name]

    @T.prim_func
    def body(x: T.Tensor((N, C), storage), rows: T.Tensor((Q,), "int32"),
             y: T.Tensor((Q, C), storage), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            for c in T.serial(C):
                y[lo + item, c] = x[rows[lo + item], c]

    return body
