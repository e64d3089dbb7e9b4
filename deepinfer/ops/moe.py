"""The mixture of experts: router, routed experts, and the sum of a token's experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.ir import Order, op
from deepinfer.numerics.formats import dequantize_fp4, dequantize_fp8, f32, to_bf16
from deepinfer.numerics.functions import silu, softplus
from deepinfer.numerics.sums import GEMM_SUM, gemm
from deepinfer.ops.packed import unpack_e2m1

Array = NDArray[Any]

ROUTE = Order("k chosen experts", "serial", (), "ascending expert id; ties: the lower expert id")
EXPERT = Order("K of each projection", "gemm", GEMM_SUM,
               "each projection to bf16; silu(g)*v, times the weight, in fp32; bf16 at the end")
DOWN = Order("I", "gemm", GEMM_SUM, "bf16 once, at the end")
EXPERT_SUM = Order("experts of a token", "serial", (),
                   "fp32, ascending expert id, the shared expert last; bf16 once, at the end")
GROUP = Order("", "none", (), "stable: ascending expert id, then ascending row")


@op("z:f32[N,E], bias:f32[E], bias_vl:f32[E], image:u8[N] -> idx:i32[N,k], weight:f32[N,k]",
    order=ROUTE)
def route(z: Array, bias: Array, bias_vl: Array, image: Array, *, k: int,
          scale: float) -> tuple[Array, Array]:
    """Choose each token's k experts and their weights.

    s = sqrt(softplus(z)); the k largest s + bias win; weight = s / (sum of the chosen s + 1e-20)
    * scale, where k = 1 skips the division. The bias only chooses.

    Args:
        z: router logits. bias, bias_vl: added for the choice, the second one for image tokens; -inf
            bars an expert as long as k others remain. image: 1 for tokens of an image.
        k: experts per token. scale: routed_scaling_factor.
    Returns: idx, ascending expert ids; weight, in the same order. A NaN counts as -inf in the
        choice, so that the ids are always k different ones.
    Order: the sum runs serially over ascending expert ids. Ties: the lower expert id wins.
    Source: spec §2.8, §11.2.
    """
    score = np.sqrt(softplus(z))
    key = score + np.where(image[:, None] != 0, bias_vl, bias)
    key = np.where(np.isnan(key), np.float32(-np.inf), key)
    best = np.argsort(-key, axis=1, kind="stable")[:, :k]
    idx = np.sort(best, axis=1).astype(np.int32)
    weight = np.take_along_axis(score, idx, axis=1)
    if k > 1:
        total = np.zeros(len(z), np.float32)
        for j in range(k):
            total = total + weight[:, j]
        weight = weight / (total + np.float32(1e-20))[:, None]
    return idx, weight * np.float32(scale)


def _swiglu(g: Array, v: Array, weight: Array, limit: float) -> Array:
    """bf16(weight * (silu(min(g, limit)) * clamp(v))) of the two projections' fp32 sums."""
    g, v, top = f32(to_bf16(g)), f32(to_bf16(v)), np.float32(limit)
    g = np.where(g > top, top, g)  # comparisons, so that a NaN stays one
    v = np.where(v > top, top, v)
    v = np.where(v < -top, -top, v)
    return to_bf16(weight[:, None] * (silu(g) * v))


@op("q:e4m3[N,C], sf:ue8m0[N,C/32], w1:e2m1[E,I,C], s1:ue8m0[E,I,C/32], w3:e2m1[E,I,C], "
    "s3:ue8m0[E,I,C/32], idx:i32[N,K], weight:f32[N,K] -> a:bf16[N*K,I]", order=EXPERT)
def expert_gate_up(q: Array, sf: Array, w1: Array, s1: Array, w3: Array, s3: Array, idx: Array,
                   weight: Array, *, limit: float) -> Array:
    """The first half of the routed experts, scaled by the router's weight.

    a = bf16(weight * (silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit))), both products rounded
    to bf16 first.

    Args:
        q, sf: tokens, of ``quantize_fp8``. w1, s1, w3, s3: gate and up weights of all experts in
            MXFP4.
        idx, weight: of ``route``. limit: swiglu_limit.
    Returns: row n*K + j is token n under its expert idx[n, j].
    Order: DESIGN §5 "cpu GEMM order".
    Source: spec §2.9.
    """
    x, flat, k = dequantize_fp8(q, sf), idx.reshape(-1), idx.shape[1]
    a = np.empty((len(flat), w1.shape[1]), x.dtype)
    for e in np.unique(flat):
        rows = np.flatnonzero(flat == e)
        g = gemm(x[rows // k], dequantize_fp4(w1[e], s1[e], 32))
        v = gemm(x[rows // k], dequantize_fp4(w3[e], s3[e], 32))
        a[rows] = _swiglu(g, v, weight.reshape(-1)[rows], limit)
    return a


@op("q:e4m3[M*K,I], sf:ue8m0[M*K,I/32], w2:e2m1[E,C,I], s2:ue8m0[E,C,I/32], idx:i32[M,K] "
    "-> y:bf16[M*K,C]", order=DOWN)
def expert_down(q: Array, sf: Array, w2: Array, s2: Array, idx: Array) -> Array:
    """The second half of the routed experts: y = w2 a.

    Args:
        q, sf: rows of ``expert_gate_up``, quantised: row n*K + j under expert idx[n, j].
        w2, s2: down weights of all experts, MXFP4. idx: of ``route``.
    Order: DESIGN §5 "cpu GEMM order".
    Source: spec §2.9.
    """
    x, flat = dequantize_fp8(q, sf), idx.reshape(-1)
    y = np.empty((len(flat), w2.shape[1]), x.dtype)
    for e in np.unique(flat):
        rows = np.flatnonzero(flat == e)
        y[rows] = to_bf16(gemm(x[rows], dequantize_fp4(w2[e], s2[e], 32)))
    return y


@op("y:bf16[N*K,C], idx:i32[N,K], shared:bf16[N,C] -> out:bf16[N,C]", order=EXPERT_SUM)
def expert_reduce(y: Array, idx: Array, shared: Array) -> Array:
    """A token's experts added up: out = bf16(((y_0 + y_1) + ...) + shared).

    Args:
        y: rows of ``expert_down``, row n*K + j. idx: of ``route``, ascending, so j ascends with the
            expert id. shared: the shared expert.
    Order: serial, ascending expert id, the shared expert last, in fp32.
    Source: spec §2.9, §11.7.
    """
    n, k = idx.shape
    rows = f32(y).reshape(n, k, y.shape[1])
    total = rows[:, 0]
    for j in range(1, k):
        total = total + rows[:, j]
    return to_bf16(total + f32(shared))


@op("idx:i32[N,K] -> order:i32[N*K], offsets:i32[experts+1]", order=GROUP)
def group_rows(idx: Array, *, experts: int) -> tuple[Array, Array]:
    """Sort the (token, expert) pairs by expert.

    Args:
        idx: of ``route``. experts: number of experts.
    Returns: order, the flat indices n*K + j by ascending expert, then ascending index; offsets,
        expert e owns order[offsets[e]:offsets[e + 1]].
    Source: DESIGN §4 "group expert GEMMs".
    """
    flat = idx.reshape(-1)
    counts = np.bincount(flat, minlength=experts)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return np.argsort(flat, kind="stable").astype(np.int32), offsets.astype(np.int32)


@op("x:bf16[N,C], w1:e2m1[E,B,C/2,32], s1:ue8m0[E,B,C/32,16], w3:e2m1[E,B,C/2,32], "
    "s3:ue8m0[E,B,C/32,16], order:i32[N*K], offsets:i32[E+1], weight:f32[N,K] -> a:bf16[N*K,m]",
    order=EXPERT)
def grouped_gate_up(x: Array, w1: Array, s1: Array, w3: Array, s3: Array, order: Array,
                    offsets: Array, weight: Array, *, m: int, limit: float) -> Array:
    """``expert_gate_up`` on widened tokens and tiled weights, expert by expert.

    Args:
        x: tokens, of ``fake_quantize_fp8``. w1, s1, w3, s3: weights in layout tile16_e2m1.
        order, offsets: of ``group_rows``. weight: of ``route``. m: rows of a weight without the
            padding. limit: swiglu_limit.
    Returns: row n*K + j, as ``expert_gate_up``.
    Order: DESIGN §5 "cpu GEMM order"; a row's bits do not depend on its group.
    Source: spec §2.9.
    """
    k = weight.shape[1]
    a = np.empty((weight.size, m), x.dtype)
    for e in range(len(w1)):
        rows = order[offsets[e]:offsets[e + 1]]
        if len(rows):
            g = gemm(x[rows // k], unpack_e2m1(w1[e], s1[e])[:m])
            v = gemm(x[rows // k], unpack_e2m1(w3[e], s3[e])[:m])
            a[rows] = _swiglu(g, v, weight.reshape(-1)[rows], limit)
    return a


@op("x:bf16[Z,I], w2:e2m1[E,B,I/2,32], s2:ue8m0[E,B,I/32,16], order:i32[Z], offsets:i32[E+1] "
    "-> y:bf16[Z,m]", order=DOWN)
def grouped_down(x: Array, w2: Array, s2: Array, order: Array, offsets: Array, *, m: int) -> Array:
    """``expert_down`` on widened rows and tiled weights, expert by expert.

    Args:
        x: rows of ``grouped_gate_up`` after ``fake_quantize_fp8``. w2, s2: weights in layout
            tile16_e2m1. order, offsets: of ``group_rows``. m: rows of a weight without the padding.
    Order: DESIGN §5 "cpu GEMM order"; a row's bits do not depend on its group.
    Source: spec §2.9.
    """
    y = np.empty((len(x), m), x.dtype)
    for e in range(len(w2)):
        rows = order[offsets[e]:offsets[e + 1]]
        if len(rows):
            y[rows] = to_bf16(gemm(x[rows], unpack_e2m1(w2[e], s2[e])[:m]))
    return y
