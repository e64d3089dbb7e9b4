"""The compressor of ratio-2 layers: two tokens become one latent."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.ir import Order, op
from deepinfer.numerics.formats import to_bf16
from deepinfer.numerics.functions import exp

Array = NDArray[Any]

PAIR = Order("tokens of a group, ascending", "serial", (),
             "softmax weights and products in fp32, bf16 once at the end")


@op("a:f32[N,D], g:f32[N,D], group_rows:i32[G], group_positions:i32[G], group_request:i32[G], "
    "spans:i32[R,4], pending:f32[S,Q,2,D] -> c:bf16[G,D]", order=PAIR)
def compress_pairs(a: Array, g: Array, group_rows: Array, group_positions: Array,
                   group_request: Array, spans: Array, pending: Array) -> Array:
    """Average the two tokens of each group that closes in this step, with a softmax per channel.

    m = max(g0, g1); e_i = exp(g_i - m); c = bf16(e_0/(e_0+e_1) * a_0 + e_1/(e_0+e_1) * a_1),
    where token 1 is the group's row and token 0 the row before it, or what ``pending_write`` kept
    of an earlier step where the request's rows begin with token 1.

    Args:
        a: values, g: gate logits, per row and channel. group_rows: row of the second token of each
            group. group_positions: position of its first token. group_request: index into spans.
        spans: (slot, first row, end row, floor) by request. pending: (a, g) of even position p in
            pending[slot, p // 2 % Q].
    Order: token 0, then token 1; every operation is rounded to fp32.
    Source: spec §2.5.
    """
    slot, first = spans[group_request, 0], spans[group_request, 1]
    inside = (group_rows > first)[:, None]
    before = np.where(group_rows > first, group_rows - 1, 0)
    kept = pending[slot, group_positions // 2 % pending.shape[1]]
    a0 = np.where(inside, a[before], kept[:, 0])
    g0 = np.where(inside, g[before], kept[:, 1])
    a1, g1 = a[group_rows], g[group_rows]
    high = np.where(g0 > g1, g0, g1)
    e0, e1 = exp(g0 - high), exp(g1 - high)
    total = e0 + e1
    return to_bf16((e0 / total) * a0 + (e1 / total) * a1)
