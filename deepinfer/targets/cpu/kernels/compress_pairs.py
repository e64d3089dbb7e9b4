"""compress_pairs on cpu: an item is a group that closes in this step."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16, call, dims


@kernel("compress_pairs", items="G")
def compress_pairs(spec: Spec):
    N, D, G, R, S, Q = dims(spec, "N", "D", "G", "R", "S", "Q")

    @T.macro
    def average(c, group, channel, a0, g0, a1, g1):
        high = T.if_then_else(g0 > g1, g0, g1)
        e0 = call("di_exp", g0 - high)
        e1 = call("di_exp", g1 - high)
        c[group, channel] = bf16((e0 / (e0 + e1)) * a0 + (e1 / (e0 + e1)) * a1)

    @T.prim_func
    def body(a: T.Tensor((N, D), "float32"), g: T.Tensor((N, D), "float32"),
             group_rows: T.Tensor((G,), "int32"), group_positions: T.Tensor((G,), "int32"),
             group_request: T.Tensor((G,), "int32"), spans: T.Tensor((R, 4), "int32"),
             pending: T.Tensor((S, Q, 2, D), "float32"),
             c: T.Tensor((G, D), "uint16"), lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            group = lo + item
            row = group_rows[group]
            slot = spans[group_request[group], 0]
            if row > spans[group_request[group], 1]:
                for i in T.serial(D):
                    average(c, group, i, a[row - 1, i], g[row - 1, i], a[row, i], g[row, i])
            else:
                place = group_positions[group] // 2 % Q
                for i in T.serial(D):
                    average(c, group, i, pending[slot, place, 0, i], pending[slot, place, 1, i],
                            a[row, i], g[row, i])

    return body
