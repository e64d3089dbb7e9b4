"""Linear layers in the cpu GEMM order, and the small row ops between them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.errors import IRError
from deepinfer.ir import ELEMENTWISE, Order, op
from deepinfer.numerics.formats import (
    dequantize_fp4,
    dequantize_fp8,
    dequantize_fp8_tile,
    f32,
    to_bf16,
)
from deepinfer.numerics.functions import silu
from deepinfer.numerics.sums import GEMM_SUM, gemm

Array = NDArray[Any]

GEMM = Order("K", "gemm", GEMM_SUM,
             "fused multiply-adds, denormals flushed; bf16 once, at the end")


def rounded(y: Array, out: str) -> Array:
    """fp32 sums as the attribute ``out`` of a linear wants them: "f32", or rounded to "bf16"."""
    return to_bf16(y) if out == "bf16" else y


@op("x:bf16[N,K], w:bf16[M,K] -> y:$out[N,M]", order=GEMM)
def linear(x: Array, w: Array, *, out: str = "bf16") -> Array:
    """y = x w^T with a bf16 weight.

    Args:
        x: rows. w: weight, one row per output. out: "bf16", or "f32" to keep the fp32 sum.
    Order: DESIGN §5 "cpu GEMM order".
    Source: spec §2.0.
    """
    return rounded(gemm(x, w), out)


@op("q:e4m3[N,K], sf:ue8m0[N,K/32], w:e4m3[M,K], ws:ue8m0[M/32,K/32] -> y:$out[N,M]", order=GEMM)
def linear_fp8(q: Array, sf: Array, w: Array, ws: Array, *, out: str = "bf16") -> Array:
    """y = x w^T of an activation in e4m3 per 32 and a weight in e4m3 per 32x32.

    Both dequantise exactly to bf16, so the scales may be applied before the sum.

    Args:
        q, sf: codes and scales of ``quantize_fp8``. w, ws: weight and one scale per 32x32 tile.
        out: "bf16", or "f32" to keep the fp32 sum.
    Order: DESIGN §5 "cpu GEMM order".
    Source: spec §2.0 "Lin8".
    """
    return rounded(gemm(dequantize_fp8(q, sf), dequantize_fp8_tile(w, ws)), out)


@op("q:e4m3[N,K], sf:ue8m0[N,K/32], w:e2m1[M,K], ws:ue8m0[M,K/32] -> y:$out[N,M]", order=GEMM)
def linear_fp4(q: Array, sf: Array, w: Array, ws: Array, *, out: str = "bf16") -> Array:
    """y = x w^T of an activation in e4m3 per 32 and a weight in e2m1 per 32 (MXFP4).

    Args:
        q, sf: codes and scales of ``quantize_fp8``. w, ws: weight and one scale per 32 along K.
        out: "bf16", or "f32" to keep the fp32 sum.
    Order: DESIGN §5 "cpu GEMM order".
    Source: spec §2.0 "Lin4".
    """
    return rounded(gemm(dequantize_fp8(q, sf), dequantize_fp4(w, ws, 32)), out)


@op("x:bf16[N,K], w:e4m3[M,K], ws:ue8m0[M/32,K/32] -> y:$out[N,M]", order=GEMM)
def wide_linear_fp8(x: Array, w: Array, ws: Array, *, out: str = "bf16") -> Array:
    """``linear_fp8`` on an activation that is already widened to bf16.

    Args:
        x: rows, of ``fake_quantize_fp8``. w, ws: weight and one scale per 32x32 tile.
        out: "bf16", or "f32" to keep the fp32 sum.
    Order: DESIGN §5 "cpu GEMM order".
    Source: spec §2.0 "Lin8".
    """
    return rounded(gemm(x, dequantize_fp8_tile(w, ws)), out)


@op("x:bf16[N,K], w:e2m1[M,K], ws:ue8m0[M,K/32] -> y:$out[N,M]", order=GEMM)
def wide_linear_fp4(x: Array, w: Array, ws: Array, *, out: str = "bf16") -> Array:
    """``linear_fp4`` on an activation that is already widened to bf16.

    Args:
        x: rows, of ``fake_quantize_fp8``. w, ws: weight and one scale per 32 along K.
        out: "bf16", or "f32" to keep the fp32 sum.
    Order: DESIGN §5 "cpu GEMM order".
    Source: spec §2.0 "Lin4".
    """
    return rounded(gemm(x, dequantize_fp4(w, ws, 32)), out)


def _by_group(x: Array, w: Array, groups: int, who: str) -> Array:
    """Group g's columns of x times group g's rows of the bf16 weight, side by side: f32[N,M]."""
    k, m = w.shape[1], w.shape[0]
    if x.shape[1] != groups * k or m % groups:
        raise IRError(f"x has {x.shape[1]} columns and w is [{m}, {k}], expected groups*K = "
                      f"{groups * k} columns and a multiple of {groups} rows", where=f"op {who}",
                      next="give as many groups as the weight was made for")
    rows = m // groups
    return np.concatenate([gemm(x[:, g * k:(g + 1) * k], w[g * rows:(g + 1) * rows])
                           for g in range(groups)], axis=1)


@op("x:bf16[N,C], w:e4m3[M,K], ws:ue8m0[M/32,K/32] -> y:bf16[N,M]", order=GEMM)
def grouped_linear_fp8(x: Array, w: Array, ws: Array, *, groups: int) -> Array:
    """One linear per group of channels: y_g = x_g w_g^T, the activation in bf16 (no fp8).

    Args:
        x: rows, C = groups * K; group g is columns g*K to (g+1)*K.
        w, ws: weight and scales per 32x32; group g is rows g*M/groups to (g+1)*M/groups.
        groups: number of groups (o_groups).
    Order: DESIGN §5 "cpu GEMM order".
    Raises: IRError if C or M does not fit the groups.
    Source: spec §2.4 "wo_a".
    """
    return to_bf16(_by_group(x, dequantize_fp8_tile(w, ws), groups, "grouped_linear_fp8"))


@op("gate:bf16[N,I], up:bf16[N,I] -> y:bf16[N,I]", order=ELEMENTWISE)
def silu_mul(gate: Array, up: Array, *, limit: float) -> Array:
    """The clamped SwiGLU: y = bf16(silu(min(gate, limit)) * clamp(up, -limit, limit)), in fp32.

    Args:
        gate, up: the two projections. limit: swiglu_limit.
    Source: spec §2.9.
    """
    g, u, top = f32(gate), f32(up), np.float32(limit)
    g = np.where(g > top, top, g)  # comparisons, so that a NaN stays one
    u = np.where(u > top, top, u)
    u = np.where(u < -top, -top, u)
    return to_bf16(silu(g) * u)


@op("a:t[N,A], b:t[N,B] -> y:t[N,A+B]", order=ELEMENTWISE)
def concat(a: Array, b: Array) -> Array:
    """The channels of a, then those of b.

    Args:
        a, b: rows of one dtype.
    Source: spec §2.2 "main_hidden".
    """
    return np.concatenate([a, b], axis=1)


@op("x:t[N,C], rows:i32[Q] -> y:t[Q,C]", order=ELEMENTWISE)
def gather_rows(x: Array, rows: Array) -> Array:
    """Pick rows: y[i] = x[rows[i]].

    Args:
        x: rows. rows: indices in [0, N).
    Source: spec §2.2; only sampled rows reach the head.
    """
    return x[rows]
