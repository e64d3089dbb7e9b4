"""topk on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import call, dims


@kernel("topk", items="N")
def topk(spec: Spec):
    N, L = dims(spec, "N", "L")
    k, ratio = spec.attrs["k"], spec.attrs["ratio"]

    @T.prim_func
    def body(scores: T.Tensor((N, L), "float32"), positions: T.Tensor((N,), "int32"),
             idx: T.Tensor((N, k), "int32"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            reach = T.min((positions[row] + 1) // ratio, L)
            call("di_topk", T.access_ptr(scores[row, 0], "r"), reach, k, -1,
                 T.access_ptr(idx[row, 0], "w"), type="int32")

    return body
