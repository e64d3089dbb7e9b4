"""The block-scaled GEMM of linear_fp8 and linear_fp4 on tcgen05 (kind mxf8f6f4, scales per 32).

A block computes 128 outputs of ``tokens`` rows: the weight is operand A (its rows are the lanes of
tensor memory), the activation is B, so few rows cost few columns and a store of one row's outputs
is contiguous. Four warps: the first issues TMA loads, the second the MMAs, the last two stage
scales; then all four store. A row's sum over K does not depend on the tile of rows: K advances by
32 in order, whatever the schedule.
"""

import tilelang.language as T

from deepinfer.errors import TargetError
from deepinfer.targets.base import Spec, grid
from deepinfer.targets.sm100.dialect import WARP, dims

BLOCK_M, BLOCK_K, SCALED = 128, 128, 32  # outputs, K of a stage, elements a scale
STAGERS = 64  # threads that stage scales
THREADS = 128
UNIT = 127  # the ue8m0 code of 1: scales of K beyond the end, where the operands are zeros
WORDS = 128  # scales of 128 rows: one word (4 scales) a row


def space(spec: Spec):
    return grid(tokens=(64, 32, 128), stages=(4, 2))


def scaled_gemm(spec: Spec, weight: str):
    """The program for a ``weight`` in "e4m3" (one scale a 32x32 tile) or "e2m1" (one per 32)."""
    N, M, K = dims(spec, "N", "M", "K")
    tokens, stages = spec.schedule["tokens"], spec.schedule["stages"]
    e2m1 = weight == "e2m1"
    if K % SCALED or (e2m1 and K % BLOCK_K):
        need = BLOCK_K if e2m1 else SCALED  # TMA unpacks e2m1 in rows of 128 codes only
        raise TargetError(f"K = {K}, expected a multiple of {need}",
                          where=f"kernel {spec.op.name} on sm100", next="pad the weight")
    stored = "float4_e2m1fn" if e2m1 else "float8_e4m3fn"
    held = T.float4_e2m1_unpacked if e2m1 else "float8_e4m3fn"
    out = {"bf16": "bfloat16", "f32": "float32"}[spec.attrs["out"]]
    blocks, tile_rows = K // SCALED, 1 if e2m1 else SCALED
    steps = -(-K // BLOCK_K)
    # A step's four scales are one aligned word of a row, if rows are whole words.
    words = blocks % 4 == 0
    scale_type, columns = ("uint32", blocks // 4) if words else ("uint8", blocks)

    @T.macro
    def stage_word(scales, row, step, staged_words, stage, place):
        """Four scales of a row as one word, where tcgen05.cp wants it: lane row % 32."""
        if words:
            staged_words[stage, place] = scales[row, step]
        else:
            word = T.alloc_var("uint32")
            word = 0
            for i in T.unroll(4):
                code = T.alloc_var("uint32")
                code = UNIT
                if step * 4 + i < blocks:
                    code = T.cast(scales[row, step * 4 + i], "uint32")
                word = word | (code << T.uint32(8 * i))
            staged_words[stage, place] = word

    @T.prim_func
    def body(q: T.Tensor((N, K), "float8_e4m3fn"), sf: T.Tensor((N, columns), scale_type),
             w: T.Tensor((M, K), stored),
             ws: T.Tensor((-(-M // tile_rows), columns), scale_type), y: T.Tensor((N, M), out)):
        with T.Kernel(T.ceildiv(M, BLOCK_M), T.ceildiv(N, tokens), threads=THREADS) as (bm, bn):
            a = T.alloc_shared((stages, BLOCK_M, BLOCK_K), held)
            b = T.alloc_shared((stages, tokens, BLOCK_K), "float8_e4m3fn")
            a_words = T.alloc_shared((stages, WORDS), "uint32")
            b_words = T.alloc_shared((stages, WORDS), "uint32")
            acc = T.alloc_tmem((BLOCK_M, tokens), "float32")
            a_scales = T.alloc_tmem((BLOCK_M, 4), "uint32")
            b_scales = T.alloc_tmem((BLOCK_M, 4), "uint32")
            loaded = T.alloc_barrier([1] * stages)
            staged = T.alloc_barrier([STAGERS] * stages)
            free = T.alloc_barrier([1] * stages)
            done = T.alloc_barrier(1)
            result = T.alloc_fragment((BLOCK_M, tokens), "float32")
            tx = T.get_thread_binding()
            if tx < WARP:
                for k in T.serial(steps):
                    if k >= stages:
                        T.mbarrier_wait_parity(free[k % stages], (k // stages + 1) % 2)
                    T.tma_copy(w[bm * BLOCK_M:(bm + 1) * BLOCK_M, k * BLOCK_K:(k + 1) * BLOCK_K],
                               a[k % stages, :, :], barrier=loaded[k % stages])
                    T.tma_copy(q[bn * tokens:(bn + 1) * tokens, k * BLOCK_K:(k + 1) * BLOCK_K],
                               b[k % stages, :, :], barrier=loaded[k % stages])
                    if T.shuffle_elect(WARP):  # the lane that announced the bytes
                        T.mbarrier_arrive(loaded[k % stages])
            elif tx < 2 * WARP:
                for k in T.serial(steps):
                    T.mbarrier_wait_parity(loaded[k % stages], k // stages % 2)
                    T.mbarrier_wait_parity(staged[k % stages], k // stages % 2)
                    T.tcgen05_after_thread_sync()
                    # One set of scale columns suffices: the pipe runs copies and MMAs in order.
                    T.tcgen05_cp_warpx4(a_words[k % stages, :], a_scales)
                    T.tcgen05_cp_warpx4(b_words[k % stages, :], b_scales)
                    T.tcgen05_gemm_blockscaled(
                        a[k % stages, :, :], b[k % stages, :, :], acc, a_scales, b_scales,
                        transpose_B=True, mbar=free[k % stages], clear_accum=k == 0,
                        k_start=k * BLOCK_K, sf_a_granularity_k=SCALED, sf_b_granularity_k=SCALED)
                T.tcgen05_mma_arrive(done)
            else:
                for k in T.serial(steps):
                    if k >= stages:
                        T.mbarrier_wait_parity(free[k % stages], (k // stages + 1) % 2)
                    for i in T.serial(WORDS // STAGERS):
                        row = i * STAGERS + tx - 2 * WARP
                        place = row % 32 * 4 + row // 32
                        stage_word(ws, T.min(bm * BLOCK_M + row, M - 1) // tile_rows, k,
                                   a_words, k % stages, place)
                        stage_word(sf, T.min(bn * tokens + row, N - 1), k,
                                   b_words, k % stages, place)
                    T.fence_proxy_async()
                    T.mbarrier_arrive(staged[k % stages])
            T.mbarrier_wait_parity(done, 0)
            T.tcgen05_after_thread_sync()
            T.copy(acc, result)
            for n, m in T.Parallel(tokens, BLOCK_M):
                if bn * tokens + n < N and bm * BLOCK_M + m < M:
                    y[bn * tokens + n, bm * BLOCK_M + m] = result[m, n]
            T.tcgen05_before_thread_sync()
            T.sync_threads()  # nobody reads tensor memory any more: it may be freed
            T.tcgen05_after_thread_sync()

    return body
