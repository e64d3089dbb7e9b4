"""rope_window_write on sm100: a block is a row; a warp turns and quantises 32 channels at a time.

Elementwise but for the block maximum, which has no order: the reference's bits.
"""

import tilelang.language as T

from deepinfer.errors import TargetError
from deepinfer.targets.base import Spec, grid, kernel
from deepinfer.targets.sm100.dialect import WARP, dims
from deepinfer.targets.sm100.kernels._macros import encode_block


@kernel("rope_window_write", items="N", space=lambda spec: grid(threads=(128, 64)))
def rope_window_write(spec: Spec):
    N, D, L, B, R, S, W = dims(spec, "N", "D", "L", "B", "R", "S", "W")
    block, threads = spec.attrs["block"], spec.schedule["threads"]
    if block != WARP or D % block or B % 2:
        raise TargetError(f"keys of {D} in blocks of {block}, expected blocks of {WARP} that "
                          "divide the key", where="kernel rope_window_write on sm100",
                          next="use cpu")
    fixed, warps = D - B, threads // WARP

    @T.prim_func
    def body(x: T.Tensor((N, D), "bfloat16"), positions: T.Tensor((N,), "int32"),
             table: T.Tensor((L, B), "float32"), request: T.Tensor((N,), "int32"),
             spans: T.Tensor((R, 4), "int32"), ring: T.Tensor((S, W, D), "float8_e4m3fn"),
             ring_sf: T.Tensor((S, W, D // block), "uint8"),
             q: T.Tensor((N, D), "float8_e4m3fn"), sf: T.Tensor((N, D // block), "uint8")):
        with T.Kernel(N, threads=threads) as row:
            value = T.alloc_local((1,), "float32")
            code = T.alloc_local((1,), "float8_e4m3fn")
            exponent = T.alloc_local((1,), "uint8")
            tx = T.get_thread_binding()
            position = positions[row]
            slot = spans[request[row], 0]
            kept = row >= spans[request[row], 2] - W  # among the last W rows of its request
            for i in T.serial(T.ceildiv(D // block, warps)):
                if i * warps + tx // WARP < D // block:
                    b = i * warps + tx // WARP
                    c = b * block + tx % WARP
                    value[0] = T.cast(x[row, c], "float32")
                    other = T.shfl_xor(value[0], 1)  # channels turn in adjacent pairs
                    if c >= fixed:
                        cos = table[position, (c - fixed) // 2 * 2]
                        sin = table[position, (c - fixed) // 2 * 2 + 1]
                        if c % 2 == fixed % 2:
                            value[0] = value[0] * cos - other * sin
                        else:
                            value[0] = other * sin + value[0] * cos
                    value[0] = T.cast(T.cast(value[0], "bfloat16"), "float32")
                    encode_block(value, code, exponent)
                    q[row, c] = code[0]
                    if kept:
                        ring[slot, position % W, c] = code[0]
                    if tx % WARP == 0:
                        sf[row, b] = exponent[0]
                        if kept:
                            ring_sf[slot, position % W, b] = exponent[0]

    return body
