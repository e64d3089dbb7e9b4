"""norm_quant on ascend950: a vector core takes a row; 16 lanes sum the squares, warps quantise.

The sum has the op's declared order, so the result has the reference's bits wherever the device's
division and square root are IEEE's.
"""

import tilelang.ascend.language as T

from deepinfer.errors import TargetError
from deepinfer.targets.ascend950.dialect import UNIT, VECTORS, WARP, dims, notify, wait
from deepinfer.targets.ascend950.kernels._macros import encode_block
from deepinfer.targets.base import Spec, grid, kernel

LANES = 16  # of the declared row sum


@kernel("norm_quant", items="N", space=lambda spec: grid(threads=(512, 256)))
def norm_quant(spec: Spec):
    N, C = dims(spec, "N", "C")
    eps, block, threads = spec.attrs["eps"], spec.attrs["block"], spec.schedule["threads"]
    if block != WARP or C % block:
        raise TargetError(f"rows of {C} in blocks of {block}, expected blocks of {WARP} that "
                          "divide the row", where="kernel norm_quant on ascend950",
                          next="use cpu")
    blocks, warps = C // block, threads // WARP
    kept = T.ceildiv(blocks, UNIT) * UNIT  # scales of a row in UB: copies start at whole units

    @T.prim_func
    def body(x: T.Tensor((N, C), "bfloat16"), w: T.Tensor((C,), "bfloat16"),
             q: T.Tensor((N, C), "uint8"), sf: T.Tensor((N, blocks), "uint8")):
        with T.Kernel(VECTORS) as core:
            x_ub = T.alloc_shared((2, C), "bfloat16")
            w_ub = T.alloc_shared((C,), "bfloat16")
            q_ub = T.alloc_shared((2, C), "uint8")
            sf_ub = T.alloc_shared((2, kept), "uint8")
            scale_ub = T.alloc_shared((1,), "float32")
            T.copy(w, w_ub)
            for half in T.unroll(2, explicit=True):
                notify("V", "MTE2", half)
                notify("MTE3", "V", half)
            for t in T.serial(T.ceildiv(N - core, VECTORS)):
                wait("V", "MTE2", t % 2)
                T.copy(x[t * VECTORS + core, 0:C], x_ub[t % 2, 0:C])
                notify("MTE2", "V", t % 2)
                wait("MTE2", "V", t % 2)
                wait("MTE3", "V", t % 2)
                with T.SimtVF(threads=threads):
                    tx = T.get_thread_binding()
                    total = T.alloc_var("float32")
                    v = T.alloc_var("float32")
                    normed = T.alloc_local((1,), "float32")
                    code = T.alloc_local((1,), "uint8")
                    exponent = T.alloc_local((1,), "uint8")
                    if tx < WARP:
                        total = 0.0
                        if tx < LANES:
                            for i in T.serial(C // LANES):
                                v = T.cast(x_ub[t % 2, i * LANES + tx], "float32")
                                total = total + v * v
                        for step in T.unroll(4):  # both sides add the same two numbers
                            total = total + T.call_extern("float32", "asc_shfl_xor", total,
                                                          8 >> step)
                        if tx == 0:
                            scale_ub[0] = T.float32(1) / T.sqrt(total / T.float32(C)
                                                                + T.float32(eps))
                    T.sync_threads()
                    for i in T.serial(T.ceildiv(blocks, warps)):
                        if i * warps + tx // WARP < blocks:
                            b = i * warps + tx // WARP
                            c = b * block + tx % WARP
                            v = T.cast(x_ub[t % 2, c], "float32") * scale_ub[0]
                            normed[0] = T.cast(T.cast(T.cast(w_ub[c], "float32") * v, "bfloat16"),
                                               "float32")
                            encode_block(normed, code, exponent)
                            q_ub[t % 2, c] = code[0]
                            if tx % WARP == 0:
                                sf_ub[t % 2, b] = exponent[0]
                notify("V", "MTE2", t % 2)
                notify("V", "MTE3", t % 2)
                wait("V", "MTE3", t % 2)
                T.copy(q_ub[t % 2, 0:C], q[t * VECTORS + core, 0:C])
                T.copy(sf_ub[t % 2, 0:blocks], sf[t * VECTORS + core, 0:blocks])
                notify("MTE3", "V", t % 2)
            for half in T.unroll(2, explicit=True):
                wait("V", "MTE2", half)
                wait("MTE3", "V", half)

    return body
