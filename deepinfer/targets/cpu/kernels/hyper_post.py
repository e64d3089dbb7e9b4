"""hyper_post on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, grid, kernel
from deepinfer.targets.cpu.dialect import dims
from deepinfer.targets.cpu.kernels._hyper import columns_of, post_row


@kernel("hyper_post", items="N", space=lambda spec: grid(columns=columns_of(spec.dims["C"])))
def hyper_post(spec: Spec):
    N, H, C = dims(spec, "N", "H", "C")
    columns = spec.schedule["columns"]

    @T.prim_func
    def body(y: T.Tensor((N, C), "uint16"), x: T.Tensor((N, H * C), "uint16"),
             post: T.Tensor((N, H), "float32"), comb: T.Tensor((N, H, H), "float32"),
             out: T.Tensor((N, H * C), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            acc = T.alloc_local((columns,), "float32")
            post_row(acc, y, x, post, comb, out, lo + item, H, C, columns)

    return body
