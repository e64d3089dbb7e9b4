"""Attention with a sink over window keys and selected compressed entries; K and V are one vector.

Every row attends to *tiles* of 64 keys in a fixed order: the window in tiles of absolute positions
64t..64t+63, ascending, wherever a key is stored; then the selected entries in tiles of ranks
64u..64u+63 of the row's own selection. Keys a row does not see take part as zeros with probability
+0. So prefill, any chunking, decode and verify give a row the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.ir import Order, op
from deepinfer.numerics.formats import BF16, dequantize_fp4, dequantize_fp8, to_bf16
from deepinfer.numerics.functions import exp
from deepinfer.numerics.sums import GEMM_SUM, LANE_SUM, gemm, lane_sum

Array = NDArray[Any]

TILE = 64
ONLINE_SOFTMAX = Order(
    "window keys, then selected keys", "gemm", (*GEMM_SUM, *LANE_SUM, ("tile", TILE)),
    "scores, P and the denominator in fp32; P to bf16 for P*V; o to bf16 once, at the end")


@op("q:bf16[N,H*D], k:e4m3[N,D], k_sf:ue8m0[N,F], ring:e4m3[S,W,D], ring_sf:ue8m0[S,W,F], "
    "sink:f32[H], positions:i32[N], request:i32[N], spans:i32[R,4] -> o:bf16[N,H*D]",
    order=ONLINE_SOFTMAX)
def window_attention(q: Array, k: Array, k_sf: Array, ring: Array, ring_sf: Array, sink: Array,
                     positions: Array, request: Array, spans: Array, *, window: int, scale: float
                     ) -> Array:
    """Attention of each row p to the positions max(p-window+1, floor) .. p of its request.

    s = (q.k)*scale; o = sum exp(s-m) k / (sum exp(s-m) + exp(sink-m)), m = max s, as an online
    softmax: per tile m' = max(m, s), a = exp(m-m'), P = exp(s-m'), l = l*a + sum P,
    O = O*a + bf16(P).V; at the end o = bf16(O / (l + exp(sink-m))).

    Args:
        q: queries, H heads. k, k_sf: keys of the step's rows. ring, ring_sf: keys of earlier
            positions, position p in slot p % W, W >= window. sink: logit per head, not scaled.
        positions: of the rows. request: index into spans. spans: (slot, first row, end row, floor)
            of each request, whose positions ascend by 1; floor >= 0 is the first position that is
            seen, but for a row before it, which sees itself alone. window: positions seen.
            scale: D^-0.5.
    Order: q.k in gemm order over D; sum P by ``lane_sum`` (16 lanes) over the tile's 64 keys; P.V
        in gemm order over the 64 keys, continuing from O*a.
    Source: spec §2.4, §4, §11.5.
    """
    out = np.empty(q.shape, q.dtype)
    for row, position in enumerate(positions):
        low = first_seen(position, window, spans[request[row], 3])
        tiles = window_tiles(k, k_sf, ring, ring_sf, positions, spans[request[row]], low, position)
        out[row] = _attend(q[row].reshape(len(sink), -1), tiles, sink, scale)
    return out


@op("q:bf16[N,H*D], k:e4m3[N,D], k_sf:ue8m0[N,F], ring:e4m3[S,W,D], ring_sf:ue8m0[S,W,F], "
    "sink:f32[H], positions:i32[N], request:i32[N], spans:i32[R,4], idx:i32[N,K], pages:i32[R,P], "
    "kv:e2m1[T,E,D], kv_sf:e4m3[T,E,D/16] -> o:bf16[N,H*D]", order=ONLINE_SOFTMAX)
def sparse_attention(q: Array, k: Array, k_sf: Array, ring: Array, ring_sf: Array, sink: Array,
                     positions: Array, request: Array, spans: Array, idx: Array, pages: Array,
                     kv: Array, kv_sf: Array, *, window: int, scale: float) -> Array:
    """``window_attention``, continued over the selected compressed entries in the same softmax.

    Args:
        idx: picks of each row, ascending; -1 is no pick. pages: page table. kv, kv_sf: compressed
            entries, entry j in page pages[request, j // E], slot j % E. The others as there.
    Order: as ``window_attention``; the picks without -1 follow in tiles of 64 ranks.
    Source: spec §2.4, §4, §11.3, §11.5.
    """
    out = np.empty(q.shape, q.dtype)
    for row, position in enumerate(positions):
        low = first_seen(position, window, spans[request[row], 3])
        tiles = [*window_tiles(k, k_sf, ring, ring_sf, positions, spans[request[row]], low,
                               position),
                 *picked_tiles(idx[row], pages[request[row]], kv, kv_sf)]
        out[row] = _attend(q[row].reshape(len(sink), -1), tiles, sink, scale)
    return out


@op("q:bf16[N,H*D], k:e4m3[N,D], k_sf:ue8m0[N,F], ring:e4m3[S,W,D], ring_sf:ue8m0[S,W,F], "
    "sink:f32[H], positions:i32[N], request:i32[N], spans:i32[R,4] -> o:bf16[N,H*D]",
    order=ONLINE_SOFTMAX)
def draft_attention(q: Array, k: Array, k_sf: Array, ring: Array, ring_sf: Array, sink: Array,
                    positions: Array, request: Array, spans: Array, *, window: int, scale: float
                    ) -> Array:
    """Attention of a draft block: each row sees the whole block and the window before it.

    A request's rows are its block, at positions p+1 .. p+block; every one of them sees the ring's
    positions max(p-window+1, floor) .. p and all keys of the block, not only the earlier ones.

    Args: as ``window_attention``; W >= window.
    Order: as ``window_attention``, the block's keys in the same absolute tiles.
    Source: spec §5.3, §11.5.
    """
    out = np.empty(q.shape, q.dtype)
    for row in range(len(q)):
        span = spans[request[row]]
        start = positions[span[1]]
        low = first_seen(start, window + 1, span[3])  # the window before the block, and the block
        tiles = window_tiles(k, k_sf, ring, ring_sf, positions, span, low,
                             start + span[2] - span[1] - 1)
        out[row] = _attend(q[row].reshape(len(sink), -1), tiles, sink, scale)
    return out


def first_seen(position: int, window: int, floor: int) -> int:
    """The first position in the window of ``position``: none before the floor but its own."""
    return min(max(position - window + 1, floor), position)


def window_tiles(k: Array, k_sf: Array, ring: Array, ring_sf: Array, positions: Array, span: Array,
                 low: int, high: int) -> Iterator[tuple[Array, Array]]:
    """(keys bf16[64,D], visible bool[64]) of each tile that meets the positions low..high."""
    slot, first = span[0], span[1]
    start = positions[first]  # older positions are in the ring, these and newer ones in k
    block = k.shape[1] // k_sf.shape[1]
    for base in range(low - low % TILE, high + 1, TILE):
        at = np.arange(base, base + TILE)
        visible = (at >= low) & (at <= high)
        old, new = visible & (at < start), visible & (at >= start)
        keys = np.zeros((TILE, k.shape[1]), BF16)
        places, rows = at[old] % ring.shape[1], first + at[new] - start
        keys[old] = dequantize_fp8(ring[slot, places], ring_sf[slot, places], block)
        keys[new] = dequantize_fp8(k[rows], k_sf[rows], block)
        yield keys, visible


def picked_tiles(picks: Array, pages: Array, kv: Array, kv_sf: Array
                 ) -> Iterator[tuple[Array, Array]]:
    """(keys bf16[64,D], visible bool[64]) of the entries picked, packed; -1 is no pick."""
    picks = picks[picks >= 0]
    for base in range(0, len(picks), TILE):
        part = picks[base : base + TILE]
        places = pages[part // kv.shape[1]], part % kv.shape[1]
        found = dequantize_fp4(kv[places], kv_sf[places], 16)
        keys = np.zeros((TILE, found.shape[1]), BF16)
        keys[: len(part)] = found
        yield keys, np.arange(TILE) < len(part)


def _attend(q: Array, tiles: Any, sink: Array, scale: float) -> Array:
    """One row's online softmax: q bf16[H,D] over its tiles in order -> bf16[H*D]."""
    high = np.full(len(q), -np.inf, np.float32)
    total = np.zeros(len(q), np.float32)
    out = np.zeros(q.shape, np.float32)
    for keys, visible in tiles:
        scores = gemm(q, keys) * np.float32(scale)
        top = np.fmax.reduce(scores[:, visible], axis=1, initial=-np.inf)
        top = np.where(top > high, top, high)
        alpha = exp(high - top)
        p = np.where(visible, exp(scores - top[:, None]), np.float32(0))
        total = total * alpha + lane_sum(p)
        out = gemm(to_bf16(p), np.ascontiguousarray(keys.T), out * alpha[:, None])
        high = top
    return to_bf16(out / (total + exp(sink - high))[:, None]).reshape(-1)
