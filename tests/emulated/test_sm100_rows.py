"""Row kernels of sm100 in the emulator: norm_quant and rope_window_write have the reference's bits.

Both keep the op's declared order (16 lanes and a tree; a block maximum), so nothing may differ.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from deepinfer.ops.fused import rope_window_write
from deepinfer.ops.norm import norm_quant
from deepinfer.targets.sm100.kernels.norm_quant import norm_quant as norm_kernel
from deepinfer.targets.sm100.kernels.rope_window_write import rope_window_write as rope_kernel
from tests.emulated.sm100_harness import Array, Case, caught, check

SCHEDULES = ("eager", "random", "reversed")  # nothing is asynchronous here: lazy would be eager


def bf16(x: Array) -> Array:
    return x.astype(ml_dtypes.bfloat16)


def norm(n: int, c: int, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, c)) * np.exp2(rng.integers(-20, 20, (n, 1)))
    x[0, :40] = 0
    return Case(norm_quant, norm_kernel, (bf16(x), bf16(rng.standard_normal(c))),
                (("eps", 1e-20), ("block", 32)))


def rope_write(spans: list[tuple[int, int, int]], start: list[int], d: int, width: int, seed: int
               ) -> Case:
    """Requests with the given spans and first positions, ring of 20 slots with old content."""
    rng = np.random.default_rng(seed)
    n = spans[-1][2]
    request, positions = np.empty(n, np.int32), np.empty(n, np.int32)
    for r, ((_, first, end), p) in enumerate(zip(spans, start, strict=True)):
        request[first:end], positions[first:end] = r, np.arange(p, p + end - first)
    ring = rng.integers(0, 127, (4, 20, d)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    ring_sf = rng.integers(100, 140, (4, 20, d // 32)).astype(np.uint8)
    table = rng.uniform(-1, 1, (int(positions.max()) + 1, width)).astype(np.float32)
    x = rng.standard_normal((n, d)) * np.exp2(rng.integers(-8, 8, (n, 1)))
    return Case(rope_window_write, rope_kernel,
                (bf16(x), positions, table, request,
                 np.array([(*s, 0) for s in spans], np.int32), ring,
                 ring_sf.view(ml_dtypes.float8_e8m0fnu)), (("block", 32),), ("N", "R", "S"))


NORMS = [(3, 512), (5, 160)]
# One request that overruns the ring of 20; three, one of which wraps, and channels left unturned.
WRITES: list[tuple[list[tuple[int, int, int]], list[int], int, int]] = [
    ([(2, 0, 27)], [5], 64, 64), ([(3, 0, 1), (0, 1, 8), (1, 8, 10)], [0, 16, 40], 160, 48)]


@pytest.mark.parametrize(("n", "c"), NORMS)
def test_norm_quant_has_the_reference_bits(n: int, c: int) -> None:
    case = norm(n, c, 1)
    for schedule in case.kernel.space(case.spec()):
        check(case, schedule=schedule, schedules=SCHEDULES)


@pytest.mark.parametrize(("spans", "start", "d", "width"), WRITES)
def test_rope_window_write_has_the_reference_bits(
        spans: list[tuple[int, int, int]], start: list[int], d: int, width: int) -> None:
    case = rope_write(spans, start, d, width, 1)
    got = check(case, schedules=SCHEDULES)
    assert (got[2].view(np.uint8) != case.arrays[5].view(np.uint8)).any(), "the ring is written"


def test_a_row_that_is_not_finite_spoils_only_its_blocks() -> None:
    case = rope_write(*WRITES[1][:2], 160, 48, 2)
    case.arrays[0][2, 40] = np.nan
    case.arrays[0][4, 70] = np.inf
    check(case, schedules=("eager",))


BROKEN = [
    ("norm", "the barrier before the sum removed", r"__syncthreads\(\);", ";"),
    ("norm", "the tree one step short", r"step < 4", "step < 3"),
    ("norm", "squares off by one", r"\(i \* 16\)", "(i * 16 + 1)"),
    ("norm", "a scale in the wrong place", r"(sf\[[^;]*)\)\] = exponent", r"\1 + 1)] = exponent"),
    ("rope", "the partner channel wrong", r"value\[0\], 1, 32", "value[0], 2, 32"),
    ("rope", "a ring slot off by one", r"(?<=ring\[\()", "160 + "),
    ("rope", "only part of a warp takes the maximum", r"step(_\d)? < 5", r"step\1 < 4"),
    ("rope", "rows that are overwritten later written too", r"bool kept = ", "bool kept = 1 | "),
]


@pytest.mark.parametrize(("which", "what", "old", "new"), BROKEN)
def test_broken_variants_are_caught(which: str, what: str, old: str, new: str) -> None:
    # The long span again, so that rows beyond the ring's length exist.
    case = norm(5, 160, 1) if which == "norm" else rope_write([(2, 0, 27)], [5], 160, 48, 1)
    assert caught(case, old, new), what
