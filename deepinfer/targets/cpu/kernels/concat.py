"""concat on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import STORAGE, dims


@kernel("concat", items="N")
def concat(spec: Spec):
    N, A, B = dims(spec, "N", "A", "B")
    storage = STORAGE[spec.dtypes["t"].name]

    @T.prim_func
    def body(a: T.Tensor((N, A), storage), b: T.Tensor((N, B), storage),
             y: T.Tensor((N, A + B), storage), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            for c in T.serial(A):
                y[row, c] = a[row, c]
            for c in T.serial(B):
                y[row, A + c] = b[row, c]

    return body
