"""silu_mul on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import dims
from deepinfer.targets.cpu.kernels._macros import silu_mul_row


@kernel("silu_mul", items="N")
def silu_mul(spec: Spec):
    N, I = dims(spec, "N", "I")  # noqa: E741 -- the signature's name
    limit = spec.attrs["limit"]

    @T.prim_func
    def body(gate: T.Tensor((N, I), "uint16"), up: T.Tensor((N, I), "uint16"),
             y: T.Tensor((N, I), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            silu_mul_row(gate, up, y, lo + item, I, limit)

    return body
