"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.ir import ELEMENTWISE, op
from deepinfer.numerics.formats import f32, to_bf16

Array = NDArray[Any]


@op("x:bf16[N,C], positions:i32[N], table:f32[L,D] -> y:bf16[N,C]", order=ELEMENTWISE)
def rope(x: Array, positions: Array, table: Array, *, heads: int, inverse: bool = False) -> Array:
    """Rotate the last D channels of each head by the row's position; the others are copied.

    Adjacent channels (a, b) become (a*cos - b*sin, a*sin + b*cos); ``inverse`` negates sin.
    fp32: each product is rounded, then the sum, then bf16.

    Args:
        x: rows of ``heads`` heads. positions: absolute positions, in [0, L).
        table: table[p] = cos_0, sin_0, cos_1, sin_1, ... of position p.
        heads: C = heads * (channels of a head). inverse: rotate back (attention outputs).
    Source: spec §2.1.
    """
    rows, width = table[positions], table.shape[1]
    cos, sin = rows[:, None, 0::2], rows[:, None, 1::2]
    if inverse:
        sin = -sin
    y = x.reshape(len(x), heads, x.shape[1] // heads).copy()
    v = f32(y[:, :, -width:])
    a, b = v[:, :, 0::2], v[:, :, 1::2]
    v = np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    y[:, :, -width:] = to_bf16(v.reshape(len(x), heads, width))
    return y.reshape(x.shape)
