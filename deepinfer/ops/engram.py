"""Engram: n-gram hashing of token ids, table lookup, and the gated addition to the streams."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.ir import ELEMENTWISE, Order, op
from deepinfer.numerics import engram
from deepinfer.numerics.formats import decode_e4m3, decode_ue8m0, f32, to_bf16
from deepinfer.numerics.functions import rsqrt, sigmoid
from deepinfer.numerics.sums import LANE_SUM, lane_sum

Array = NDArray[Any]

GATE_SUMS = Order("C", "lane_sum", LANE_SUM,
                  "three sums: x*w*key, x^2, key^2, every product rounded; bf16 once, at the end")


@op("lookback:i32[N,A], image:u8[N], token_map:i32[V] -> rows:i64[N,columns]", order=ELEMENTWISE)
def engram_hash(lookback: Array, image: Array, token_map: Array, *, multipliers: tuple[int, ...],
                primes: tuple[int, ...], heads: int, pad: int, columns: int) -> Array:
    """The Engram table rows that each token reads.

    rho_0 = t_0*m_0; rho_i = rho_{i-1} XOR t_i*m_i (int64, wrapping); column (i-1)*heads + h is
    rho_i mod prime + the sum of the primes before it; t_i is the class of the token i back.

    Args:
        lookback: token ids, newest first; an id outside [0, V), say -1, blocks itself and all older
            ones.
        image: 1 for image tokens, which are blocked from themselves on.
        token_map: class of each token id. multipliers: one per lookback. primes: rows per column.
        heads: columns per n-gram size. pad: the token id whose class stands for a blocked token.
        columns: all columns.
    Source: spec §2.10 "Hash".
    """
    known = (lookback >= 0) & (lookback < len(token_map))
    known[:, 0] &= image == 0
    constants = engram.EngramHash(tuple(multipliers), tuple(primes), int(token_map[pad]))
    assert constants.heads == heads and len(primes) == columns
    return engram.engram_hash(token_map[np.where(known, lookback, 0)], ~known, constants)


@op("rows:i64[N,Q], table:e4m3[T,D], sf:ue8m0[T,D/32] -> e:bf16[N,Q*D]", order=ELEMENTWISE)
def engram_gather(rows: Array, table: Array, sf: Array) -> Array:
    """Look up and dequantise table rows, side by side: e[n, q*D:(q+1)*D] = bf16(table * sf)[row].

    Args:
        rows: of ``engram_hash``. table, sf: e4m3 rows with one scale per 32.
    Source: spec §2.10 "Module".
    """
    n, q = rows.shape
    blocks = decode_e4m3(table[rows]).reshape(n, q, sf.shape[1], 32)
    values = blocks * decode_ue8m0(sf[rows])[..., None]
    return to_bf16(values).reshape(n, q * table.shape[1])


@op("x:bf16[N,H,C], kv:bf16[N,Z], q_weight:bf16[H,C], k_weight:bf16[H,C], image:u8[N] "
    "-> y:bf16[N,H,C]", order=GATE_SUMS)
def engram_gate(x: Array, kv: Array, q_weight: Array, k_weight: Array, image: Array, *,
                eps: float) -> Array:
    """Add the Engram value to each stream, gated by how well the stream fits the Engram key.

    dot = ((sum((x * (q_weight * k_weight)) * key) * 1/sqrt(mean(x^2) + eps))
           * 1/sqrt(mean(key^2) + eps)) * C^-0.5;
    gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot)); y = bf16(x + gate * value).
    Image tokens keep x as it is.

    Args:
        x: streams. kv: [H keys of C channels | one value of C channels], so Z = (H + 1) * C.
        q_weight, k_weight: norm weights per stream. image: 1 for image tokens. eps: added to the
            mean squares (1e-20 in this model).
    Order: each sum over C in 16 lanes, then the tree of ``lane_sum``; one statistic per stream.
    Source: spec §2.10 "Module".
    """
    n, h, c = x.shape
    v, key, value = f32(x), f32(kv[:, :h * c]).reshape(n, h, c), f32(kv[:, None, h * c:])
    dot = lane_sum(v * (f32(q_weight) * f32(k_weight)) * key)
    for part in (v, key):
        dot = dot * rsqrt(lane_sum(part * part) / np.float32(c) + np.float32(eps))
    dot = dot * np.float32(1 / math.sqrt(c))
    size, floor = np.abs(dot), np.float32(1e-6)
    # A comparison that keeps a NaN: its sign bit differs between machines, so it must not choose.
    gate = sigmoid(np.copysign(np.sqrt(np.where(size < floor, floor, size)), dot))
    y = to_bf16(v + gate[..., None] * value)
    return np.where(image[:, None, None] != 0, x, y)
