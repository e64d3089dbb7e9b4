"""The fixed sequences: accuracy against mpmath, special values, numpy = C bit for bit."""

from __future__ import annotations

import re

import mpmath
import numpy as np
import pytest

from deepinfer.numerics import functions

NAMES = ("exp2", "exp", "log", "log1p", "sigmoid", "silu", "softplus", "erf", "rsqrt")
SOURCE = """#include "functions.h"
static inline float cos_of(float x) { float c, s; di_cos_sin(x, &c, &s); return c; }
static inline float sin_of(float x) { float c, s; di_cos_sin(x, &c, &s); return s; }
"""
SIGNATURES = {f"di_{name}": "float->float" for name in NAMES}
SIGNATURES |= {"cos_of": "float->float", "sin_of": "float->float"}

EXACT = {
    "exp2": lambda x: mpmath.power(2, x),
    "exp": mpmath.exp,
    "log": mpmath.log,
    "log1p": mpmath.log1p,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "softplus": lambda x: mpmath.log1p(mpmath.exp(x)),
    "erf": mpmath.erf,
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
}
# Where the tested inputs lie: (lowest, highest), both excluded.
DOMAINS = {
    "exp2": (-151, 128),
    "exp": (-105, 88.8),
    "log": (0, 3.4e38),
    "log1p": (-1, 3.4e38),
    "sigmoid": (-105, 30),
    "silu": (-87, 30),
    "softplus": (-105, 20),
    "erf": (-5, 5),
    "rsqrt": (0, 3.4e38),
}


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def ulp_error(got: np.ndarray, exact: list[mpmath.mpf]) -> float:
    """The largest |got - exact| in units of the last place of an fp32 of exact's size."""
    worst = 0.0
    for value, truth in zip(got.tolist(), exact, strict=True):
        exponent = max(int(mpmath.frexp(truth)[1]), -125) if truth else -125
        worst = max(worst, float(abs(value - truth) / mpmath.mpf(2) ** (exponent - 24)))
    return worst


def inputs(lowest: float, highest: float, count: int = 1500) -> np.ndarray:
    """Evenly spaced values, evenly spread exponents and values near +-1, inside the domain."""
    random = np.random.default_rng(7)
    even = random.uniform(lowest, min(highest, 1e4), count // 2)
    by_exponent = np.exp2(random.uniform(-149, 128, 4 * count)) * random.choice([-1, 1], 4 * count)
    near_one = 1 + random.uniform(-1e-3, 1e-3, 100)
    x = np.concatenate([even, by_exponent, near_one, -near_one]).astype(np.float32)
    x = x[(x > np.float32(lowest)) & (x < np.float32(highest)) & (x != 0)]
    return x[: count // 2 + count]


def all_kinds(count: int = 220_000) -> np.ndarray:
    """Random bit patterns (every exponent, denormals, NaNs), moderate values and special ones."""
    random = np.random.default_rng(11)
    patterns = random.integers(0, 2**32, count // 2, np.uint32).view(np.float32)
    moderate = random.uniform(-120, 140, count // 4).astype(np.float32)
    small = random.normal(0, 1, count // 4).astype(np.float32)
    denormal = random.integers(0, 2**23, 2000, np.uint32).view(np.float32)
    edges = np.array(
        [0, 1, 0.5, 0.92, 2, 3.95, 20, 87, 88.72284, 89, 103.97, 104, 126, 127, 128, 149, 150, 151]
        + [np.sqrt(0.5), np.sqrt(2), 2.0**-126, 2.0**-149, 3.4028235e38, np.inf, np.nan],
        np.float32,
    )
    with np.errstate(over="ignore"):
        up = np.nextafter(edges, np.float32(np.inf))
    edges = np.concatenate([edges, np.nextafter(edges, np.float32(0)), up])
    signalling = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    x = np.concatenate([patterns, moderate, small, denormal, edges, signalling])
    return np.concatenate([x, -denormal, -edges])


@pytest.mark.parametrize("name", NAMES)
def test_error_is_within_the_bound_that_the_docstring_states(name: str) -> None:
    function = getattr(functions, name)
    stated = re.search(r"Accuracy: ([0-9.]+) ULP", function.__doc__)
    assert stated, f"{name} states no accuracy"
    x = inputs(*DOMAINS[name])
    assert x.size > 1000
    with mpmath.workdps(30):
        exact = [EXACT[name](mpmath.mpf(v)) for v in x.tolist()]
    error = ulp_error(function(x), exact)
    assert 0.3 < error <= float(stated[1]), error


@pytest.mark.parametrize("name", NAMES)
def test_numpy_and_c_agree_bitwise(micro, name: str) -> None:
    x = all_kinds()
    assert x.size >= 200_000 and np.isnan(x).any() and np.isinf(x).any()
    reference = getattr(functions, name)(x)
    compiled = micro.call(f"di_{name}", np.float32, x)
    different = np.flatnonzero(bits(reference) != bits(compiled))
    assert not different.size, [(x[i], reference[i], compiled[i]) for i in different[:5]]


def test_cos_sin_numpy_and_c_agree_bitwise(micro) -> None:
    angles = np.random.default_rng(5).uniform(-1.6e6, 1.6e6, 100_000).astype(np.float32)
    x = np.concatenate([all_kinds(), angles])
    cos, sin = functions.cos_sin(x)
    np.testing.assert_array_equal(bits(cos), bits(micro.call("cos_of", np.float32, x)))
    np.testing.assert_array_equal(bits(sin), bits(micro.call("sin_of", np.float32, x)))


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_result_is_always_the_same_nan(name: str) -> None:
    patterns = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32)
    assert (bits(getattr(functions, name)(patterns.view(np.float32))) == 0x7FC00000).all()
    if name in ("log", "log1p", "rsqrt"):
        assert bits(getattr(functions, name)(np.float32(-2))) == 0x7FC00000


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("exp", -np.inf, 0.0), ("exp", np.inf, np.inf), ("exp", 0, 1), ("exp", 1e30, np.inf),
        ("exp", -1e30, 0.0), ("exp", -103.9, 2.0**-149), ("exp2", -np.inf, 0.0),
        ("exp2", np.inf, np.inf), ("exp2", 128, np.inf), ("exp2", -149, 2.0**-149),
        ("exp2", -150, 0.0), ("exp2", 127, 2.0**127), ("exp2", -126, 2.0**-126),
        ("log", 0, -np.inf), ("log", -0.0, -np.inf), ("log", np.inf, np.inf), ("log", 1, 0.0),
        ("log1p", -1, -np.inf), ("log1p", np.inf, np.inf), ("log1p", 2.0**-149, 2.0**-149),
        ("log1p", -0.0, -0.0), ("sigmoid", 0, 0.5), ("sigmoid", np.inf, 1),
        ("sigmoid", -np.inf, 0.0), ("silu", np.inf, np.inf), ("silu", 0, 0.0),
        ("silu", -np.inf, np.nan), ("softplus", -np.inf, 0.0), ("softplus", np.inf, np.inf),
        ("softplus", 20.5, 20.5), ("erf", np.inf, 1), ("erf", -np.inf, -1), ("erf", -0.0, -0.0),
        ("erf", 10, 1), ("rsqrt", 0, np.inf), ("rsqrt", np.inf, 0.0), ("rsqrt", 4, 0.5),
    ],
)  # fmt: skip
def test_special_values(name: str, x: float, expected: float) -> None:
    result = getattr(functions, name)(np.float32(x))
    assert result.dtype == np.float32 and result.shape == ()
    assert bits(result) == bits(np.float32(expected))


def test_exp2_of_every_integer_is_exact() -> None:
    n = np.arange(-149, 128)
    np.testing.assert_array_equal(functions.exp2(n), np.ldexp(1.0, n).astype(np.float32))


def test_shape_and_input_are_kept() -> None:
    x = np.full((2, 0, 3), 1, np.float32)
    assert functions.exp(x).shape == (2, 0, 3)
    y = np.array([[-1.5, 2.0]], np.float32)
    functions.log1p(y)
    assert y.tolist() == [[-1.5, 2.0]]


def test_cos_sin_is_within_one_ulp_up_to_a_million_positions() -> None:
    random = np.random.default_rng(3)
    x = np.concatenate([
        random.uniform(-1.1e6, 1.1e6, 1500),
        random.uniform(-8, 8, 500),
        # The floats nearest to multiples of pi/2, where the reduction cancels most.
        random.integers(1, 700_000, 1500) * (np.pi / 2),
        [1_048_576, 1_100_000, 1e-30, 2.0**-149, 0.0],
    ]).astype(np.float32)  # fmt: skip
    cos, sin = functions.cos_sin(x)
    with mpmath.workdps(40):
        assert ulp_error(cos, [mpmath.cos(v) for v in x.tolist()]) < 0.501
        assert ulp_error(sin, [mpmath.sin(v) for v in x.tolist()]) < 0.501


def test_cos_sin_outside_its_domain_is_nan_not_a_wrong_number() -> None:
    limit = np.float32(functions.MAX_ANGLE)
    x = np.array([limit, np.nextafter(limit, np.float32(np.inf)), -3e6, np.inf, np.nan], np.float32)
    for result in functions.cos_sin(x):
        assert np.isnan(result).tolist() == [False, True, True, True, True]
