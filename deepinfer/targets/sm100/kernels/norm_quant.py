"""norm_quant on sm100: a block is a row; 16 lanes sum the squares, then a warp quantises a block.

The sum has the op's declared order, so the result has the reference's bits.
"""

import tilelang.language as T

from deepinfer.errors import TargetError
from deepinfer.targets.base import Spec, grid, kernel
from deepinfer.targets.sm100.dialect import WARP, dims
from deepinfer.targets.sm100.kernels._macros import encode_block

LANES = 16  # of the declared row sum


@kernel("norm_quant", items="N", space=lambda spec: grid(threads=(256, 128)))
def norm_quant(spec: Spec):
    N, C = dims(spec, "N", "C")
    eps, block, threads = spec.attrs["eps"], spec.attrs["block"], spec.schedule["threads"]
    if block != WARP or C % block:
        raise TargetError(f"rows of {C} in blocks of {block}, expected blocks of {WARP} that "
                          "divide the row", where="kernel norm_quant on sm100", next="use cpu")

    @T.prim_func
    def body(x: T.Tensor((N, C), "bfloat16"), w: T.Tensor((C,), "bfloat16"),
             q: T.Tensor((N, C), "float8_e4m3fn"), sf: T.Tensor((N, C // block), "uint8")):
        with T.Kernel(N, threads=threads) as row:
            values = T.alloc_shared((C,), "float32")
            scale = T.alloc_shared((1,), "float32")
            total = T.alloc_var("float32")
            normed = T.alloc_local((1,), "float32")
            code = T.alloc_local((1,), "float8_e4m3fn")
            exponent = T.alloc_local((1,), "uint8")
            tx = T.get_thread_binding()
            for i in T.serial(T.ceildiv(C, threads)):
                if i * threads + tx < C:
                    values[i * threads + tx] = T.cast(x[row, i * threads + tx], "float32")
            T.sync_threads()
            if tx < WARP:
                total = 0.0
                if tx < LANES:
                    for i in T.serial(C // LANES):
                        total = total + values[i * LANES + tx] * values[i * LANES + tx]
                for step in T.unroll(4):  # both sides add the same two numbers
                    total = total + T.shfl_xor(total, 8 >> step)
                if tx == 0:
                    scale[0] = T.float32(1) / T.sqrt(total / T.float32(C) + T.float32(eps))
            T.sync_threads()
            for i in T.serial(T.ceildiv(C // block, threads // WARP)):
                if i * (threads // WARP) + tx // WARP < C // block:
                    b = i * (threads // WARP) + tx // WARP
                    c = b * block + tx % WARP
                    normed[0] = T.cast(T.cast(w[c], "float32") * (values[c] * scale[0]), "bfloat16")
                    encode_block(normed, code, exponent)
                    q[row, c] = code[0]
                    if tx % WARP == 0:
                        sf[row, b] = exponent[0]

    return body
