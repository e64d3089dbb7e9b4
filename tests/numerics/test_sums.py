"""The summation orders against exact rationals, the processor's own FMA and scalar loops."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from deepinfer.errors import DeepInferError
from deepinfer.numerics import sums
from deepinfer.numerics.formats import to_bf16

SOURCE = """
static inline float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float add_of(float a, float b) { return a + b; }
"""
SIGNATURES = {"fma_of": "float,float,float->float", "add_of": "float,float->float"}
SMALLEST_NORMAL = Fraction(2) ** -126


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def operands(kind: str, m: int, n: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """bf16 a [m,k] and b [n,k]: ordinary, of wide exponents, or small in one of three ways."""
    random = np.random.default_rng(seed)
    a, b = random.normal(size=(m, k)), random.normal(size=(n, k))
    if kind == "wide":
        a *= np.exp2(random.integers(-50, 50, a.shape))
        b *= np.exp2(random.integers(-10, 10, b.shape))
    if kind == "tiny":
        a *= np.exp2(random.integers(-68, -58, a.shape))
        b *= np.exp2(random.integers(-66, -60, b.shape))
    if kind == "edge":
        a = random.choice([-1, 1], a.shape) * 2.0**-63
        b = np.exp2(random.choice([0, -23, -24, -25, -26], b.shape)) * 2.0**-63
    if kind == "denormal":
        a *= np.exp2(random.integers(-135, -120, a.shape))
    return to_bf16(a), to_bf16(b)


# ---- an independent gemm in rational arithmetic


def flush(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < SMALLEST_NORMAL else x


def round_and_flush(exact: Fraction, zero: float) -> tuple[float, str]:
    """exact to 24 bits, nearest even, any exponent; then flushed. And what happened."""
    if exact == 0:
        return zero, "zero"
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    ulp = Fraction(2) ** (exponent - 23)
    rounded = round(exact / ulp) * ulp
    if abs(rounded) < SMALLEST_NORMAL:
        return math.copysign(0.0, exact), "flushed"
    return float(rounded), "exact" if rounded == exact else "rounded"


def add(x: float, y: float, seen: set[str], product: Fraction | None = None) -> float:
    """x + y in fp32 with FTZ and DAZ; `product` is the exact value of x where that is a product."""
    x_exact = Fraction(x) if product is None else product
    zero = x if x_exact == 0 and y == 0 and math.copysign(1, x) == math.copysign(1, y) else 0.0
    result, what = round_and_flush(x_exact + Fraction(y), zero)
    seen.add(what)
    return result


def slow_gemm(a: np.ndarray, b: np.ndarray, acc: np.ndarray, seen: set[str]) -> np.ndarray:
    out = np.array(acc, np.float32)
    for i, j in np.ndindex(out.shape):
        pairs = [
            (flush(float(x)), flush(float(y)))
            for x, y in zip(a[i].tolist(), b[j].tolist(), strict=True)
        ]
        pairs += [(0.0, 0.0)] * (-len(pairs) % 32)
        total = flush(float(out[i, j]))
        for start in range(0, len(pairs), 32):
            chains = [0.0, 0.0]
            for position, (x, y) in enumerate(pairs[start : start + 32]):
                sign = math.copysign(1, x) * math.copysign(1, y)
                product = Fraction(x) * Fraction(y)
                chains[position % 2] = add(
                    math.copysign(0.0, sign), chains[position % 2], seen, product
                )
            total = add(total, add(*chains, seen), seen)
        out[i, j] = total
    return out


@pytest.mark.parametrize("k", [64, 41, 1])
@pytest.mark.parametrize("kind", ["ordinary", "wide", "tiny", "edge", "denormal"])
def test_gemm_equals_exact_rational_arithmetic(kind: str, k: int) -> None:
    a, b = operands(kind, 5, 6, k, seed=k)
    seen: set[str] = set()
    acc = np.random.default_rng(k).normal(size=(5, 6)).astype(np.float32)
    acc *= np.float32(2.0**-126 if kind in ("tiny", "edge", "denormal") else 1)
    for start in (np.zeros_like(acc), acc):
        expected = slow_gemm(a, b, start, seen)
        np.testing.assert_array_equal(bits(sums.gemm(a, b, start)), bits(expected))
    assert "rounded" in seen or k == 1
    if kind == "tiny" and k > 1:
        assert "flushed" in seen
    if kind == "denormal":
        assert (np.abs(a.astype(np.float64)) < 2.0**-126).any()


def test_flushing_is_decided_before_the_denormal_grid_is_rounded_to() -> None:
    """2^-126 - 2^-150 is a 24-bit number below 2^-126, though fp32's grid would round it up."""
    for n, flushed in {23: True, 24: True, 25: False, 26: False}.items():
        # The even chain holds 2^-63 * 2^-63, then subtracts 2^-63 * 2^(-63-n).
        a, b = np.zeros((1, 32)), np.zeros((1, 32))
        a[0, 0], b[0, 0] = 2.0**-63, 2.0**-63
        a[0, 2], b[0, 2] = -(2.0**-63), 2.0 ** (-63 - n)
        got = sums.gemm(to_bf16(a), to_bf16(b))[0, 0]
        assert got == (0 if flushed else np.float32(2.0**-126)), n


@pytest.mark.parametrize("kind", ["ordinary", "wide", "tiny", "edge", "denormal"])
def test_gemm_equals_the_processors_fma(micro, request, kind: str) -> None:
    if "generic" in request.node.name:
        pytest.skip("plain x86-64 has no FMA instruction")
    a, b = operands(kind, 40, 50, 96, seed=3)
    left = np.repeat(a.astype(np.float32)[:, None], 50, 1)
    right = np.repeat(b.astype(np.float32)[None], 40, 0)
    acc = np.zeros((40, 50), np.float32)
    for start in range(0, 96, 32):
        chains = [np.zeros_like(acc), np.zeros_like(acc)]
        for k in range(32):
            x, y = left[..., start + k], right[..., start + k]
            chains[k % 2] = micro.call("fma_of", np.float32, x, y, chains[k % 2], flush=True)
        block = micro.call("add_of", np.float32, *chains, flush=True)
        acc = micro.call("add_of", np.float32, acc, block, flush=True)
    np.testing.assert_array_equal(bits(sums.gemm(a, b)), bits(acc))


def test_the_order_matters_for_these_operands() -> None:
    """The negative control: float64, or one chain instead of two, gives other bits."""
    a, b = operands("ordinary", 20, 20, 256, seed=9)
    got = sums.gemm(a, b)
    wide = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_allclose(got, wide, rtol=0, atol=1e-4)
    assert (got != wide.astype(np.float32)).mean() > 0.3
    swapped = np.arange(256).reshape(-1, 2)[:, ::-1].ravel()
    np.testing.assert_array_equal(sums.gemm(a[:, swapped], b[:, swapped]), got)  # e + o = o + e
    rotated = np.roll(np.arange(256), 1)
    assert (sums.gemm(a[:, rotated], b[:, rotated]) != got).mean() > 0.1


def test_a_row_does_not_depend_on_the_others() -> None:
    a, b = operands("wide", 70, 90, 700, seed=1)  # larger than one working tile
    x, w = a.astype(np.float32), b.astype(np.float32)
    for f, left, right in [(sums.gemm, a, b), (sums.linear_fp32, x, w)]:
        whole = f(left, right)
        for i in (0, 33, 69):
            np.testing.assert_array_equal(bits(f(left[i : i + 1], right)), bits(whole[i : i + 1]))
        np.testing.assert_array_equal(bits(f(left, right[5:6])), bits(whole[:, 5:6]))


def test_splitting_k_at_a_block_and_continuing_gives_the_same_bits() -> None:
    a, b = operands("ordinary", 6, 7, 160, seed=2)
    halves = sums.gemm(a[:, 64:], b[:, 64:], sums.gemm(a[:, :64], b[:, :64]))
    np.testing.assert_array_equal(bits(halves), bits(sums.gemm(a, b)))


def test_gemm_does_not_write_its_operands() -> None:
    a, b = operands("denormal", 2, 2, 32, seed=2)
    acc = np.full((2, 2), 2.0**-140, np.float32)
    before = [x.tobytes() for x in (a, b, acc)]
    sums.gemm(a, b, acc)
    assert [x.tobytes() for x in (a, b, acc)] == before


def test_nonfinite_values_come_through() -> None:
    a, b = operands("ordinary", 3, 3, 32, seed=2)
    a[0, 3], a[1, 4] = np.inf, np.nan
    b[:, 3] = to_bf16(np.array([1, -1, 0]))
    got = sums.gemm(a, b)
    assert got[0, 0] == np.inf and got[0, 1] == -np.inf and np.isnan(got[0, 2])
    assert np.isnan(got[1]).all() and np.isfinite(got[2]).all()


@pytest.mark.parametrize("shape", [(0, 3, 32), (2, 0, 32), (2, 3, 0)])
def test_empty_operands(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    result = sums.gemm(to_bf16(np.ones((m, k))), to_bf16(np.ones((n, k))))
    np.testing.assert_array_equal(result, np.zeros((m, n), np.float32))
    result = sums.linear_fp32(np.ones((m, k), np.float32), np.ones((n, k), np.float32))
    np.testing.assert_array_equal(result, np.zeros((m, n), np.float32))


# ---- lane sums


def scalar_lane_sum(row: np.ndarray, lanes: int) -> np.float32:
    acc = [np.float32(0)] * lanes
    for i, value in enumerate(row):
        acc[i % lanes] = np.float32(acc[i % lanes] + value)
    while len(acc) > 1:
        half = len(acc) // 2
        acc = [np.float32(acc[i] + acc[i + half]) for i in range(half)]
    return acc[0]


@pytest.mark.parametrize("lanes", [1, 4, 16])
@pytest.mark.parametrize("width", [0, 1, 5, 16, 37, 128])
def test_lane_sum_equals_the_scalar_loop(width: int, lanes: int) -> None:
    x = np.random.default_rng(width).normal(size=(3, 2, width)).astype(np.float32)
    expected = [[scalar_lane_sum(row, lanes) for row in rows] for rows in x]
    np.testing.assert_array_equal(bits(sums.lane_sum(x, lanes)), bits(np.array(expected)))


def test_lane_sum_by_hand() -> None:
    x = np.array([2.0**24, 1, 1, 1, 1], np.float32)
    # lane 0 loses the last 1, lane 0 + lane 2 loses another, then lane 1 + lane 3 = 2 is added
    assert sums.lane_sum(x, 4) == 2.0**24 + 2
    assert sums.lane_sum(x, 1) == 2.0**24
    assert sums.lane_sum(x, 8) == 2.0**24 + 2


@pytest.mark.parametrize("k", [1, 16, 50, 300])
def test_linear_fp32_rounds_products_then_lane_sums(k: int) -> None:
    random = np.random.default_rng(k)
    x = random.normal(size=(5, k)).astype(np.float32)
    w = random.normal(size=(4, k)).astype(np.float32)
    expected = sums.lane_sum(x[:, None] * w[None])
    np.testing.assert_array_equal(bits(sums.linear_fp32(x, w)), bits(expected))
    np.testing.assert_allclose(expected, x.astype(np.float64) @ w.T, atol=1e-4)


def test_misuse_is_named() -> None:
    x = np.zeros((2, 32), np.float32)
    with pytest.raises(DeepInferError, match=r"\(2, 32\) and \(3, 16\), expected \[M, K\]"):
        sums.gemm(x, np.zeros((3, 16), np.float32))
    with pytest.raises(DeepInferError, match=r"shape \(2, 2\), expected \(2, 3\)"):
        sums.gemm(x, np.zeros((3, 32), np.float32), np.zeros((2, 2), np.float32))
    with pytest.raises(DeepInferError, match="12 lanes, expected a power of two"):
        sums.lane_sum(x, 12)
