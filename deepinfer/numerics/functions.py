"""Transcendental functions as fixed sequences of IEEE operations, equal in numpy and in C.

libm and numpy's SIMD functions differ between machines, so nothing here calls them. Every function
is one sequence of fp32 `+ - * / sqrt`, comparisons and bit operations, without fused multiply-add;
`targets/cpu/micro/functions.h` is the same sequence in C and must give the same bits. A NaN result
is always the quiet NaN 0x7FC00000. Denormal inputs and results are kept.

The stated errors are the largest over every float32 of the domain, against float64 libm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]

_NAN = np.float32(np.nan)
_INF = np.float32(np.inf)
# Adding and subtracting 1.5*2^23 (1.5*2^52) rounds to the nearest integer, ties to even, and leaves
# that integer in the low bits of the sum: no rounding instruction and no conversion is needed.
_ROUND_F32 = np.float32(12582912.0)
_ROUND_F64 = 6755399441055744.0

# exp(r) = 1 + r + r^2 Q(r) on |r| <= ln(2)/2, relative error 2^-28.2.
_EXP_Q = (0.49999994, 0.166665152, 0.0416680872, 0.00836929586, 0.00138382195)
# 2^r = 1 + r P(r) on |r| <= 1/2, relative error 2^-27.5.
_EXP2_P = (0.693147242, 0.240226552, 0.0555027239, 0.00961706415, 0.00134182395, 0.00015818853)
# log(1+f) = 2 atanh(s), s = f/(2+f): 2s + s z L(z), z = s^2, relative error 2^-30.1.
_LOG_L = (0.666667759, 0.399775088, 0.298741758)
_LOG2_E = 1.44269502
# ln(2) in two parts; the first has 15 significant bits, so n * _LN2_HI is exact for |n| < 512.
_LN2_HI = 0.693145751953125
_LN2_LO = 1.428606765330187e-06
# erf(x) = x + x P(x^2) on |x| < 0.92 (2^-30.1); log(erfc(x)) on [0.92, 3.95] (2^-29.1 of erf).
_ERF_P = (
    0.128379166, -0.376126289, 0.112836257, -0.0268557295, 0.00519239251, -0.000804951473,
    7.99504851e-05,
)  # fmt: skip
_ERFC_LOG = (
    -0.000207032121, -1.12762725, -0.637266099, -0.103855975, 0.0221895371, -0.00303361635,
    0.000194934997,
)  # fmt: skip
_ERF_SPLIT, _ERF_ONE = 0.92, 3.95

# pi/2 in three float64 parts; the first two have 33 bits, so n * part is exact for n < 2^20.
_PIO2 = (1.5707963267341256, 6.077100506303966e-11, 2.0222662487959506e-21)
_TWO_OVER_PI = 0.6366197723675814
_SIN_S = (
    -0.16666666666632143, 0.008333333325344769, -0.00019841263855188826, 2.7555363559845356e-06,
    -2.4762020552943297e-08,
)  # fmt: skip
_COS_C = (
    0.041666666666606754, -0.0013888888878746703, 2.480158114696591e-05, -2.755559474122555e-07,
    2.064930956351029e-09,
)  # fmt: skip
MAX_ANGLE = 1572864.0


def _elementwise(sequence: Callable[[F32], F32]) -> Callable[[ArrayLike], F32]:
    """Give `sequence` float32 coercion, any shape, silence, and the one NaN."""

    @wraps(sequence)
    def apply(x: ArrayLike) -> F32:
        values = np.asarray(x, dtype=np.float32)
        with np.errstate(all="ignore"):
            result = sequence(np.atleast_1d(values))
        return np.where(np.isnan(result), _NAN, result).reshape(values.shape)

    return apply


def _horner(coefficients: tuple[float, ...], x: NDArray[Any]) -> NDArray[Any]:
    """c0 + x (c1 + x (c2 + ...)), each step a rounded product and a rounded sum, in x's type."""
    result = np.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = result * x + x.dtype.type(coefficient)
    return result


def _nearest_integer(x: F32) -> tuple[F32, I32]:
    shifted = x + _ROUND_F32
    return shifted - _ROUND_F32, shifted.view(np.int32) - _ROUND_F32.view(np.int32)


def _times_power_of_two(x: F32, n: I32) -> F32:
    """x * 2^n in two steps, of which only the second can round: denormals come out right."""
    half = n >> 1
    first = ((half + 127) << 23).view(np.float32)
    second = ((n - half + 127) << 23).view(np.float32)
    return (x * first) * second


def _exp(x: F32) -> F32:
    x = np.where(x > 89, np.float32(89), x)
    x = np.where(x < -104, np.float32(-104), x)
    n, n_int = _nearest_integer(x * np.float32(_LOG2_E))
    r = (x - n * np.float32(_LN2_HI)) - n * np.float32(_LN2_LO)
    return _times_power_of_two((r + (r * r) * _horner(_EXP_Q, r)) + np.float32(1), n_int)


def _log(x: F32, u: F32, correction: F32 | np.float32) -> F32:
    """log(u) + correction; x is the result for u = +inf and NaN.

    The correction is ignored there and for u <= 0.
    """
    tiny = u < np.float32(2.0**-126)
    scaled = np.where(tiny, u * np.float32(2.0**23), u)
    # Shift the bits so that the significand is taken in [sqrt(1/2), sqrt(2)).
    bits = scaled.view(np.int32) + np.int32(0x3F800000 - 0x3F3504F3)
    exponent = (bits >> 23) - np.where(tiny, np.int32(127 + 23), np.int32(127))
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).view(np.float32) - np.float32(1)
    e = exponent.astype(np.float32)
    s = f / (f + np.float32(2))
    z = s * s
    half_square = (f * f) * np.float32(0.5)
    small = s * (half_square + z * _horner(_LOG_L, z)) + (e * np.float32(_LN2_LO) + correction)
    result = ((small - half_square) + f) + e * np.float32(_LN2_HI)
    result = np.where(u == 0, -_INF, result)
    result = np.where(u < 0, _NAN, result)
    # +inf is its own logarithm and a NaN its own result.
    return np.where(u < _INF, result, x)


def _log1p(x: F32) -> F32:
    u = x + np.float32(1)
    # The exact rounding error of 1 + x (two-sum), whatever the order of magnitude of x.
    back = u - np.float32(1)
    error = (np.float32(1) - (u - back)) + (x - back)
    return np.where(u == 1, x, _log(x, u, error / u))


def _sigmoid(x: F32) -> F32:
    z = _exp(-np.abs(x))
    result: F32 = np.where(x >= 0, np.float32(1), z) / (z + np.float32(1))
    return result


@_elementwise
def exp2(x: F32) -> F32:
    """2^x.

    Args: x f32, any shape. exp2(-inf) = 0, exp2(x >= 128) = inf; integers give exact powers.
    Accuracy: 1.08 ULP. Source: range reduction to |r| <= 1/2 and a minimax polynomial.
    """
    x = np.where(x > 129, np.float32(129), x)
    x = np.where(x < -151, np.float32(-151), x)
    n, n_int = _nearest_integer(x)
    r = x - n
    return _times_power_of_two(r * _horner(_EXP2_P, r) + np.float32(1), n_int)


@_elementwise
def exp(x: F32) -> F32:
    """e^x.

    Args: x f32, any shape. exp(-inf) = 0 and exp(0) = 1 exactly; above 88.73 inf.
    Accuracy: 0.99 ULP. Source: x = n ln(2) + r in two parts and a minimax polynomial.
    """
    return _exp(x)


@_elementwise
def log(x: F32) -> F32:
    """Natural logarithm.

    Args: x f32, any shape. log(0) = -inf, log(x < 0) = NaN, log(inf) = inf, log(1) = 0.
    Accuracy: 0.84 ULP. Source: significand in [sqrt(1/2), sqrt(2)), 2 atanh(f/(2+f)).
    """
    return _log(x, x, np.float32(0))


@_elementwise
def log1p(x: F32) -> F32:
    """log(1 + x), accurate near 0.

    Args: x f32, any shape. log1p(-1) = -inf, log1p(x < -1) = NaN, log1p(inf) = inf.
    Accuracy: 0.87 ULP. Source: log of the rounded sum plus its rounding error over the sum.
    """
    return _log1p(x)


@_elementwise
def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x), through e^-|x| so that both tails keep their relative accuracy.

    Args: x f32, any shape.
    Accuracy: 2.41 ULP.
    """
    return _sigmoid(x)


@_elementwise
def silu(x: F32) -> F32:
    """x * sigmoid(x), sigmoid rounded to fp32 first; silu(-inf) = NaN, as torch.

    Args: x f32, any shape.
    Accuracy: 3.2 ULP for x >= -87; below, sigmoid is denormal and the error is at most
    |x| * 2^-149.
    """
    return x * _sigmoid(x)


@_elementwise
def softplus(x: F32) -> F32:
    """log(1 + e^x), and x itself above 20, as torch.nn.functional.softplus.

    Args: x f32, any shape.
    Accuracy: 1.71 ULP. Source: spec §2.8 (router score sqrt(softplus)).
    """
    return np.where(x > 20, x, _log1p(_exp(x)))


@_elementwise
def erf(x: F32) -> F32:
    """The error function; erf(+-inf) = +-1, erf(-x) = -erf(x) bit for bit.

    Args: x f32, any shape.
    Accuracy: 1.3 ULP. Source: a polynomial below 0.92, 1 - exp(polynomial) above.
    """
    size = np.abs(x)
    low = np.where(size < np.float32(_ERF_SPLIT), size, np.float32(0))
    near = low + low * _horner(_ERF_P, low * low)
    high = np.where(size > np.float32(_ERF_ONE), np.float32(_ERF_ONE), size)
    far = np.float32(1) - _exp(_horner(_ERFC_LOG, high))
    value: F32 = np.where(size < np.float32(_ERF_SPLIT), near, far)
    return np.where(np.signbit(x), -value, value)


@_elementwise
def rsqrt(x: F32) -> F32:
    """1 / sqrt(x), both correctly rounded: never the processor's estimate.

    Args: x f32, any shape. rsqrt(+0) = inf, rsqrt(x < 0) = NaN, rsqrt(inf) = 0.
    Accuracy: 1.5 ULP.
    """
    root: F32 = np.sqrt(x)
    result: F32 = np.float32(1) / root
    return result


def cos_sin(angle: ArrayLike) -> tuple[F32, F32]:
    """Cosine and sine of an fp32 angle, by float64 operations rounded once to fp32.

    Args: angle f32, any shape, radians. Beyond |angle| = MAX_ANGLE = 1,572,864 the reduction is
    no longer exact: the result is NaN, never a wrong number.
    Returns: (cos f32, sin f32), same shape.
    Accuracy: 0.501 ULP. Source: spec §2.1; reduction by pi/2 in three parts (Cody and Waite).
    """
    values = np.asarray(angle, dtype=np.float32)
    with np.errstate(all="ignore"):
        x: F64 = np.atleast_1d(values).astype(np.float64)
        usable = np.abs(x) <= MAX_ANGLE
        x = np.where(usable, x, 0.0)
        shifted = x * _TWO_OVER_PI + _ROUND_F64
        n = shifted - _ROUND_F64
        quadrant = shifted.view(np.int64) & 3
        r = ((x - n * _PIO2[0]) - n * _PIO2[1]) - n * _PIO2[2]
        z = r * r
        sin_r = r + (r * z) * _horner(_SIN_S, z)
        cos_r = (1.0 - z * 0.5) + (z * z) * _horner(_COS_C, z)
        odd = (quadrant & 1) != 0
        sin = np.where(odd, cos_r, sin_r)
        cos = np.where(odd, sin_r, cos_r)
        sin = np.where((quadrant & 2) != 0, -sin, sin).astype(np.float32)
        cos = np.where(((quadrant + 1) & 2) != 0, -cos, cos).astype(np.float32)
    shape = values.shape
    return (
        np.where(usable, cos, _NAN).reshape(shape),
        np.where(usable, sin, _NAN).reshape(shape),
    )
