"""Ops that stand for several others, bit for bit; passes put them in for targets that have them."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from deepinfer.ir import op
from deepinfer.ops.cache import window_write
from deepinfer.ops.quant import BLOCK_MAX, quantize_fp8
from deepinfer.ops.rope import rope

Array = NDArray[Any]


@op("x:bf16[N,D], positions:i32[N], table:f32[L,B], request:i32[N], spans:i32[R,4], "
    "!ring:e4m3[S,W,D], !ring_sf:ue8m0[S,W,D/block] -> q:e4m3[N,D], sf:ue8m0[N,D/block]",
    order=BLOCK_MAX)
def rope_window_write(x: Array, positions: Array, table: Array, request: Array, spans: Array,
                      ring: Array, ring_sf: Array, *, block: int = 32) -> tuple[Array, Array]:
    """``q, sf = quantize_fp8(rope(x))``, then ``window_write`` of both, without a row in between.

    Args:
        x: keys of one head, before rotation. positions: of the rows. table: as ``rope``.
        request, spans, ring, ring_sf: as ``window_write``. block: elements per scale.
    Source: spec §2.1, §2.4, §6.3 "window KV".
    """
    q, sf = quantize_fp8(rope(x, positions, table, heads=1), block=block)
    window_write(q, sf, positions, request, spans, ring, ring_sf)
    return q, sf
