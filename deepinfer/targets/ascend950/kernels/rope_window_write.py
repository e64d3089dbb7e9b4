"""rope_window_write on ascend950: a vector core takes a row; a warp turns and quantises a block.

Elementwise but for the block maximum, which has no order: the reference's bits.
"""

import tilelang.ascend.language as T

from deepinfer.errors import TargetError
from deepinfer.targets.ascend950.dialect import UNIT, VECTORS, WARP, dims, notify, wait
from deepinfer.targets.ascend950.kernels._macros import encode_block
from deepinfer.targets.base import Spec, grid, kernel


@kernel("rope_window_write", items="N", space=lambda spec: grid(threads=(256, 128)))
def rope_window_write(spec: Spec):
    N, D, L, B, R, S, W = dims(spec, "N", "D", "L", "B", "R", "S", "W")
    block, threads = spec.attrs["block"], spec.schedule["threads"]
    if block != WARP or D % block or B % 2:
        raise TargetError(f"keys of {D} in blocks of {block}, expected blocks of {WARP} that "
                          "divide the key", where="kernel rope_window_write on ascend950",
                          next="use cpu")
    fixed, warps, blocks = D - B, threads // WARP, D // block
    kept_sf = -(-blocks // UNIT) * UNIT  # scales of a row in UB: copies start at whole units
    kept_b = -(-B * 4 // UNIT) * UNIT // 4
    kept_d = -(-D * 2 // UNIT) * UNIT // 2

    @T.prim_func
    def body(x: T.Tensor((N, D), "bfloat16"), positions: T.Tensor((N,), "int32"),
             table: T.Tensor((L, B), "float32"), request: T.Tensor((N,), "int32"),
             spans: T.Tensor((R, 4), "int32"), ring: T.Tensor((S, W, D), "uint8"),
             ring_sf: T.Tensor((S, W, blocks), "uint8"), q: T.Tensor((N, D), "uint8"),
             sf: T.Tensor((N, blocks), "uint8")):
        with T.Kernel(VECTORS) as core:
            x_ub = T.alloc_shared((2, kept_d), "bfloat16")
            table_ub = T.alloc_shared((2, kept_b), "float32")
            q_ub = T.alloc_shared((2, D), "uint8")
            sf_ub = T.alloc_shared((2, kept_sf), "uint8")
            for s in T.unroll(2, explicit=True):
                notify("V", "MTE2", s)
                notify("MTE3", "V", s)
            for t in T.serial(T.ceildiv(N - core, VECTORS)):
                row = t * VECTORS + core
                s = t % 2
                slot = spans[request[row], 0]
                place = positions[row] % W
                wait("V", "MTE2", s)
                T.copy(x[row, 0:D], x_ub[s, 0:D])
                T.copy(table[positions[row], 0:B], table_ub[s, 0:B])
                notify("MTE2", "V", s)
                wait("MTE2", "V", s)
                wait("MTE3", "V", s)
                with T.SimtVF(threads=threads):
                    tx = T.get_thread_binding()
                    value = T.alloc_local((1,), "float32")
                    code = T.alloc_local((1,), "uint8")
                    exponent = T.alloc_local((1,), "uint8")
                    other = T.alloc_var("float32")
                    for i in T.serial(T.ceildiv(blocks, warps)):
                        if i * warps + tx // WARP < blocks:
                            b = i * warps + tx // WARP
                            c = b * block + tx % WARP
                            value[0] = T.cast(x_ub[s, c], "float32")
                            # channels turn in adjacent pairs
                            other = T.call_extern("float32", "asc_shfl_xor", value[0], 1)
                            if c >= fixed:
                                cos = table_ub[s, (c - fixed) // 2 * 2]
                                sin = table_ub[s, (c - fixed) // 2 * 2 + 1]
                                if c % 2 == fixed % 2:
                                    value[0] = value[0] * cos - other * sin
                                else:
                                    value[0] = other * sin + value[0] * cos
                            value[0] = T.cast(T.cast(value[0], "bfloat16"), "float32")
                            encode_block(value, code, exponent)
                            q_ub[s, c] = code[0]
                            if tx % WARP == 0:
                                sf_ub[s, b] = exponent[0]
                notify("V", "MTE2", s)
                notify("V", "MTE3", s)
                wait("V", "MTE3", s)
                T.copy(q_ub[s, 0:D], q[row, 0:D])
                T.copy(sf_ub[s, 0:blocks], sf[row, 0:blocks])
                if row >= spans[request[row], 2] - W:  # among the last W rows of its request
                    T.copy(q_ub[s, 0:D], ring[slot, place, 0:D])
                    T.copy(sf_ub[s, 0:blocks], ring_sf[slot, place, 0:blocks])
                notify("MTE3", "V", s)
            for s in T.unroll(2, explicit=True):
                wait("V", "MTE2", s)
                wait("MTE3", "V", s)

    return body
