"""The fused hyper-connection kernels give their reference's bits: all ISA levels, schedules, cuts.

The reference is the composition of the ops' own references, and tests/passes shows that it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepinfer.ops import fused_hyper
from tests.cpu.harness import Array, host_levels, run_kernel
from tests.cpu.test_dense_kernels import BF16, kernel_of, rng, rows, verify

ATTRS: dict[str, Any] = {"hc": 4, "iters": 20, "hc_eps": 1e-6, "eps": 1e-20, "norm_eps": 1e-20,
                         "block": 32}


def enter(n: int, width: int) -> tuple[Array, ...]:
    """Operands of hyper_enter; squares and some products of the first row underflow."""
    g, x = rng(n), rows(n, 4, width)
    x[:1] = np.float32(2.0**-120).astype(BF16)
    fn = (g.standard_normal((24, 4 * width)) * 0.1).astype(np.float32)
    fn[5] = 2.0**-25
    return (x, g.random((n, 4), np.float32), fn, g.standard_normal(24).astype(np.float32),
            np.float32([1, 0.5, 2]), rows(1, width, seed=9)[0])


def post_enter(n: int, width: int) -> tuple[Array, ...]:
    g, (x, *rest) = rng(n + 1), enter(n, width)
    return (rows(n, width, seed=2), x, g.standard_normal((n, 4)).astype(np.float32),
            g.random((n, 4, 4), np.float32), *rest)


# 96 channels have one number of columns to a block, 128 have two; an item is up to four rows.
@pytest.mark.parametrize(("n", "width"), [(1, 96), (3, 96), (17, 96), (6, 128), (0, 96)])
def test_hyper_enter(n: int, width: int) -> None:
    verify(fused_hyper.hyper_enter, enter(n, width), **ATTRS)


@pytest.mark.parametrize(("n", "width"), [(1, 96), (3, 96), (17, 96), (6, 128), (0, 96)])
def test_hyper_post_enter(n: int, width: int) -> None:
    verify(fused_hyper.hyper_post_enter, post_enter(n, width), **ATTRS)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_row_stays_alone(bad: float) -> None:
    op, arrays = fused_hyper.hyper_post_enter, post_enter(6, 96)
    dirty = (arrays[0].copy(), *arrays[1:])
    dirty[0][2, 40] = bad
    keep = [0, 1, 3, 4, 5]
    for isa in host_levels():
        a = run_kernel(op, kernel_of(op.name), arrays, ATTRS, isa=isa)
        b = run_kernel(op, kernel_of(op.name), dirty, ATTRS, isa=isa)
        for good, other in zip(a, b, strict=True):
            assert good[keep].tobytes() == other[keep].tobytes()
            assert good[2].tobytes() != other[2].tobytes()
