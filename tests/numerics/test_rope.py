"""Rotary frequencies against mpmath, and the angles that cos_sin takes."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from deepinfer.errors import DeepInferError
from deepinfer.numerics import functions, rope

RELEASE_YARN = (16.0, 65536, 32.0, 1.0)


def exact_theta(base: float, dims: int, yarn: tuple | None) -> list[mpmath.mpf]:
    theta = [mpmath.power(base, -mpmath.mpf(2 * j) / dims) for j in range(dims // 2)]
    if yarn is None:
        return theta
    factor, length, fast, slow = yarn

    def turns(n: float) -> mpmath.mpf:
        return dims * mpmath.log(length / (2 * mpmath.pi * n)) / (2 * mpmath.log(base))

    low, high = max(mpmath.floor(turns(fast)), 0), min(mpmath.ceil(turns(slow)), dims - 1)
    ramp = [min(max((j - low) / max(high - low, 1e-3), 0), 1) for j in range(dims // 2)]
    return [t * (1 - r) + t / factor * r for t, r in zip(theta, ramp, strict=True)]


@pytest.mark.parametrize(
    ("base", "dims", "yarn"),
    [
        (10000.0, 64, None),
        (160000.0, 64, RELEASE_YARN),
        (160000.0, 16, (4.0, 64, 32.0, 1.0)),
        (10000.0, 2, None),
    ],
)
def test_theta_is_the_nearest_float(base: float, dims: int, yarn: tuple | None) -> None:
    theta = rope.rope_theta(base, dims, yarn)
    assert theta.dtype == np.float32 and theta.shape == (dims // 2,)
    with mpmath.workdps(40):
        for got, exact in zip(theta.tolist(), exact_theta(base, dims, yarn), strict=True):
            distance = abs(got - exact)
            assert distance <= np.spacing(np.float32(got)) * mpmath.mpf("0.5"), (got, exact)


def test_release_ramp_runs_from_15_to_25() -> None:
    plain = rope.rope_theta(160000.0, 64)
    scaled = rope.rope_theta(160000.0, 64, RELEASE_YARN)
    ratio = scaled.astype(np.float64) / plain
    assert (ratio[:16] == 1).all() and (ratio[25:] == 1 / 16).all()
    assert (np.diff(ratio[15:26]) < 0).all()


def test_angles_round_the_position_then_the_product() -> None:
    theta = rope.rope_theta(10000.0, 64)
    positions = np.array([0, 1, 1_048_575, 2**24 + 1], np.int32)
    angles = rope.rope_angles(positions, theta)
    assert angles.dtype == np.float32 and angles.shape == (4, 32)
    expected = np.float32(2**24) * theta[5]  # 2^24 + 1 is not an fp32: it rounds to even
    assert angles[3, 5] == expected
    assert angles[2, 0] == 1_048_575
    assert (angles[0] == 0).all()


def test_rotation_keeps_relative_positions() -> None:
    """cos(a)cos(b) + sin(a)sin(b) depends on a - b only: what RoPE is for."""
    theta = rope.rope_theta(160000.0, 64, RELEASE_YARN)
    cos, sin = functions.cos_sin(rope.rope_angles(np.array([5, 12, 905, 912]), theta))
    near = cos[0] * cos[1] + sin[0] * sin[1]
    far = cos[2] * cos[3] + sin[2] * sin[3]
    np.testing.assert_allclose(near, far, atol=2e-4)


def test_table_holds_the_cos_and_sin_of_every_position() -> None:
    theta = rope.rope_theta(160000.0, 64, RELEASE_YARN)
    table = rope.rope_table(5000, theta)  # longer than one chunk
    assert table.shape == (5000, 64) and table.dtype == np.float32
    for p in (0, 1, 4095, 4096, 4999):
        cos, sin = functions.cos_sin(rope.rope_angles(np.array([p]), theta))
        np.testing.assert_array_equal(table[p, 0::2], cos[0])
        np.testing.assert_array_equal(table[p, 1::2], sin[0])
    with pytest.raises(DeepInferError, match="2000000 positions, expected at most 1572864"):
        rope.rope_table(2_000_000, rope.rope_theta(10000.0, 64))


@pytest.mark.parametrize(("base", "dims"), [(10000.0, 63), (10000.0, 0), (1.0, 64)])
def test_misuse_is_named(base: float, dims: int) -> None:
    with pytest.raises(DeepInferError, match=f"got base {base} and {dims} channels"):
        rope.rope_theta(base, dims)
