"""Ops that stand for several others, bit for bit; passes put them in for targets that have them."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from deepinfer.ir import Order, op
from deepinfer.numerics.sums import GEMM_SUM
from deepinfer.ops.cache import window_write
from deepinfer.ops.gemm import silu_mul
from deepinfer.ops.moe import grouped_gate_up
from deepinfer.ops.packed import packed_linear_fp8
from deepinfer.ops.quant import BLOCK_MAX, fake_quantize_fp8, quantize_fp8
from deepinfer.ops.rope import rope

Array = NDArray[Any]

LINEAR_FP8 = Order("K", "gemm", GEMM_SUM, "bf16, then e4m3 per block")
EXPERT_FP8 = Order("K of each projection", "gemm", GEMM_SUM,
                   "each projection to bf16; silu(g)*v, times the weight, in fp32; bf16, then e4m3 "
                   "per block")
SILU_FP8 = Order("", "none", (), "bf16, then e4m3 per block")


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


@op("x:bf16[N,K*groups], w:e4m3[B,K/2,32], sf:ue8m0[B,K/32] -> y:bf16[N,m]", order=LINEAR_FP8)
def packed_linear_fp8_fake_quant(x: Array, w: Array, sf: Array, *, m: int, groups: int = 1,
                                 block: int = 32) -> Array:
    """``fake_quantize_fp8(packed_linear_fp8(x, w, sf))``, bit for bit.

    Args:
        x, w, sf, m, groups: as ``packed_linear_fp8``. block: elements per scale; m/groups is a
            multiple of it.
    Order: that of ``packed_linear_fp8``; its bf16 rows are what is quantised.
    Source: spec §2.4 "wo_a", §6.3 "act fp8".
    """
    y: Array = fake_quantize_fp8(packed_linear_fp8(x, w, sf, m=m, groups=groups), block=block)
    return y


@op("gate:bf16[N,I], up:bf16[N,I] -> y:bf16[N,I]", order=SILU_FP8)
def silu_mul_fake_quant(gate: Array, up: Array, *, limit: float, block: int = 32) -> Array:
    """``fake_quantize_fp8(silu_mul(gate, up))``, bit for bit.

    Args:
        gate, up, limit: as ``silu_mul``. block: elements per scale.
    Source: spec §2.9, §6.3 "act fp8".
    """
    y: Array = fake_quantize_fp8(silu_mul(gate, up, limit=limit), block=block)
    return y


@op("x:bf16[N,C], w1:e2m1[E,B,C/2,32], s1:ue8m0[E,B,C/32,16], w3:e2m1[E,B,C/2,32], "
    "s3:ue8m0[E,B,C/32,16], order:i32[N*K], offsets:i32[E+1], weight:f32[N,K] -> a:bf16[N*K,m]",
    order=EXPERT_FP8)
def grouped_gate_up_fake_quant(x: Array, w1: Array, s1: Array, w3: Array, s3: Array, order: Array,
                               offsets: Array, weight: Array, *, m: int, limit: float,
                               block: int = 32) -> Array:
    """``fake_quantize_fp8(grouped_gate_up(x, ...))``, bit for bit.

    Args:
        x, w1, s1, w3, s3, order, offsets, weight, m, limit: as ``grouped_gate_up``.
        block: elements per scale; m is a multiple of it.
    Order: that of ``grouped_gate_up``; its bf16 rows are what is quantised.
    Source: spec §2.9, §6.3 "act fp8".
    """
    rows = grouped_gate_up(x, w1, s1, w3, s3, order, offsets, weight, m=m, limit=limit)
    y: Array = fake_quantize_fp8(rows, block=block)
    return y
