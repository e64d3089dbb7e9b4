"""The block-scaled GEMM of linear_fp8 and linear_fp4: MXFP8 on the cube cores, scales per 32.

A cube core computes tiles of ``tokens`` rows by 128 outputs; the activation is operand A, the
weight operand B. Its two vector cores stage what the cube unit cannot take as stored, each for half
of the outputs: one scale per output from one per 32x32, or e2m1 codes as e4m3 codes. Everything is
double-buffered. K advances in steps of ``step_k``, a function of K alone, and each is one product
of the cube unit: the sum over K does not depend on the schedule, nor on the rows.

Flags: 0 and 1 say that the vector cores filled a stage of L1, 2 and 3 that the cube core is done
with it. Every "free" event is set once before the loops and waited for once after them.
"""

import tilelang.ascend.language as T

from deepinfer.errors import TargetError
from deepinfer.targets.ascend950.dialect import (
    CUBES,
    SECOND,
    UNIT,
    arrive,
    await_,
    dims,
    notify,
    wait,
)
from deepinfer.targets.base import Spec, grid

OUTPUTS, SCALED, PAIR = 128, 32, 64  # outputs of a tile; elements a scale, and a pair of scales
HALF = OUTPUTS // 2  # outputs a vector core stages
FILLED, FREE = 0, 2  # flags, plus the stage
THREADS = 256
PER_WORD = 8  # e2m1 codes of a 32-bit word


def space(spec: Spec):
    return grid(tokens=(64, 32, 128))


def step_k(k: int) -> int:
    """K of a step: two stages of it, 128 wide, fit L0A and L0B."""
    return next(step for step in (256, 128, PAIR) if k % step == 0)


@T.macro
def widen(word, lower, upper):
    """Eight e2m1 codes of a word as eight e4m3 codes in two words, exactly."""
    for i in T.unroll(2):
        made = T.alloc_var("uint32")
        made = T.uint32(0)
        for j in T.unroll(4):
            nibble = (word >> T.cast(16 * i + 4 * j, "uint32")) & T.uint32(15)
            size = nibble & T.uint32(7)
            # 1 is 2^-1, code 0x30; from 2 on, both count exponents and halves: 0x30 + 4 * size
            code = T.if_then_else(size > T.uint32(1), T.uint32(0x30) + size * T.uint32(4),
                                  size * T.uint32(0x30))
            made = made | ((code | ((nibble & T.uint32(8)) << T.uint32(4)))
                           << T.cast(8 * j, "uint32"))
        if i == 0:
            lower[0] = made
        else:
            upper[0] = made


def scaled_gemm(spec: Spec, weight: str):
    """The program for a ``weight`` in "e4m3" (one scale a 32x32 tile) or "e2m1" (one per 32)."""
    N, M, K = dims(spec, "N", "M", "K")
    tokens, e2m1 = spec.schedule["tokens"], weight == "e2m1"
    if K % PAIR:
        raise TargetError(f"K = {K}, expected a multiple of {PAIR}",
                          where=f"kernel {spec.op.name} on ascend950", next="pad the weight")
    out = {"bf16": "bfloat16", "f32": "float32"}[spec.attrs["out"]]
    step, outs = step_k(K), -(-M // OUTPUTS)
    steps, pairs, words = K // step, step // PAIR, step // PER_WORD
    w_type = ((M, K // PER_WORD), "uint32") if e2m1 else ((M, K), "float8_e4m3fn")
    scale_rows = M if e2m1 else -(-M // SCALED)
    # A column of 32 codes of all rows, and a row of padding against bank conflicts.
    staged = ((2, (HALF + 1) * step // 4), "uint32") if e2m1 else ((2, HALF * pairs), "uint16")

    @T.macro
    def load(q, sf, w, ws, stage, m, n, k, a_l1, a_sf_l1, b_l1, b_sf_l1):
        T.copy(q[m:m + tokens, k * step:(k + 1) * step], a_l1[stage, :, :])
        T.copy(sf[m:m + tokens, k * pairs:(k + 1) * pairs], a_sf_l1[stage, :, :])
        if e2m1:
            T.copy(ws[n:n + OUTPUTS, k * pairs:(k + 1) * pairs], b_sf_l1[stage, :, :])
        else:
            T.copy(w[n:n + OUTPUTS, k * step:(k + 1) * step], b_l1[stage, :, :])

    @T.macro
    def stage_scales(ws, stage, first, k, staged_ub):
        """Pairs of scales as L1 has them: [outputs / 16][pairs][16]."""
        with T.SimtVF(threads=THREADS):
            tx = T.get_thread_binding()
            for i in T.serial(T.ceildiv(HALF * pairs, THREADS)):
                at = i * THREADS + tx
                if at < HALF * pairs:
                    row = at // (16 * pairs) * 16 + at % 16
                    staged_ub[stage, at] = ws[T.min(first + row, M - 1) // SCALED,
                                              k * pairs + at // 16 % pairs]

    @T.macro
    def stage_codes(stage, first, packed_ub, staged_ub):
        """Codes as L1 has them: [K / 32][outputs][32]; zeros beyond the last output."""
        with T.SimtVF(threads=THREADS):
            tx = T.get_thread_binding()
            lower = T.alloc_local((1,), "uint32")
            upper = T.alloc_local((1,), "uint32")
            for i in T.serial(HALF * words // THREADS):
                row, word = (i * THREADS + tx) // words, (i * THREADS + tx) % words
                lower[0] = T.uint32(0)
                upper[0] = T.uint32(0)
                if first + row < M:
                    widen(packed_ub[stage, row, word], lower, upper)
                at = (word // 4 * (HALF + 1) + row) * 8 + word % 4 * 2
                staged_ub[stage, at] = lower[0]
                staged_ub[stage, at + 1] = upper[0]

    @T.prim_func
    def body(q: T.Tensor((N, K), "float8_e4m3fn"), sf: T.Tensor((N, K // PAIR), "uint16"),
             w: T.Tensor(*w_type), ws: T.Tensor((scale_rows, K // PAIR), "uint16"),
             y: T.Tensor((N, M), out)):
        with T.Kernel(CUBES) as core:
            a_l1 = T.alloc_l1((2, tokens, step), "float8_e4m3fn")
            b_l1 = T.alloc_l1((2, OUTPUTS, step), "float8_e4m3fn")
            a_sf_l1 = T.alloc_l1((2, tokens, pairs), "uint16")
            b_sf_l1 = T.alloc_l1((2, OUTPUTS, pairs), "uint16")
            acc_l0c = T.alloc_l0c((tokens, OUTPUTS), "float32")
            packed_ub = T.alloc_shared((2, HALF, words), "uint32")
            staged_ub = T.alloc_shared(*staged)
            tiles = T.ceildiv(T.ceildiv(N, tokens) * outs - core, CUBES)
            with T.Cube():
                notify("FIX", "M", 0)
                for s in T.unroll(2, explicit=True):
                    notify("MTE1", "MTE2", s)
                    arrive("MTE1", FREE + s)
                    arrive("MTE1", FREE + s + SECOND)
                for t in T.serial(tiles):
                    m = (t * CUBES + core) // outs * tokens
                    n = (t * CUBES + core) % outs * OUTPUTS
                    for k in T.serial(steps):
                        s = (t * steps + k) % 2
                        wait("MTE1", "MTE2", s)
                        load(q, sf, w, ws, s, m, n, k, a_l1, a_sf_l1, b_l1, b_sf_l1)
                        notify("MTE2", "MTE1", s)
                        wait("MTE2", "MTE1", s)
                        await_("MTE1", FILLED + s)
                        await_("MTE1", FILLED + s + SECOND)
                        if k == 0:
                            wait("FIX", "M", 0)
                        T.gemm_blockscaled(a_l1[s, :, :], b_l1[s, :, :], acc_l0c, a_sf_l1[s, :, :],
                                           b_sf_l1[s, :, :], transpose_B=True, clear_accum=k == 0)
                        notify("MTE1", "MTE2", s)
                        arrive("MTE1", FREE + s)
                        arrive("MTE1", FREE + s + SECOND)
                    notify("M", "FIX", 0)
                    wait("M", "FIX", 0)
                    T.copy(acc_l0c, y[m:m + tokens, n:n + OUTPUTS])
                    notify("FIX", "M", 0)
                wait("FIX", "M", 0)
                for s in T.unroll(2, explicit=True):
                    wait("MTE1", "MTE2", s)
            with T.Vector() as half:
                for s in T.unroll(2, explicit=True):
                    notify("MTE3", "V", s)
                    if e2m1:
                        notify("V", "MTE2", s)
                for t in T.serial(tiles):
                    first = (t * CUBES + core) % outs * OUTPUTS + half * HALF
                    for k in T.serial(steps):
                        s = (t * steps + k) % 2
                        if e2m1:
                            wait("V", "MTE2", s)
                            T.copy(w[first:first + HALF, k * words:(k + 1) * words],
                                   packed_ub[s, :, :])
                            notify("MTE2", "V", s)
                            wait("MTE2", "V", s)
                        wait("MTE3", "V", s)
                        if e2m1:
                            stage_codes(s, first, packed_ub, staged_ub)
                            notify("V", "MTE2", s)
                        else:
                            stage_scales(ws, s, first, k, staged_ub)
                        notify("V", "MTE3", s)
                        wait("V", "MTE3", s)
                        await_("MTE3", FREE + s)
                        if e2m1:  # as 16-bit elements: a unit is a unit
                            T.ascend_nd2nz_post_copy(
                                T.access_ptr(b_l1[s, half * HALF, 0], "w"),
                                T.access_ptr(staged_ub[s, 0], "r"), HALF, step // 2, OUTPUTS,
                                "bfloat16_t")
                        else:
                            T.ascend_nd2nz_post_copy(
                                T.access_ptr(b_sf_l1[s, half * HALF, 0], "w"),
                                T.access_ptr(staged_ub[s, 0], "r"), HALF * pairs * 2 // UNIT, 16,
                                HALF * pairs * 2 // UNIT, "bfloat16_t")
                        arrive("MTE3", FILLED + s)
                        notify("MTE3", "V", s)
                for s in T.unroll(2, explicit=True):
                    wait("MTE3", "V", s)
                    await_("MTE3", FREE + s)
                    if e2m1:
                        wait("V", "MTE2", s)

    return body
