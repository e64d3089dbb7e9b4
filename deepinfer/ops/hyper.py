"""Hyper-connections: several residual streams, mixed by per-row weights ("SinglePass mHC")."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.ir import ELEMENTWISE, Order, op
from deepinfer.numerics.formats import f32, to_bf16
from deepinfer.numerics.functions import exp, rsqrt, sigmoid
from deepinfer.numerics.sums import LANE_SUM, lane_sum, linear_fp32

Array = NDArray[Any]

MIX = Order("C*hc, then streams", "lane_sum", LANE_SUM,
            "products and sums in fp32, no FMA; Sinkhorn sums serial, ascending")
STREAMS = Order("streams", "serial", (), "products and sums in fp32, no FMA; bf16 at the end")


@op("x:bf16[N,C] -> y:bf16[N,copies,C]", order=ELEMENTWISE)
def hyper_expand(x: Array, *, copies: int) -> Array:
    """Start the residual streams: every stream is a copy of x, without scaling.

    Args:
        x: embedded rows. copies: number of streams (hc_mult).
    Source: spec §2.2.
    """
    return np.repeat(x[:, None, :], copies, axis=1)


@op("tokens:i32[N] -> pre:f32[N,copies]", order=ELEMENTWISE)
def hyper_start(tokens: Array, *, copies: int) -> Array:
    """The collapse weights that the first sublayer is handed: (1, 0, 0, ...) for every row.

    Args:
        tokens: only its length matters. copies: number of streams (hc_mult).
    Source: spec §2.2.
    """
    pre = np.zeros((len(tokens), copies), np.float32)
    pre[:, 0] = 1
    return pre


@op("x:bf16[N,hc,C], fn:f32[M,C*hc], base:f32[M], scale:f32[3] "
    "-> pre:f32[N,hc], post:f32[N,hc], comb:f32[N,hc,hc]", order=MIX)
def hyper_mix(x: Array, fn: Array, base: Array, scale: Array, *, hc: int, iters: int,
              hc_eps: float, eps: float) -> tuple[Array, Array, Array]:
    """The three mixing weights of one sublayer, computed from all streams of a row.

    v = flatten(x), stream-major; rho = 1/sqrt(sum(v^2)/(hc*C) + eps); m = (fn v) * rho.
    pre_j = sigmoid(m_j*scale_0 + base_j) + hc_eps; post_j = 2*sigmoid(m_(hc+j)*scale_1 + base);
    comb = Sinkhorn(m_(2hc+j*hc+k)*scale_2 + base): softmax over k plus hc_eps, columns divided by
    (their sum + hc_eps), then iters-1 times rows and columns so. It ends on columns.

    Args:
        x: residual streams. fn: mixing matrix, M = (2+hc)*hc rows. base: bias per mix.
        scale: one factor each for pre, post and comb. hc: number of streams.
        iters: Sinkhorn steps (20). hc_eps, eps: see the formula.
    Order: ``linear_fp32`` over C*hc, the product with rho after it; the sum of squares by
        ``lane_sum``; softmax subtracts the maximum; Sinkhorn sums are serial from the first
        element, ascending, then + hc_eps.
    Source: spec §2.3.
    """
    one = np.float32(hc_eps)
    v = f32(x).reshape(len(x), hc * x.shape[2])
    rho = rsqrt(lane_sum(v * v) / np.float32(v.shape[1]) + np.float32(eps))
    m = linear_fp32(v, fn) * rho[:, None]
    pre = sigmoid(m[:, :hc] * scale[0] + base[:hc]) + one
    post = np.float32(2) * sigmoid(m[:, hc:2 * hc] * scale[1] + base[hc:2 * hc])
    c = (m[:, 2 * hc:] * scale[2] + base[2 * hc:]).reshape(-1, hc, hc)
    top = c[:, :, 0]
    for k in range(1, hc):
        top = np.where(c[:, :, k] > top, c[:, :, k], top)
    c = exp(c - top[:, :, None])
    c = c / _serial_sum(c, 2)[:, :, None] + one
    c = c / (_serial_sum(c, 1) + one)[:, None, :]
    for _ in range(iters - 1):
        c = c / (_serial_sum(c, 2) + one)[:, :, None]
        c = c / (_serial_sum(c, 1) + one)[:, None, :]
    return pre, post, c


def _serial_sum(c: Array, axis: int) -> Array:
    """Sum of f32[N,hc,hc] over one of the last two axes, ascending from its first element."""
    parts = np.moveaxis(c, axis, 0)
    total: Array = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@op("x:bf16[N,H,C], pre:f32[N,H] -> y:bf16[N,C]", order=STREAMS)
def hyper_collapse(x: Array, pre: Array) -> Array:
    """The weighted sum of the streams that a sublayer reads: y = bf16(sum_c pre_c * x_c).

    Args:
        x: residual streams. pre: weight per stream.
    Order: serial over streams, ascending, from the product of stream 0.
    Source: spec §2.3 "hc_pre".
    """
    v = f32(x)
    acc: Array = pre[:, 0, None] * v[:, 0]
    for c in range(1, v.shape[1]):
        acc = acc + pre[:, c, None] * v[:, c]
    return to_bf16(acc)


@op("y:bf16[N,C], x:bf16[N,H,C], post:f32[N,H], comb:f32[N,H,H] -> out:bf16[N,H,C]", order=STREAMS)
def hyper_post(y: Array, x: Array, post: Array, comb: Array) -> Array:
    """Put a sublayer's output back on the streams: out_c = bf16(post_c*y + sum_d comb_dc * x_d).

    The sum is over the first index of comb.

    Args:
        y: the sublayer's output. x: the streams it was computed from. post: weight of y per
        stream. comb: weight of old stream d in new stream c.
    Order: post_c*y first, then old streams ascending; each product is rounded.
    Source: spec §2.3 "hc_post".
    """
    v, u = f32(x), f32(y)
    acc: Array = post[:, :, None] * u[:, None, :]
    for d in range(v.shape[1]):
        acc = acc + comb[:, d, :, None] * v[:, d, None, :]
    return to_bf16(acc)


@op("x:bf16[N,H,C] -> y:bf16[N,C]", order=STREAMS)
def hyper_mean(x: Array) -> Array:
    """The mean over the streams, a tap for the draft module: y = bf16((sum_c x_c) / H).

    Args:
        x: residual streams.
    Order: serial over streams, ascending, from stream 0.
    Source: spec §2.2 "tap_l".
    """
    v = f32(x)
    acc: Array = v[:, 0]
    for c in range(1, v.shape[1]):
        acc = acc + v[:, c]
    return to_bf16(acc / np.float32(v.shape[1]))


@op("x:bf16[N,H,C], rows:i32[K] -> y:bf16[K,H,C]", order=ELEMENTWISE)
def hyper_gather(x: Array, rows: Array) -> Array:
    """Pick rows of the streams: y[i] = x[rows[i]].

    Args:
        x: residual streams. rows: indices in [0, N).
    Source: spec §4.1; only rows kept by a replayed prefill go on after the cut.
    """
    return x[rows]
