"""silu_mul on cpu: an item is a row."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16, call, const, dims, f32


@kernel("silu_mul", items="N")
def silu_mul(spec: Spec):
    N, I = dims(spec, "N", "I")  # noqa: E741 -- the signature's name
    limit = spec.attrs["limit"]

    def above(v):  # comparisons, so that a NaN stays one
        return T.if_then_else(v > const(limit), const(limit), v)

    def below(v):
        return T.if_then_else(v < const(-limit), const(-limit), v)

    @T.prim_func
    def body(gate: T.Tensor((N, I), "uint16"), up: T.Tensor((N, I), "uint16"),
             y: T.Tensor((N, I), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            row = lo + item
            for i in T.serial(I):
                y[row, i] = bf16(call("di_silu", above(f32(gate[row, i])))
                                 * below(above(f32(up[row, i]))))

    return body
