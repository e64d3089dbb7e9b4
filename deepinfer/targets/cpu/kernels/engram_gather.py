"""engram_gather on cpu: an item is one table row of one token."""

import tilelang.language as T

from deepinfer.targets.base import Spec, kernel
from deepinfer.targets.cpu.dialect import bf16, call, dims


@kernel("engram_gather", items="N*Q")
def engram_gather(spec: Spec):
    N, Q, R, D = dims(spec, "N", "Q", "T", "D")

    @T.prim_func
    def body(rows: T.Tensor((N, Q), "int64"), table: T.Tensor((R, D), "uint8"),
             sf: T.Tensor((R, D // 32), "uint8"), e: T.Tensor((N, Q * D), "uint16"),
             lo: T.int32, hi: T.int32):
        with T.Kernel(hi - lo) as item:
            n = (lo + item) // Q
            q = (lo + item) % Q
            for g in T.serial(D // 32):
                scale = call("di_ue8m0_to_f32", sf[rows[n, q], g])
                for i in T.serial(32):
                    c = g * 32 + i
                    e[n, q * D + c] = bf16(call("di_e4m3_to_f32", table[rows[n, q], c]) * scale)

    return body
