"""Rotary frequencies and angles, from integers and exact decimals: the same bits everywhere."""

from __future__ import annotations

import decimal
from decimal import Decimal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.errors import DeepInferError
from deepinfer.numerics.functions import MAX_ANGLE, cos_sin

F32 = NDArray[np.float32]

_PI = Decimal("3.14159265358979323846264338327950288419716939937510")
_TABLE_CHUNK = 4096  # positions at a time: the float64 intermediates stay small


def _round_f32(x: Decimal) -> float:
    """The float32 nearest to x: one rounding, where float(x) followed by float32 would be two."""
    near = np.float32(float(x))
    around = (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf)))
    return float(min(around, key=lambda c: abs(Decimal(float(c)) - x)))


def rope_theta(
    base: float, rope_dims: int, yarn: tuple[float, int, float, float] | None = None
) -> F32:
    """Rotation per position of each channel pair, theta_j = base^(-2j/R), rounded once to fp32.

    With yarn = (factor, L0, beta_fast, beta_slow):
    c(n) = R ln(L0 / (2 pi n)) / (2 ln base), low = max(floor(c(beta_fast)), 0),
    high = min(ceil(c(beta_slow)), R - 1), ramp_j = clamp((j - low) / max(high - low, 1e-3), 0, 1),
    theta'_j = theta_j (1 - ramp_j) + (theta_j / factor) ramp_j.

    Method: 50-digit `decimal` arithmetic, whose ln and exp are correctly rounded by specification;
    libm takes no part.

    Args:
        base: rope_theta or compress_rope_theta of config.json.
        rope_dims: R, even, the number of rotated channels.
        yarn: (factor, original_max_position_embeddings, beta_fast, beta_slow), or None.
    Returns: f32[R/2], radians per position.
    Raises: DeepInferError for a base or a number of channels that has no rotation.
    Source: spec §2.1.
    """
    if rope_dims <= 0 or rope_dims % 2 or not base > 1:
        raise DeepInferError(
            f"RoPE needs a base above 1 and an even number of channels, "
            f"got base {base} and {rope_dims} channels",
            where="rope_theta",
            next="check rope_theta and qk_rope_head_dim in config.json",
        )
    with decimal.localcontext(decimal.Context(prec=50)):
        log_base = Decimal(base).ln()
        theta = [(-log_base * 2 * j / rope_dims).exp() for j in range(rope_dims // 2)]
        if yarn is not None:
            factor, length, beta_fast, beta_slow = (Decimal(part) for part in yarn)

            def pair_with_turns(turns: Decimal) -> Decimal:
                return rope_dims * (length / (2 * _PI * turns)).ln() / (2 * log_base)

            low = max(pair_with_turns(beta_fast).to_integral_value(decimal.ROUND_FLOOR), Decimal(0))
            high = min(
                pair_with_turns(beta_slow).to_integral_value(decimal.ROUND_CEILING),
                Decimal(rope_dims - 1),
            )
            width = max(high - low, Decimal("0.001"))
            for j, unscaled in enumerate(theta):
                ramp = min(max((j - low) / width, Decimal(0)), Decimal(1))
                theta[j] = unscaled * (1 - ramp) + unscaled / factor * ramp
        return np.array([_round_f32(value) for value in theta], np.float32)


def rope_angles(positions: ArrayLike, theta: F32) -> F32:
    """fp32(p) * theta_j, rounded to fp32: the angle that `functions.cos_sin` takes.

    Args:
        positions: i32[N], absolute token positions.
        theta: f32[R/2], from `rope_theta`.
    Returns: f32[N,R/2], radians.
    Source: spec §2.1, DESIGN §5.
    """
    rows: F32 = np.asarray(positions, np.int32).astype(np.float32)
    return rows[:, None] * np.asarray(theta, np.float32)[None, :]


def rope_table(rows: int, theta: F32) -> F32:
    """The table that op ``rope`` reads: table[p] = cos_0, sin_0, cos_1, sin_1, ... of position p.

    Args:
        rows: number of positions, from 0; the largest angle must stay below `MAX_ANGLE`.
        theta: f32[R/2], from `rope_theta`.
    Returns: f32[rows, R].
    Raises: DeepInferError for more rows than `cos_sin` has exact angles for.
    Source: spec §2.1, DESIGN §5.
    """
    if rows > MAX_ANGLE:
        raise DeepInferError(
            f"a RoPE table of {rows} positions, expected at most {int(MAX_ANGLE)}",
            where="rope_table",
            next="lower max_model_len",
        )
    table = np.empty((rows, 2 * len(theta)), np.float32)
    for start in range(0, rows, _TABLE_CHUNK):
        stop = min(start + _TABLE_CHUNK, rows)
        cos, sin = cos_sin(rope_angles(np.arange(start, stop), theta))
        table[start:stop, 0::2], table[start:stop, 1::2] = cos, sin
    return table
