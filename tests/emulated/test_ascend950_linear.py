"""linear_fp8 and linear_fp4 of ascend950 in the emulator.

The bound: products of e4m3 and e2m1 codes and powers of two are exact in fp32, so both the
reference (cpu GEMM order) and the kernel differ from the exact sum by at most K * 2^-24 *
sum|a*b| each, whatever the order of additions; a bf16 output adds half a unit of 2^-8 to each.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from deepinfer.numerics.formats import dequantize_fp4, dequantize_fp8, dequantize_fp8_tile, f32
from deepinfer.ops.gemm import linear_fp4, linear_fp8
from deepinfer.ops.quant import quantize_fp8
from deepinfer.targets.ascend950.kernels.linear_fp4 import linear_fp4 as fp4_kernel
from deepinfer.targets.ascend950.kernels.linear_fp8 import linear_fp8 as fp8_kernel
from tests.emulated.ascend950_harness import Array, Case, Compare, caught, check, emulate


def scales(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(118, 130, shape).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)


def case(fmt: str, n: int, m: int, k: int, seed: int, out: str = "bf16") -> Case:
    """Activations of very unlike rows; weights of random codes and scales."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, k)) * np.exp2(rng.integers(-6, 6, (n, 1)))
    q, sf = quantize_fp8(x.astype(ml_dtypes.bfloat16), block=32)
    attrs = (("out", out),)
    if fmt == "fp8":
        w = rng.standard_normal((m, k)).astype(ml_dtypes.float8_e4m3fn)
        return Case(linear_fp8, fp8_kernel, (q, sf, w, scales(rng, m // 32, k // 32)), attrs)
    packed = rng.integers(0, 256, (m, k // 2)).astype(np.uint8)
    return Case(linear_fp4, fp4_kernel, (q, sf, packed, scales(rng, m, k // 32)), attrs)


def bound(c: Case) -> Compare:
    q, sf, w, ws = c.arrays
    a = np.abs(f32(dequantize_fp8(q, sf)).astype(np.float64))
    wide = dequantize_fp4(w, ws, 32) if c.op is linear_fp4 else dequantize_fp8_tile(w, ws)
    size = a @ np.abs(f32(wide).astype(np.float64)).T
    slack = 2 * a.shape[1] * 2.0**-24 * size

    def compare(got: tuple[Array, ...], expected: tuple[Array, ...]) -> str:
        g, e = (f32(x[0]).astype(np.float64) for x in (got, expected))
        allowed = slack + (2.0**-8 * np.abs(e) if got[0].dtype != np.float32 else 0)
        worst = float(np.max(np.abs(g - e) / np.maximum(allowed, 1e-300)))
        return "" if worst <= 1 else f"off by {worst:.3g} of the bound"

    return compare


# One with whole tiles; one with tails in rows and outputs and an odd number of small steps of K;
# one with more tiles than cores.
CASES = [("fp8", 64, 128, 512, "bf16"), ("fp8", 37, 160, 320, "f32"),
         ("fp8", 1100, 160, 128, "f32"), ("fp4", 64, 128, 512, "f32"),
         ("fp4", 37, 160, 320, "bf16")]


@pytest.mark.parametrize(("fmt", "n", "m", "k", "out"), CASES)
def test_agrees_with_the_reference(fmt: str, n: int, m: int, k: int, out: str) -> None:
    c = case(fmt, n, m, k, 1, out)
    check(c, bound(c))


def test_the_products_run_on_the_cube_core() -> None:
    """One block-scaled product per tile and step of K: no schedule changes a sum's steps."""
    for fmt in ("fp8", "fp4"):
        c = case(fmt, 37, 160, 320, 1)
        _, report = c.run(emulate(c))
        assert report.operations["mmad_mx"] == 2 * 5 and "mmad" not in report.operations


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_schedules_and_rows_do_not_change_bits(fmt: str) -> None:
    c = case(fmt, 37, 160, 320, 2)
    first, second, last = c.kernel.space(c.spec())
    expected = check(c, bound(c), schedule=first, schedules=("eager",))
    for schedule in (second, last):
        got = check(c, bound(c), schedule=schedule, schedules=("random",))
        assert np.array_equal(got[0].view(np.uint16), expected[0].view(np.uint16)), schedule
    alone = Case(c.op, c.kernel, (c.arrays[0][36:], c.arrays[1][36:], *c.arrays[2:]), c.attrs)
    got = check(alone, bound(alone), schedules=("lazy",))
    assert np.array_equal(got[0].view(np.uint16), expected[0][36:].view(np.uint16))


STAGE = r"\(\(\(t(?:_1)? \* 5\) \+ k(?:_1)?\) & 1\)"
BROKEN = [
    ("the wait for loads removed", r"asc_sync_wait\(PIPE_MTE2, PIPE_MTE1.*", ";"),
    ("the wait for a free stage removed", rf"asc_sync_wait\(PIPE_MTE1, PIPE_MTE2, .*{STAGE}.*",
     ";"),
    ("the wait for scales of one core removed", rf"asc_sync_intra_wait\(PIPE_MTE1, {STAGE}\);",
     ";"),
    ("the wait for free scales removed", rf"asc_sync_intra_wait\(PIPE_MTE3, \({STAGE} \+ 2\)\);",
     ";"),
    ("the wait for the product removed", r"asc_sync_wait\(PIPE_M, PIPE_FIX.*", ";"),
    ("the wait for staged scales removed", r"asc_sync_wait\(PIPE_V, PIPE_MTE3.*", ";"),
    ("the wrong event", rf"(asc_sync_wait\(PIPE_MTE2, PIPE_MTE1, .*){STAGE}", r"\1((k + 1) & 1)"),
    ("the wrong flag", rf"(asc_sync_intra_arrive\(PIPE_MTE3, ){STAGE}", r"\1((k_1 + 1) & 1)"),
    ("a load one block of K off", r"\(\(int64_t\)k\) \* \(int64_t\)64", "(int64_t)k * 64 + 32"),
    ("both vector cores stage the first half", r"asc_get_sub_block_id\(\)", "0"),
]


@pytest.mark.parametrize(("what", "old", "new"), BROKEN)
def test_broken_variants_are_caught(what: str, old: str, new: str) -> None:
    c = case("fp8", 37, 160, 320, 3)
    assert caught(c, old, new, bound(c)), what


def test_an_accumulator_that_is_not_kept_off_is_caught() -> None:
    """It takes a core with two tiles."""
    c = case("fp8", 1100, 160, 128, 3)
    assert caught(c, r"asc_sync_(wait|notify)\(PIPE_FIX, PIPE_M.*", ";", bound(c))


# The program is the same; what differs is what the vector cores stage.
BROKEN_FP4 = [
    ("the wait for codes removed", r"asc_sync_wait\(PIPE_MTE2, PIPE_V.*", ";"),
    ("the wait for free codes removed", rf"asc_sync_wait\(PIPE_V, PIPE_MTE2, .*{STAGE}.*", ";"),
    ("the wait for widened codes of one core removed",
     rf"asc_sync_intra_wait\(PIPE_MTE1, \({STAGE} \+ 16\)\);", ";"),
    ("the wrong event", rf"(asc_sync_wait\(PIPE_MTE3, PIPE_V, .*){STAGE}", r"\1((k_1 + 1) & 1)"),
    ("the padding row forgotten", r"(asc_copy_ub2l1\(.*), 1, 64\);", r"\1, 0, 64);"),
    ("halves of the outputs swapped", r"\(sid \* 2048\)", "((1 - sid) * 2048)"),
    ("a code wrong", r"\(uint32_t\)48 \+", "(uint32_t)49 +"),
]


@pytest.mark.parametrize(("what", "old", "new"), BROKEN_FP4)
def test_broken_variants_of_fp4_are_caught(what: str, old: str, new: str) -> None:
    c = case("fp4", 37, 160, 320, 3)
    assert caught(c, old, new, bound(c)), what
