"""linear_fp8 and linear_fp4 of sm100 in the emulator.

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
from deepinfer.targets.base import Schedule
from deepinfer.targets.sm100.kernels.linear_fp4 import linear_fp4 as fp4_kernel
from deepinfer.targets.sm100.kernels.linear_fp8 import linear_fp8 as fp8_kernel
from tests.emulated.sm100_harness import Array, Case, Compare, caught, check, emulate


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


# One with whole tiles; one with tails in rows, outputs and (fp8) K, and more than twice as many
# stages of K as the pipeline holds.
CASES = [("fp8", 64, 128, 256, "bf16"), ("fp8", 37, 160, 1120, "f32"),
         ("fp4", 64, 128, 256, "f32"), ("fp4", 37, 160, 1152, "bf16")]


@pytest.mark.parametrize(("fmt", "n", "m", "k", "out"), CASES)
def test_agrees_with_the_reference(fmt: str, n: int, m: int, k: int, out: str) -> None:
    c = case(fmt, n, m, k, 1, out)
    check(c, bound(c))


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_schedules_and_rows_do_not_change_bits(fmt: str) -> None:
    c = case(fmt, 37, 160, 640, 2)
    first, second, *_, last = c.kernel.space(c.spec())
    expected = check(c, bound(c), schedule=first, schedules=("eager",))
    for schedule in (second, last):
        got = check(c, bound(c), schedule=schedule, schedules=("random",))
        assert np.array_equal(got[0].view(np.uint16), expected[0].view(np.uint16)), schedule
    alone = Case(c.op, c.kernel, (c.arrays[0][36:], c.arrays[1][36:], *c.arrays[2:]), c.attrs)
    got = check(alone, bound(alone), schedules=("lazy",))
    assert np.array_equal(got[0].view(np.uint16), expected[0][36:].view(np.uint16))


def test_a_row_of_nan_stays_alone() -> None:
    c = case(*CASES[1][:4], 1, CASES[1][4])
    clean = check(c, bound(c), schedules=("eager",))[0]
    c.arrays[0].view(np.uint8)[5] = c.arrays[1].view(np.uint8)[5] = 0xFF
    (got,), report = c.run(emulate(c))
    others = np.arange(37) != 5
    assert report.clean() and np.isnan(got[5]).all()
    assert np.array_equal(got[others].view(np.uint32), clean[others].view(np.uint32))


@pytest.mark.parametrize(("fmt", "n", "m", "k", "out"), CASES)
def test_the_products_run_on_the_tensor_cores(fmt: str, n: int, m: int, k: int, out: str) -> None:
    c = case(fmt, n, m, k, 1, out)
    schedule = c.spec().schedule
    _, report = c.run(emulate(c))
    steps, blocks = -(-k // 128), -(-m // 128) * -(-n // schedule["tokens"])
    assert report.operations["tcgen05.mma"] == 4 * steps * blocks
    assert report.operations["tcgen05.cp"] == report.operations["cp.async.bulk.tensor"] \
        == 2 * steps * blocks
    assert (n, steps > 2 * schedule["stages"]) in {(64, False), (37, True)}


SHORT = Schedule((("stages", 2), ("tokens", 32)))
BROKEN = [
    ("the wait for loads removed", r"loaded\[[^;]*\]\.wait\([^;]*;", ";", 0),
    ("the wait for scales removed", r"staged\[[^;]*\]\.wait\([^;]*;", ";", 0),
    ("the wait for free stages removed", r"free\[[^;]*\]\.wait\([^;]*;", ";", 0),
    ("the wait for the last mma removed", r"done\[0\]\.wait\(0\);", ";", 0),
    ("the wrong phase", r"(loaded\[[^;]*\]\.wait\()([^;]*)\);", r"\1(\2) ^ 1);", 0),
    ("scales staged without a proxy fence", r"tl::fence_proxy_async\(\);(?=\s*staged)", ";", 0),
    ("the barrier before the dealloc removed",
     r"__syncthreads\(\);(?=\s*tl::tcgen05_after_thread_sync\(\);\s*if [^\n]*\n\s*tl::tmem_d)",
     ";", 0),
    ("half the bytes expected", r"expect_transaction\(16384\)", "expect_transaction(8192)", 0),
    ("a load one block of K off", r"\(k \* 128\)", "(k * 128 + 32)", 1),
    ("a step of K off", r"desc_b \+ \(ki \* 32\)", "desc_b + (ki * 16)", 0),
    ("scales of the wrong block", r"ki << 29", "(ki ^ 1) << 29", 0),
    ("scales of B where A's are", r"(sfa_data\)\)) \+ 4", r"\1 + 0", 0),
]


@pytest.mark.parametrize(("what", "old", "new", "count"), BROKEN)
def test_broken_variants_are_caught(what: str, old: str, new: str, count: int) -> None:
    c = case("fp8", 37, 160, 640, 3)
    assert caught(c, old, new, bound(c), count=count, schedule=SHORT), what


# The program is the same; what differs is the unpacking of the weight and its scales.
BROKEN_FP4 = [
    ("the wait for loads removed", r"loaded\[[^;]*\]\.wait\([^;]*;", ";"),
    ("the wrong phase", r"(free\[[^;]*\]\.wait\()([^;]*)\);", r"\1(\2) ^ 1);"),
    ("packed bytes expected to be unpacked", r"expect_transaction\(8192\)",
     "expect_transaction(16384)"),
    ("the next row's scale", r"= ws\[\(", "= ws[(5 + "),
]


@pytest.mark.parametrize(("what", "old", "new"), BROKEN_FP4)
def test_broken_variants_of_fp4_are_caught(what: str, old: str, new: str) -> None:
    c = case("fp4", 37, 160, 640, 3)
    assert caught(c, old, new, bound(c), schedule=SHORT), what
